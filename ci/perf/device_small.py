"""The small kernels on a CUDA device: each checked against torch in float64 (integers: equal), then timed.

    python ci/perf/device_small.py [--rows 1,8,64,256] [--only NAME] [--json FILE] [--no-check]

Times are of one call inside a CUDA graph of ``CALLS`` calls, median of ``REPEATS`` replays; inputs stay in the cache,
as between the kernels of a decode step. Outputs are filled with NaN or the largest integer before each check.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import triton

from drivetrain.ops.reference import REFERENCE
from drivetrain_api.v1 import (
    AddRmsNormSpec,
    DrawSpec,
    EmbeddingSpec,
    GatedActivationSpec,
    KeepSpec,
    OpSpec,
    PrepareInputs,
    PrepareSpec,
    Provided,
    RmsNormSpec,
    RopeAnglesSpec,
    RopeSpec,
    SamplingInputs,
)
from drivetrain_triton.providers import provide_small
from drivetrain_triton.target import Target

CALLS, REPEATS = 20, 9
SIZE, INNER, VOCABULARY, HEADS, DIM = 4096, 14336, 128256, 40, 128
DEVICE = "cuda"


@dataclass(frozen=True)
class Job:
    """``make(rows)``: one call's arguments. ``widened``: the reference computes in float64. ``bytes``: moved a row."""

    name: str
    spec: OpSpec
    make: Callable[[int], tuple[Any, ...]]
    widened: bool = True
    bytes: int = 0


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, device=DEVICE, dtype=dtype)


def layer_jobs() -> Iterator[Job]:
    """Ops of a layer, at the sizes of an 8-billion-parameter model."""
    weight, head_weight = normal(SIZE), normal(DIM)
    rms = RmsNormSpec(dtype="bfloat16", size=SIZE, eps=1e-5)
    yield Job("rms", rms, lambda n: (normal(n, SIZE), weight), bytes=4 * SIZE)
    add = AddRmsNormSpec(dtype="bfloat16", size=SIZE, eps=1e-5)
    yield Job("add_rms", add, lambda n: (normal(n, SIZE), normal(n, SIZE), weight), bytes=8 * SIZE)
    wide = replace(add, offset=1.0, round_before_weight=True)
    stream = torch.float32
    yield Job("add_rms f32", wide, lambda n: (normal(n, SIZE), normal(n, SIZE, dtype=stream), weight), bytes=12 * SIZE)
    heads = RmsNormSpec(dtype="bfloat16", size=DIM, eps=1e-5)
    fused = HEADS + 8
    yield Job("head rms", heads, lambda n: (normal(n, fused, DIM)[:, :HEADS], head_weight), bytes=4 * HEADS * DIM)
    for kind in ("silu", "gelu", "gelu_tanh"):
        spec = GatedActivationSpec(dtype="bfloat16", size=INNER, kind=kind)
        yield Job(kind, spec, lambda n: (normal(n, 2 * INNER, scale=2.0),), bytes=6 * INNER)
    for style in ("halves", "interleaved"):
        spec = RopeSpec(dtype="bfloat16", head_dim=DIM, rotary_dim=DIM, style=style)
        yield Job(f"rope {style}", spec, rope_arguments, bytes=4 * HEADS * DIM)


