"""Speed of the CPU backend's ops against the memory bandwidth of the same run.

    python ci/perf/cpu_ops.py [--threads N] [--quick] [--json FILE]

Bandwidth is the best of several sums over a buffer far larger than the caches, by as many threads. Each figure is the
best of several rounds; weights and caches are rotated over copies that do not fit in the caches together.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch

from drivetrain.ops.cases.attention import Shape, make_batch, make_rows, make_spec
from drivetrain.ops.cases.sampling import sampling_inputs
from drivetrain.ops.cases.source import Source
from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import (
    Backend,
    BatchFacts,
    CacheHandle,
    ConfigView,
    DrawSpec,
    LinearSpec,
    OpSpec,
    Provided,
    RmsNormSpec,
    dtype_bytes,
)
from drivetrain_cpu.plugin import plugin, processor_name

COLD_BYTES = 256 << 20
MODELS = {
    "qwen3-0.6b": Shape(heads=16, kv_heads=8, head_dim=128, v_head_dim=128),
    "gemma3-270m": Shape(heads=4, kv_heads=1, head_dim=256, v_head_dim=256),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One timing. ``share``: of the bandwidth, counting the bytes that the op must move at least."""

    op: str
    case: str
    label: str
    microseconds: float
    gb_per_s: float
    share: float
    gflop_per_s: float


def best_seconds(run: Callable[[int], object], rounds: int, calls: int) -> float:
    """Return the least mean time of a call over the rounds."""
    run(0)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for i in range(calls):
            run(i)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def rotate(function: Callable[..., object], x: torch.Tensor, others: Sequence[object]) -> Callable[[int], object]:
    """Call with x and each of the others in turn."""
    return lambda i: function(x, others[i % len(others)])


def read_bandwidth() -> float:
    """Return bytes a second of summing 512 MiB."""
    buffer = torch.ones(128 << 20, dtype=torch.float32)
    return buffer.numel() * 4 / best_seconds(lambda i: buffer.sum(), 7, 1)


def figure(spec: OpSpec, case: str, label: str, facts: BatchFacts, timing: tuple[float, float]) -> Figure:
    """``timing``: seconds of a call and the bandwidth of the run."""
    seconds, bandwidth = timing
    cost = REFERENCE[spec.op].cost(spec, facts)
    return Figure(
        op=spec.op,
        case=case,
        label=label,
        microseconds=round(seconds * 1e6, 1),
        gb_per_s=round(cost.bytes / seconds / 1e9, 2),
        share=round(cost.bytes / seconds / bandwidth, 3),
        gflop_per_s=round(cost.operations / seconds / 1e9, 1),
    )


