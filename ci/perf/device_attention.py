"""Paged attention on a device: checked against float64, then timed in graphs over caches larger than its L2.

python ci/perf/device_attention.py --json FILE [--only check,decode,carveout,prefill,rotate] [--shapes A,C]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "plugins" / "api"), str(ROOT / "plugins" / "triton")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402

from drivetrain_api.v1 import (  # noqa: E402  # noqa: E402
    AttentionBatch,
    AttentionSpec,
    CacheLayout,
    CachePart,
    CacheSpec,
    RmsNormSpec,
    RopeSpec,
    torch_dtype,
)
from drivetrain_triton.attention import TritonAttention  # noqa: E402
from drivetrain_triton.attention_choice import Tiles, prefill_tiles  # noqa: E402
from drivetrain_triton.attention_decode import decode_kernel  # noqa: E402
from drivetrain_triton.attention_rotate import RotateAndWrite  # noqa: E402
from drivetrain_triton.attention_write import rotate_kernel  # noqa: E402
from drivetrain_triton.target import Target  # noqa: E402

SHAPES = {"A": (32, 8, 128), "C": (16, 8, 128)}


@dataclass(frozen=True)
class Variant:
    """(BLOCK_N, warps, stages, programs wanted a multiprocessor), keys asked for ahead, keys of the row that comes
    later, whether lengths and tables are read before the wait, and whether the kernel ahead then lets it begin late."""

    tiles: tuple[int, int, int, int] = (64, 4, 2, 4)
    ahead: int = 0
    later: int = 0
    early: bool = True

    def __str__(self) -> str:
        marks = [f"+{self.ahead}"] if self.ahead else []
        marks += [f"L{self.later}"] if self.later else []
        return "/".join(map(str, self.tiles)) + "".join(marks) + ("" if self.early else "w")


DECODE = [
    Variant(), Variant(early=False), Variant(ahead=128), Variant(tiles=(64, 2, 2, 4)), Variant(tiles=(64, 8, 2, 4)),
    Variant(tiles=(64, 4, 2, 8)), Variant(tiles=(64, 4, 1, 4)), Variant(tiles=(32, 2, 2, 4)), Variant(tiles=(32, 4, 2, 4)),
    Variant(tiles=(32, 2, 3, 4)), Variant(tiles=(32, 4, 4, 4)), Variant(tiles=(32, 1, 2, 4)), Variant(tiles=(16, 2, 4, 4)),
    Variant(tiles=(128, 8, 2, 4)),
]  # fmt: skip
# (BLOCK_M, BLOCK_N, warps, stages); None: the table's.
PREFILL = [
    None, (128, 64, 8, 3), (128, 64, 8, 5), (128, 64, 8, 6), (64, 64, 4, 2), (64, 32, 4, 4), (64, 32, 4, 5),
]  # fmt: skip
# (rows, length, the bound by which shares are chosen, as in a captured graph)
DECODE_POINTS = [
    (1, 208, 208), (1, 208, 4096), (8, 208, 208), (8, 208, 4096), (64, 208, 208), (256, 208, 208), (256, 1024, 1024),
    (1, 8192, 8192), (1, 100_000, 100_000),
]  # fmt: skip
# (rows, length, queries)
PREFILL_POINTS = [(16, 4096, 4096), (1, 100_000, 8192), (1, 4112, 16), (64, 1024, 4)]
BLOCK, L2_BYTES, WORKERS = 16, 150 << 20, 12
device = torch.device("cuda")
Tensor, Rows = torch.Tensor, list[tuple[int, int]]


class Cache:
    """Blocks of one pool of keys and values, [blocks, 2, BLOCK, heads, size]."""

    def __init__(self, pool: torch.Tensor, first: int, count: int) -> None:
        self.parts = pool[first : first + count, 0], pool[first : first + count, 1]


def target() -> Target:
    properties = torch.cuda.get_device_properties(device)
    return Target(
        kind="cuda",
        arch=properties.major * 10 + properties.minor,
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
        overlaps=properties.major >= 9,
    )


def spec_of(heads: int, kv_heads: int, size: int, dtype: str = "bfloat16", **rules: Any) -> AttentionSpec:
    parts = tuple(CachePart(name=name, shape=(kv_heads, size), dtype=dtype) for name in "kv")
    layout = CacheLayout(
        spec=CacheSpec(kind="full", parts=parts),
        block_tokens=BLOCK,
        bytes_per_block=2 * BLOCK * kv_heads * size * 2,
        alignment=64,
        strided=True,
        slot_dtype="int32",
    )
    return AttentionSpec(
        dtype=dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=size, v_head_dim=size, scale=size**-0.5,
        layout=layout, **rules,
    )  # fmt: skip


def batch_of(rows: Rows, slack: int = 0) -> tuple[AttentionBatch, int]:
    """Rows of (length, queries), decode first -> the batch and the blocks that it needs, null block included."""
    lengths, queries = (np.asarray(each) for each in zip(*rows, strict=True))
    start = np.cumsum([0, *queries]).astype(np.int32)
    needed = -(-lengths // BLOCK)
    order = np.random.default_rng(0).permutation(np.arange(1, needed.sum() + 1))
    table = np.zeros((len(rows), needed.max() + 1), np.int32)
    table[np.arange(table.shape[1])[None, :] < needed[:, None]] = order
    row = np.repeat(np.arange(len(rows)), queries)
    position = np.arange(start[-1]) - start[row] + (lengths - queries)[row]
    position = np.where(lengths[row] > 0, position, 0)
    slots = np.where(lengths[row] > 0, table[row, position // BLOCK] * BLOCK + position % BLOCK, 0)

    def dev(values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, np.int32), device=device)

    decode = int((queries <= 1).sum())
    batch = AttentionBatch(
        query_start_dev=dev(start), lengths_dev=dev(lengths), block_table_dev=dev(table), slots_dev=dev(slots),
        token_row_dev=dev(row), positions_dev=dev(position), query_start_host=start,
        length_bounds_host=(lengths + slack).astype(np.int32), host_lengths_exact=slack == 0, num_decode_rows=decode,
        num_verify_rows=0, num_prefill_rows=len(rows) - decode, max_query_len=int(queries.max()),
        max_length_bound=int(lengths.max()) + slack,
    )  # fmt: skip
    return batch, int(needed.sum()) + 1


def dense(spec: AttentionSpec, q: Tensor, cache: Cache, batch: AttentionBatch, rows: Rows, sinks: Any) -> Tensor:
    """Attention in float64, a row at a time."""
    out = torch.zeros(*q.shape[:2], spec.v_head_dim, dtype=torch.float64, device=device)
    for row, (length, queries) in enumerate(rows):
        if length == 0 or queries == 0:
            continue
        begin, at = int(batch.query_start_host[row]), torch.arange(length, device=device)
        ids = batch.block_table_dev[row, at // BLOCK].long()
        group = spec.num_heads // spec.num_kv_heads
        k, v = (part[ids, at % BLOCK].double().repeat_interleave(group, 1) for part in cache.parts)
        positions = torch.arange(length - queries, length, device=device)
        seen = at[None, :] <= positions[:, None] if spec.causal else at[None, :] >= 0
        if spec.window is not None:
            seen = seen & (at[None, :] > positions[:, None] - spec.window)
        scores = torch.einsum("qhd,khd->hqk", q[begin : begin + queries].double(), k) * spec.scale
        if spec.soft_cap is not None:
            scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, queries, 1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out[begin : begin + queries] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors of floats hold NaN."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def fill(x: Tensor) -> Tensor:
        return x.fill_(float("nan")) if x.is_floating_point() else x

    torch.empty = lambda *args, **named: fill(empty(*args, **named))
    torch.Tensor.new_empty = lambda *args, **named: fill(new_empty(*args, **named))
    try:
        yield
    finally:
        torch.empty, torch.Tensor.new_empty = empty, new_empty


CHECKS = [
    ("A decode", (32, 8, 128), {}, [(1000, 1), (1, 1), (64, 1), (65, 1), (4097, 1), (0, 1)]),
    ("A one row", (32, 8, 128), {}, [(9000, 1)]),
    ("A many rows", (32, 8, 128), {}, [(100 + 7 * i, 1) for i in range(100)]),
    ("A mixed", (32, 8, 128), {}, [(300, 1), (70, 1), (200, 4), (500, 500), (1500, 300), (3, 3)]),
    ("C short chunk of many keys", (16, 8, 128), {}, [(8000, 16)]),
    ("window", (8, 2, 64), {"window": 100}, [(1000, 1), (50, 1), (700, 300)]),
    ("window, sinks", (16, 2, 64), {"window": 128, "sinks": True}, [(1000, 1), (50, 1), (700, 300)]),
    ("soft cap", (8, 4, 256), {"soft_cap": 30.0}, [(700, 1), (600, 300)]),
    ("group of 7, 80 wide", (14, 2, 80), {}, [(700, 1), (600, 300)]),
    ("not causal", (4, 4, 64), {"causal": False}, [(700, 1), (600, 300)]),
]


def check_all(results: list[dict], part: slice = slice(None)) -> None:
    """All checks in bfloat16, every third in float16 and float32 too."""
    cases = [(check, "bfloat16") for check in CHECKS] + list(product(CHECKS[::3], ("float16", "float32")))
    for (name, sizes, rules, rows), dtype in cases[part]:
        spec = spec_of(*sizes, dtype=dtype, **rules)
        batch, blocks = batch_of(rows, slack=5)
        torch.manual_seed(time.time_ns() % (1 << 31))
        made = torch_dtype(dtype)
        pool = torch.randn(blocks, 2, BLOCK, *spec.layout.spec.parts[0].shape, device=device).to(made)
        pool[0] = float("nan")
        cache = Cache(pool, 0, blocks)
        q, k, v = (
            torch.randn(batch.num_tokens, n, spec.head_dim, device=device).to(made)
            for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        sinks = torch.randn(spec.num_heads, device=device).to(made) if spec.sinks else None
        attention = TritonAttention(spec, target())
        with poisoned():
            plan = attention.plan(batch)
            attention.write(cache, k, v, plan)
            out = attention.forward(q, cache, plan, sinks)
        want = dense(spec, q, cache, batch, rows, sinks)
        written = batch.slots_dev.long()
        kept = torch.equal(cache.parts[0][written // BLOCK, written % BLOCK][written > 0], k[written > 0])
        error = float((out.double() - want).norm() / want.norm())
        limit = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 3e-6}[dtype]
        results.append({"check": name, "dtype": dtype, "error": error, "ok": bool(error < limit and kept)})
        print(f"{'ok  ' if results[-1]['ok'] else 'BAD '} {name:28s} {dtype:9s} {error:.1e}", flush=True)


def graph_time(layers: list[Callable[[], Tensor]], repeats: int = 7) -> tuple[float, Tensor]:
    """Return the median seconds of one call, from a graph of one call a layer, and the last call's result."""
    for run in layers[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run() for run in layers]
    times = []
    for number in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end) / 1e3 / len(layers))
    return statistics.median(times), kept[-1].clone()