def rope_arguments(rows: int) -> tuple[torch.Tensor, ...]:
    angle = normal(rows, DIM // 2, dtype=torch.float32, scale=3.0)
    return normal(rows, HEADS + 8, DIM)[:, :HEADS], angle.cos(), angle.sin()


def step_jobs() -> Iterator[Job]:
    """Ops of a step: the tables of angles, the lookup, preparation of decode rows, what is kept."""
    inv_freq = (500000.0 ** -(torch.arange(DIM // 2, device=DEVICE) / (DIM // 2))).to(torch.float32)
    angles = RopeAnglesSpec(dtype="float32", rotary_dim=DIM)
    yield Job("angles", angles, lambda n: (integers(0, 131072, n), inv_freq))
    table = normal(VOCABULARY, SIZE)
    lookup = EmbeddingSpec(dtype="bfloat16", vocabulary=VOCABULARY, size=SIZE)
    yield Job("embedding", lookup, lambda n: (integers(0, VOCABULARY, n), table), bytes=4 * SIZE)
    prepare = PrepareSpec(dtype="int32", block_tokens=(16,))
    yield Job("prepare decode", prepare, lambda n: decode_rows(n, 1), widened=False)
    yield Job("prepare 2 groups", replace(prepare, block_tokens=(16, 32)), lambda n: decode_rows(n, 2), widened=False)
    yield Job("prepare prefill", prepare, prefill_rows, widened=False)
    keep = KeepSpec(dtype="int32")
    yield Job("keep", keep, kept_rows, widened=False)


def kept_rows(rows: int) -> tuple[torch.Tensor, ...]:
    places = torch.randperm(rows + 1, device=DEVICE)[:rows].to(torch.int32)
    tokens = integers(0, 9000, rows)
    return tokens, normal(rows, dtype=torch.float32), places, integers(0, 9000, rows + 1, 1)


def decode_rows(rows: int, groups: int, queries: int = 1, start: int = -1) -> tuple[Any, ...]:
    """``rows`` rows of ``queries`` tokens each, the blocks of 8,192 tokens; the last a padding row."""
    widths = tuple(8192 // 16 // (g + 1) for g in range(groups))
    tables = tuple(integers(0, 20000, rows + 1, w) for w in widths)
    computed = integers(0, 8000, rows + 1)
    computed[-1] = 0
    token_row = torch.arange(rows, dtype=torch.int32, device=DEVICE).repeat_interleave(queries)
    order = torch.randperm(rows, device=DEVICE).to(torch.int32)
    new = torch.full((rows,), queries, dtype=torch.int32, device=DEVICE)
    if rows > 1:
        order[-1], new[-1] = rows, 0
    inputs = PrepareInputs(
        rows=order,
        start=torch.full_like(order, start),
        token_row=token_row,
        token_offset=torch.arange(queries, dtype=torch.int32, device=DEVICE).repeat(rows),
        host_ids=integers(0, 9000, rows * queries),
        num_new=new,
        computed=computed,
        last_tokens=integers(0, 9000, rows + 1, 1),
        block_tables=tables,
    )
    return inputs, widths


def prefill_rows(rows: int) -> tuple[Any, ...]:
    """8,192 tokens over as many rows, from their own starts on."""
    return decode_rows(rows, 1, 8192 // rows, 0)


def sampling(rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingInputs:
    full = lambda value, dtype=torch.float32: torch.full((rows,), value, dtype=dtype, device=DEVICE)  # noqa: E731
    return SamplingInputs(
        temperature=full(temperature),
        top_k=full(top_k, torch.int32),
        top_p=full(top_p),
        min_p=full(min_p),
        seed=torch.arange(rows, device=DEVICE) * 7919 + 1,
        position=integers(0, 8192, rows),
        sample=full(0, torch.int32),
        mask=None,
        all_greedy=temperature == 0,
        any_top_k=top_k > 0,
        any_top_p=top_p < 1,
        any_min_p=min_p > 0,
    )


def draw_jobs() -> Iterator[Job]:
    """Greedy, plain temperature, and each filter over the whole vocabulary."""
    for name, settings, dtype in (
        ("greedy", {"temperature": 0.0}, torch.bfloat16),
        ("greedy f32", {"temperature": 0.0}, torch.float32),
        ("temperature", {"temperature": 0.8}, torch.float32),
        ("top-k 50", {"temperature": 0.8, "top_k": 50}, torch.float32),
        ("top-p 0.9", {"temperature": 0.8, "top_p": 0.9}, torch.float32),
        ("top-k, top-p bf16", {"temperature": 0.8, "top_k": 50, "top_p": 0.9}, torch.bfloat16),
        ("min-p 0.05", {"temperature": 0.8, "min_p": 0.05}, torch.float32),
    ):
        spec = DrawSpec(dtype=str(dtype).removeprefix("torch."), vocabulary=VOCABULARY)

        def make(rows: int, settings: Any = settings, dtype: torch.dtype = dtype) -> tuple[Any, ...]:
            return normal(rows, VOCABULARY, dtype=dtype, scale=2.5), sampling(rows, **settings), 0

        yield Job(name, spec, make, widened=False, bytes=VOCABULARY * dtype.itemsize)


def flat(results: Any) -> list[torch.Tensor]:
    """Every tensor of an op's results."""
    if isinstance(results, torch.Tensor):
        return [results]
    if isinstance(results, tuple):
        return [t for each in results for t in flat(each)]
    return [t for f in fields(results) for t in flat(getattr(results, f.name))]


def copied(arguments: tuple[Any, ...], widened: bool) -> tuple[Any, ...]:
    """The reference's own arguments: tables that an op writes are not shared; with ``widened`` in float64."""
    out: list[Any] = []
    for value in arguments:
        if isinstance(value, PrepareInputs):
            out.append(replace(value, computed=value.computed.clone()))
        elif isinstance(value, torch.Tensor):
            out.append(value.double() if widened and value.is_floating_point() else value.clone())
        else:
            out.append(value)
    return tuple(out)


def expected(job: Job, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    own = copied(arguments, job.widened)
    if isinstance(job.spec, AddRmsNormSpec):  # the sum is rounded to the residual's dtype first
        total = arguments[0] + arguments[1]
        spec = RmsNormSpec(dtype="float64", size=job.spec.size, eps=job.spec.eps, offset=job.spec.offset)
        return [REFERENCE[spec.op].make(spec)(total.double(), own[2]), total]
    if isinstance(job.spec, RopeAnglesSpec):
        phase = (arguments[0].to(torch.float32).unsqueeze(-1) * arguments[1]).double()
        return [phase.cos(), phase.sin()]
    results = flat(REFERENCE[job.spec.op].make(job.spec)(*own))
    return results + written(job.spec, own)


def written(spec: OpSpec, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """The argument that the op changes."""
    if isinstance(spec, PrepareSpec):
        return [arguments[0].computed]
    return [arguments[3]] if isinstance(spec, KeepSpec) else []


def check(job: Job, call: Any, rows: int) -> str:
    """Empty where the results are right."""
    arguments = job.make(rows)
    want = expected(job, arguments)
    got = flat(call(*arguments)) + written(job.spec, arguments)
    tolerance = REFERENCE[job.spec.op].tolerance(job.spec.dtype)
    worst = 0.0
    for one, other in zip(got, want, strict=True):
        slack = tolerance.atol + tolerance.rtol * other.double().abs()
        excess = ((one.double() - other.double()).abs() - slack).nan_to_num(nan=1e9)
        worst = max(worst, float(excess.max())) if one.numel() else worst
    return "" if worst <= 0 else f"WRONG by {worst:.3g}"


def microseconds(call: Any, arguments: tuple[Any, ...]) -> float:
    """Of one call inside a graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call(*arguments)
    graph.replay()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times)


def measure(job: Job, target: Target, counts: list[int], checks: bool) -> dict[str, Any]:
    answer = provide_small(job.spec, target)
    assert isinstance(answer, Provided), answer
    begin = time.perf_counter()
    problems = {}
    if checks:
        torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then fills with NaN or the largest
        for rows in (1, 5):
            problem = check(job, answer.implementation, rows)
            if problem:
                problems[rows] = problem
        torch.use_deterministic_algorithms(False)
    times = {}
    for rows in counts:
        try:
            times[rows] = microseconds(answer.implementation, job.make(rows))
        except torch.cuda.OutOfMemoryError:
            times[rows] = float("nan")
    rate = job.bytes * counts[-1] / times[counts[-1]] / 1e6 if job.bytes else 0.0
    text = "  ".join(f"{times[rows]:9.2f}" for rows in counts)
    verdict = str(problems) if problems else ("right" if checks else "")
    print(f"{job.name:20s} {text}  {rate:6.2f} TB/s  {verdict}  ({time.perf_counter() - begin:.1f} s)", flush=True)
    return {"name": job.name, "microseconds": times, "problems": problems, "terabytes_per_second": rate}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", default="")
    parser.add_argument("--no-check", action="store_true")
    options = parser.parse_args()
    counts = [int(n) for n in options.rows.split(",")]
    facts = torch.cuda.get_device_properties(0)
    arch = facts.major * 10 + facts.minor
    target = Target(
        kind="cuda",
        arch=arch,
        multiprocessors=facts.multi_processor_count,
        shared_bytes=facts.shared_memory_per_block_optin,
        overlaps=arch >= 90,
    )
    torch.manual_seed(0)
    head = {"device": facts.name, "torch": torch.__version__, "triton": triton.__version__, "calls": CALLS}
    print(head, "microseconds a call at rows", counts)
    results = []
    for jobs in (layer_jobs, step_jobs, draw_jobs):
        for job in jobs():
            if options.only in job.name:
                results.append(measure(job, target, counts, not options.no_check))
                if options.json:
                    with open(options.json, "w", encoding="utf-8") as file:
                        json.dump(head | {"results": results}, file, indent=1)
    return 1 if any(r["problems"] for r in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
