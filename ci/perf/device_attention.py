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
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
import triton
from attention_cases import (
    BLOCK,
    DECODE,
    DECODE_POINTS,
    PREFILL,
    PREFILL_POINTS,
    SHAPES,
    Cache,
    Rows,
    Tensor,
    Variant,
    batch_of,
    check_all,
    device,
    poisoned,
    spec_of,
    target,
)

from drivetrain_api.v1 import AttentionSpec, RmsNormSpec, RopeSpec
from drivetrain_triton.attention import TritonAttention
from drivetrain_triton.attention_choice import Tiles, prefill_tiles
from drivetrain_triton.attention_decode import decode_kernel
from drivetrain_triton.attention_rotate import RotateAndWrite
from drivetrain_triton.attention_write import rotate_kernel

ROOT = Path(__file__).resolve().parents[2]
L2_BYTES, WORKERS = 150 << 20, 12


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
    attention.early = variant.early
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