def facts_of(tokens: int, rows: int, length: int = 1) -> BatchFacts:
    return BatchFacts(
        num_tokens=tokens,
        num_rows=rows,
        decode_only=tokens == rows,
        max_query_len=-(-tokens // max(rows, 1)),
        max_length_bound=length,
    )


def provided(backend: Backend, spec: OpSpec) -> Provided:
    """Return the backend's implementation, the reference's where it declines."""
    answer = backend.provide(spec)
    if isinstance(answer, Provided):
        return answer
    return Provided(implementation=REFERENCE[spec.op].make(spec), label="reference")


def linears(backend: Backend, bandwidth: float, rows: tuple[int, ...]) -> Iterator[Figure]:
    """A wide linear of a small model, and an LM head."""
    for dtype in ("bfloat16", "float32"):
        for size_in, size_out, tied in ((1024, 4096, False), (640, 65536, True)):
            spec = LinearSpec(
                dtype=dtype, in_features=size_in, out_features=size_out, tied=tied, role="lm_head" if tied else "other"
            )
            answer = provided(backend, spec)
            linear = answer.implementation
            copies = max(1, COLD_BYTES // (size_in * size_out * dtype_bytes(dtype)))
            source = Source(dtype, 0)
            weights = [source.normal(size_out, size_in, scale=size_in**-0.5) for _ in range(copies)]
            packed = [linear.pack(w, None) for w in weights]
            for count in rows if not tied else rows[:3]:
                x = source.normal(count, size_in)
                calls = max(copies, 8) if count < 64 else 2
                seconds = best_seconds(rotate(linear.apply, x, packed), 5, calls)
                case = f"{dtype}, {count} rows, {size_in} to {size_out}"
                yield figure(spec, case, answer.label, facts_of(count, count), (seconds, bandwidth))


def attentions(backend: Backend, bandwidth: float, lengths: tuple[int, ...]) -> Iterator[Figure]:
    """Decode rows of one length, and one prefill of 1,024 tokens."""
    place = Place(runtime=backend.device, storage=backend.storage)
    for model, shape in MODELS.items():
        for dtype in ("bfloat16", "float32"):
            spec = make_spec(place, shape, dtype)
            answer = provided(backend, spec)
            for count in (1, 8, 32):
                for length in lengths:
                    seconds = time_attention(place, answer, spec, ((length, 1),) * count)
                    case = f"{model}, {dtype}, {count} decode rows of {length}"
                    facts = facts_of(count, count, length)
                    yield figure(spec, case, answer.label, facts, (seconds, bandwidth))
            seconds = time_attention(place, answer, spec, ((1024, 1024),))
            case = f"{model}, {dtype}, prefill of 1024"
            yield figure(spec, case, answer.label, facts_of(1024, 1, 1024), (seconds, bandwidth))


def time_attention(place: Place, answer: Provided, spec: OpSpec, lengths: tuple[tuple[int, int], ...]) -> float:
    """Return the seconds of one forward; the plan is made once, as for all layers of a step."""
    rows = make_rows(lengths, spec.layout.block_tokens, 0, np.random.default_rng(0))
    nbytes = rows.num_blocks * spec.layout.bytes_per_block
    caches: list[CacheHandle] = []
    for _ in range(max(1, min(24, COLD_BYTES // nbytes))):
        cache = place.storage.allocate(spec.layout, rows.num_blocks)
        for part in cache.parts:
            part.copy_(torch.randn(part.shape[1:]).to(part.dtype))
        caches.append(cache)
    attention = answer.implementation
    plan = attention.plan(make_batch(place, rows, spec.layout.slot_dtype))
    q = Source(spec.dtype, 1).normal(sum(rows.queries), spec.num_heads, spec.head_dim)
    calls = len(caches) if nbytes < (64 << 20) else 2
    return best_seconds(lambda i: attention.forward(q, caches[i % len(caches)], plan), 4, max(2, calls))


def others(backend: Backend, bandwidth: float) -> Iterator[Figure]:
    """A norm at one row and at many, and draws over a large vocabulary."""
    for count in (1, 1024):
        norm = RmsNormSpec(dtype="bfloat16", size=1024, eps=1e-6)
        answer = provided(backend, norm)
        x, weight = Source("bfloat16", 2).normal(count, 1024), Source("bfloat16", 3).normal(1024)
        seconds = best_seconds(rotate(answer.implementation, x, [weight]), 5, 20)
        yield figure(
            norm, f"bfloat16, {count} rows of 1024", answer.label, facts_of(count, count), (seconds, bandwidth)
        )
    for filters in (False, True):
        spec = DrawSpec(dtype="float32", vocabulary=262_144)
        answer = provided(backend, spec)
        source = Source("float32", 4)
        inputs = sampling_inputs(source, 3, spec.vocabulary, filters=filters)
        logits = source.normal(3, spec.vocabulary, scale=3.0)
        seconds = best_seconds(rotate(partial(answer.implementation, stream=0), logits, [inputs]), 4, 1)
        case = f"3 rows of 262144, one greedy, filters {filters}"
        yield figure(spec, case, answer.label, facts_of(3, 3), (seconds, bandwidth))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None, help="default: the cores that this process may use")
    parser.add_argument("--deterministic", action="store_true", help="time the batch-invariant variants")
    parser.add_argument("--quick", action="store_true", help="fewer lengths and row counts")
    parser.add_argument("--json", metavar="FILE", default=None)
    args = parser.parse_args()
    backend = plugin.create((0,), ConfigView(num_threads=args.threads, deterministic=args.deterministic))
    bandwidth = read_bandwidth()
    print(f"{torch.get_num_threads()} threads read {bandwidth / 1e9:.1f} GB/s", file=sys.stderr)
    rows = (1, 8, 32) if args.quick else (1, 2, 4, 8, 16, 32, 128, 1024)
    lengths = (128, 1024) if args.quick else (128, 512, 1024, 4096)
    figures = []
    for found in (
        linears(backend, bandwidth, rows),
        attentions(backend, bandwidth, lengths),
        others(backend, bandwidth),
    ):
        for f in found:
            line = f"{f.microseconds:11.1f} us {f.gb_per_s:7.2f} GB/s {f.share:6.1%} {f.gflop_per_s:8.1f} GFLOP/s"
            print(f"{line}  {f.op} {f.case} [{f.label[:40]}]", file=sys.stderr)
            figures.append(asdict(f))
    result = {
        "processor": processor_name(),
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "deterministic": args.deterministic,
        "read_gb_per_s": round(bandwidth / 1e9, 2),
        "bandwidth_again_gb_per_s": round(read_bandwidth() / 1e9, 2),
        "figures": figures,
    }
    text = json.dumps(result, indent=1)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