def layers_of(spec: AttentionSpec, pool: torch.Tensor, blocks: int) -> list[Cache]:
    size = blocks * pool[0].numel() * 2
    count = max(1, min(160, -(-L2_BYTES // size), len(pool) // blocks))
    return [Cache(pool, i * blocks, blocks) for i in range(count)]


def time_forward(spec: AttentionSpec, pool: Tensor, rows: Rows, chunk: Tiles | None = None) -> tuple[float, int]:
    """Return the seconds of one layer and its shares; ``chunk`` replaces the table's choice."""
    batch, blocks = batch_of(rows)
    attention = TritonAttention(spec, target())
    attention.prefill_tiles = chunk
    plan = attention.plan(batch)
    q = torch.randn(batch.num_tokens, spec.num_heads, spec.head_dim, device=device, dtype=torch.bfloat16)
    layers = layers_of(spec, pool, blocks)
    runs = [partial(attention.forward, q, cache, plan) for cache in layers]
    part = plan.decode or plan.prefill
    return graph_time(runs)[0], part.splits


def time_chain(
    spec: AttentionSpec, pool: Tensor, count: int, context: int, bound: int, variant: Variant
) -> tuple[float, int, bool]:
    """Return the seconds of a layer's two kernels, norm + rope + write and attention of decode rows, the shares, and
    whether the last layer's result is that of the same two kernels apart."""
    batch, blocks = batch_of([(context, 1)] * count, slack=bound - context)
    attention = TritonAttention(spec, target())
    attention.decode_tiles = Tiles(attention.decode_tiles.block_m, *variant.tiles[:3])
    attention.programs_wanted = variant.tiles[3]
    attention.early, attention.ahead, attention.later = variant.early, variant.ahead, variant.later
    norm = RmsNormSpec(dtype="bfloat16", size=128, eps=1e-6)
    rotate = RotateAndWrite(norm, RopeSpec(dtype="bfloat16", head_dim=128, rotary_dim=128), spec, target())
    rotate.late = variant.early
    plan = attention.plan(batch)
    turned = spec.num_heads + spec.num_kv_heads
    x = torch.randn(count, turned + spec.num_kv_heads, 128, device=device).bfloat16()
    weight, angle = torch.ones(turned, 128, device=device).bfloat16(), torch.randn(count, 64, device=device)
    cos, sin = angle.cos(), angle.sin()

    def layer(cache: Cache, apart: bool = False) -> Tensor:
        q = rotate(x, weight, cos, sin, cache, plan)
        if apart:
            torch.cuda.synchronize()
        return attention.forward(q, cache, plan)

    layers = layers_of(spec, pool, blocks)
    seconds, out = graph_time([partial(layer, cache) for cache in layers])
    return seconds, plan.decode.splits, torch.equal(out, layer(layers[-1], apart=True))


def time_decode(shape: str, pool: Tensor, results: list[dict]) -> None:
    """Each line a variant, each column a point."""
    spec = spec_of(*SHAPES[shape])
    heads = [f"{count}x{context}" + (f"/{bound}" if bound > context else "") for count, context, bound in DECODE_POINTS]
    floors = [
        count * context * 2 * spec.num_kv_heads * spec.head_dim * 2 / 4.6e6 for count, context, _ in DECODE_POINTS
    ]
    print(f"\n{shape} norm + rope + write, then decode attention: us of both (shares; ! where wrong)")
    print(f"{'':18s}" + "".join(f"{head:>14s}" for head in heads))
    print(f"{'read at 4.6 TB/s':18s}" + "".join(f"{floor:10.1f}    " for floor in floors))
    for variant in DECODE if shape == "A" else DECODE[:1]:
        cells = []
        for count, context, bound in DECODE_POINTS:
            seconds, splits, same = time_chain(spec, pool, count, context, bound, variant)
            point = {"shape": shape, "batch": count, "context": context, "bound": bound, "variant": str(variant)}
            results.append(point | {"splits": splits, "us": seconds * 1e6, "ok": same})
            cells.append(f"{seconds * 1e6:9.1f}({splits:2d}){' ' if same else '!'}")
        print(f"{variant!s:18s}" + "".join(cells), flush=True)


def prefer_shared(percent: int) -> None:
    """Ask that every multiprocessor keep so much of its first-level memory as shared memory under these kernels."""
    driver, preferred_carveout = ctypes.CDLL("libcuda.so.1"), 9
    for kernel in (decode_kernel, rotate_kernel):
        for cached in kernel.device_caches.values():
            for made in cached[0].values():
                driver.cuFuncSetAttribute(ctypes.c_void_p(made.function), preferred_carveout, percent)


def time_carveout(shape: str, pool: Tensor, results: list[dict]) -> None:
    """The first variant once more, with the same split of first-level memory for both kernels: no switch between."""
    global DECODE
    kept, DECODE = DECODE, DECODE[:1]
    try:
        time_chain(spec_of(*SHAPES[shape]), pool, 1, 208, 208, DECODE[0])
        prefer_shared(100)
        print("\nAll as shared memory:", end="")
        time_decode(shape, pool, results)
    finally:
        DECODE = kept


def time_prefill(shape: str, pool: Tensor, results: list[dict]) -> None:
    spec = spec_of(*SHAPES[shape])
    print(f"\n{shape} prefill, TFLOP/s (us, splits) by (rows, keys, warps, stages): {' '.join(map(str, PREFILL))}")
    for count, length, queries in PREFILL_POINTS:
        cells = []
        work = 4 * spec.num_heads * spec.head_dim * count * queries * (length - queries / 2)
        for variant in PREFILL:
            if variant and (queries < 1000 or shape != "A"):
                continue
            chunk = Tiles(*variant) if variant else None
            try:
                seconds, splits = time_forward(spec, pool, [(length, queries)] * count, chunk)
            except triton.runtime.errors.OutOfResources:
                cells.append("too large        ")
                continue
            point = {"shape": shape, "rows": count, "length": length, "queries": queries, "splits": splits}
            point["variant"] = variant or str(prefill_tiles(spec, target(), queries))
            results.append(point | {"us": seconds * 1e6, "TFLOP/s": work / seconds / 1e12})
            cells.append(f"{work / seconds / 1e12:5.0f} ({seconds * 1e6:7.1f},{splits:2d})")
        print(f"{count:3d} x {queries:5d} of {length:6d}  " + "  ".join(cells), flush=True)


def rotated(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """The turned query and key heads, in float32, each step rounded."""
    y = x[:, : len(weight)].float()
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype).float()
    a, b = y.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def time_rotate(shape: str, pool: Tensor, results: list[dict]) -> None:
    spec = spec_of(*SHAPES[shape])
    norm = RmsNormSpec(dtype="bfloat16", size=128, eps=1e-6)
    fused = RotateAndWrite(norm, RopeSpec(dtype="bfloat16", head_dim=128, rotary_dim=128), spec, target())
    turned = spec.num_heads + spec.num_kv_heads
    print(f"\n{shape} norm + rope + write: tokens, us, TB/s, error")
    for tokens in (1, 8, 64, 256, 8192):
        batch, blocks = batch_of([(300, 1)] * tokens if tokens < 1000 else [(tokens, tokens)])
        plan = TritonAttention(spec, target()).plan(batch)
        sets = max(1, min(32, (L2_BYTES // (tokens * 48 * 512)) or 1))
        xs = [torch.randn(tokens, turned + spec.num_kv_heads, 128, device=device).bfloat16() for _ in range(sets)]
        weight = torch.randn(turned, 128, device=device).bfloat16()
        angle = torch.randn(tokens, 64, device=device)
        cos, sin, cache = angle.cos(), angle.sin(), Cache(pool, 0, blocks)
        with poisoned():
            q = fused(xs[0], weight, cos, sin, cache, plan)
        slots = batch.slots_dev.long()
        k, v = (part[slots // BLOCK, slots % BLOCK] for part in cache.parts)
        want = rotated(xs[0], weight, cos, sin, norm.eps)
        error = float((torch.cat((q, k), 1).float() - want).norm() / want.norm())
        seconds, _ = graph_time([partial(fused, x, weight, cos, sin, cache, plan) for x in xs])
        moved = 2 * xs[0].numel() * 2
        results.append({"shape": shape, "rotate": tokens, "us": seconds * 1e6, "error": error,
                        "ok": error < 6e-3 and torch.equal(v, xs[0][:, turned:])})  # fmt: skip
        print(f"{tokens:6d} {seconds * 1e6:8.2f} {moved / seconds / 1e12:6.2f} {error:.1e}", flush=True)


MEASURES = {"decode": time_decode, "carveout": time_carveout, "prefill": time_prefill, "rotate": time_rotate}


def warm(number: int) -> None:
    """Compile this worker's share of the variants into the cache on disk."""
    jobs = []
    for shape in SHAPES:
        spec = spec_of(*SHAPES[shape])
        pool = torch.randn(1100, 2, BLOCK, *spec.layout.spec.parts[0].shape, device=device).bfloat16()
        for variant, count in product(DECODE if shape == "A" else DECODE[:1], (1, 200)):
            jobs.append(partial(time_chain, spec, pool, count, 80, 80 if count > 1 else 4096, variant))
        for variant, queries in product(PREFILL if shape == "A" else [None], (4, 16, 512)):
            if queries == 512 or variant is None:
                rows = [(1100, queries)] * (1 if queries == 16 else 5)
                jobs.append(partial(time_forward, spec, pool, rows, Tiles(*variant) if variant else None))
    share = slice(number, None, WORKERS)
    check_all([], share)
    for job in jobs[share]:
        try:
            job()
        except Exception as error:  # said again, with its numbers, when it is measured
            print("warm", number, type(error).__name__, str(error)[:200])


def commit() -> str:
    said = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return said.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="check,decode,carveout,prefill")
    parser.add_argument("--shapes", default="A,C")
    parser.add_argument("--warm", type=int)
    options = parser.parse_args()
    if options.warm is not None:
        warm(options.warm)
        return
    began = time.monotonic()
    only = options.only.split(",")
    workers = []
    if {"check", "decode", "prefill"} & set(only):
        command = [sys.executable, __file__, "--warm"]
        workers = [subprocess.Popen([*command, str(i)], stdout=subprocess.DEVNULL) for i in range(WORKERS)]
    results: list[dict] = []
    facts = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "commit": commit(), "command": " ".join(sys.argv), "results": results,
    }  # fmt: skip

    def save() -> None:
        facts["seconds"] = round(time.monotonic() - began, 1)
        if options.json:
            options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    for worker in workers:
        worker.wait()
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    if "check" in only:
        check_all(results)
        save()
    pool = torch.randn(256 * 513 + 64, 2, BLOCK, 8, 128, device=device, dtype=torch.bfloat16)
    for shape, (name, measure) in product(options.shapes.split(","), MEASURES.items()):
        if name in only:
            measure(shape, pool, results)
            save()
    bad = [result for result in results if result.get("ok") is False]
    print(f"{len(bad)} wrong, {facts.get('seconds')} s")


if __name__ == "__main__":
    main()
