"""Paged attention on a device: checked against float64, then timed in graphs over caches larger than its L2.

python ci/perf/device_attention.py --json FILE [--only whole,chunk,check,decode,carveout,prefill,rotate] [--shapes A,C]
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
from dataclasses import replace
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
    WHOLE,
    WHOLE_POINTS,
    Cache,
    Rows,
    Tensor,
    Variant,
    batch_of,
    check_all,
    check_whole,
    device,
    poisoned,
    spec_of,
    target,
    turned,
)

from drivetrain_api.v1 import AttentionSpec, RmsNormSpec, RopeSpec
from drivetrain_triton import attention as attention_module
from drivetrain_triton.attention import TritonAttention
from drivetrain_triton.attention_choice import prefill_tiles
from drivetrain_triton.attention_decode import decode_kernel
from drivetrain_triton.attention_rotate import RotateAndAttend, RotateAndWrite
from drivetrain_triton.attention_write import rotate_kernel

ROOT = Path(__file__).resolve().parents[2]
L2_BYTES, WORKERS = 150 << 20, 14
LEAST = 6  # layers in a graph, where the pool holds them


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
    count = max(1, min(160, max(LEAST, -(-L2_BYTES // size)), len(pool) // blocks))
    return [Cache(pool, i * blocks, blocks) for i in range(count)]


def time_forward(spec: AttentionSpec, pool: Tensor, rows: Rows, streamed: bool = True) -> tuple[float, int]:
    """Return the seconds of one layer and its shares."""
    batch, blocks = batch_of(rows)
    attention = TritonAttention(spec, target())
    attention.streamed = streamed
    plan = attention.plan(batch)
    q = torch.randn(batch.num_tokens, spec.num_heads, spec.head_dim, device=device, dtype=torch.bfloat16)
    layers = layers_of(spec, pool, blocks)
    runs = [partial(attention.forward, q, cache, plan) for cache in layers]
    part = plan.decode or plan.prefill
    return graph_time(runs)[0], part.splits


def chain_of(spec: AttentionSpec, variant: Variant, normed: bool) -> tuple[TritonAttention, RotateAndAttend]:
    """What plans, and what runs."""
    attention = TritonAttention(spec, target())
    attention.decode_tiles, attention.programs_wanted = variant.tiles, variant.wanted
    norm = RmsNormSpec(dtype="bfloat16", size=128, eps=1e-6) if normed else None
    run = RotateAndAttend(norm, RopeSpec(dtype="bfloat16", head_dim=128, rotary_dim=128), spec, target())
    run.whole, run.write.late, run.attention.early = variant.whole, variant.early, variant.early
    return attention, run


def time_chain(
    spec: AttentionSpec, pool: Tensor, count: int, context: int, bound: int, variant: Variant
) -> tuple[float, int, bool]:
    """Return the seconds of a layer's norm (in C), rope, write and attention of decode rows, the shares, and whether
    the last layer's result is that of the same kernels apart, and near that of two kernels."""
    batch, blocks = batch_of([(context, 1)] * count, slack=bound - context)
    normed = spec.num_heads == SHAPES["C"][0]
    attention, run = chain_of(spec, variant, normed)
    plan = attention.plan(batch)
    heads = spec.num_heads + spec.num_kv_heads
    x = torch.randn(count, heads + spec.num_kv_heads, 128, device=device).bfloat16()
    weight = torch.ones(heads, 128, device=device).bfloat16() if normed else None
    angle = torch.randn(count, 64, device=device)
    cos, sin = angle.cos(), angle.sin()
    layers = layers_of(spec, pool, blocks)
    seconds, out = graph_time([partial(run, x, weight, cos, sin, cache, plan) for cache in layers])
    torch.cuda.synchronize()
    same = torch.equal(out, run(x, weight, cos, sin, layers[-1], plan))
    run.whole = False
    other = run(x, weight, cos, sin, layers[-1], plan).float()
    return seconds, plan.decode.splits, same and bool((out.float() - other).norm() < 6e-3 * other.norm())


def time_points(
    shape: str, pool: Tensor, results: list[dict], variants: list[Variant], points: list[tuple[int, int, int]]
) -> None:
    """Each line a variant, each column a point."""
    spec = spec_of(*SHAPES[shape])
    heads = [f"{count}x{context}" + (f"/{bound}" if bound > context else "") for count, context, bound in points]
    floors = [count * context * 2 * spec.num_kv_heads * spec.head_dim * 2 / 4.6e6 for count, context, _ in points]
    print(f"\n{shape} norm (C), rope, write and decode attention: us (shares; ! where wrong)")
    print(f"{'':18s}" + "".join(f"{head:>14s}" for head in heads))
    print(f"{'read at 4.6 TB/s':18s}" + "".join(f"{floor:10.1f}    " for floor in floors))
    for variant in variants:
        cells = []
        for count, context, bound in points:
            point = {"shape": shape, "batch": count, "context": context, "bound": bound, "variant": str(variant)}
            try:
                seconds, splits, same = time_chain(spec, pool, count, context, bound, variant)
            except Exception as error:  # the other points are worth having
                results.append(point | {"ok": False, "error": str(error)[:300]})
                cells.append(f"{type(error).__name__[:13]:>14s}")
                continue
            results.append(point | {"splits": splits, "us": seconds * 1e6, "ok": same})
            cells.append(f"{seconds * 1e6:9.1f}({splits:2d}){' ' if same else '!'}")
        print(f"{variant!s:18s}" + "".join(cells), flush=True)


def time_decode(shape: str, pool: Tensor, results: list[dict]) -> None:
    time_points(shape, pool, results, DECODE if shape == "A" else DECODE[:1], DECODE_POINTS)


def time_whole(shape: str, pool: Tensor, results: list[dict]) -> None:
    """One kernel beside two."""
    time_points(shape, pool, results, WHOLE, WHOLE_POINTS)


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
    print(f"\n{shape} prefill, TFLOP/s (us, splits): by bulk copies where the table has them; never")
    for count, length, queries in PREFILL_POINTS:
        cells = []
        work = 4 * spec.num_heads * spec.head_dim * count * queries * (length - queries / 2)
        for streamed in PREFILL:
            seconds, splits = time_forward(spec, pool, [(length, queries)] * count, streamed)
            point = {"shape": shape, "rows": count, "length": length, "queries": queries, "splits": splits}
            point |= {"streamed": streamed, "tiles": str(prefill_tiles(spec, target(), queries))}
            results.append(point | {"us": seconds * 1e6, "TFLOP/s": work / seconds / 1e12})
            cells.append(f"{work / seconds / 1e12:5.0f} ({seconds * 1e6:7.1f},{splits:2d})")
        print(f"{count:3d} x {queries:5d} of {length:6d}  " + "  ".join(cells), flush=True)


def time_rotate(shape: str, pool: Tensor, results: list[dict]) -> None:
    spec = spec_of(*SHAPES[shape])
    norm = RmsNormSpec(dtype="bfloat16", size=128, eps=1e-6)
    fused = RotateAndWrite(norm, RopeSpec(dtype="bfloat16", head_dim=128, rotary_dim=128), spec, target())
    heads = spec.num_heads + spec.num_kv_heads
    print(f"\n{shape} norm + rope + write: tokens, us, TB/s, error")
    for tokens in (1, 8, 64, 256, 8192):
        batch, blocks = batch_of([(300, 1)] * tokens if tokens < 1000 else [(tokens, tokens)])
        plan = TritonAttention(spec, target()).plan(batch)
        sets = max(1, min(32, (L2_BYTES // (tokens * 48 * 512)) or 1))
        xs = [torch.randn(tokens, heads + spec.num_kv_heads, 128, device=device).bfloat16() for _ in range(sets)]
        weight = torch.randn(heads, 128, device=device).bfloat16()
        angle = torch.randn(tokens, 64, device=device)
        cos, sin, cache = angle.cos(), angle.sin(), Cache(pool, 0, blocks)
        with poisoned():
            q = fused(xs[0], weight, cos, sin, cache, plan)
        slots = batch.slots_dev.long()
        k, v = (part[slots // BLOCK, slots % BLOCK] for part in cache.parts)
        want = turned(xs[0], weight, cos, sin, norm.eps, heads).float()
        error = float((torch.cat((q, k), 1).float() - want).norm() / want.norm())
        seconds, _ = graph_time([partial(fused, x, weight, cos, sin, cache, plan) for x in xs])
        moved = 2 * xs[0].numel() * 2
        results.append({"shape": shape, "rotate": tokens, "us": seconds * 1e6, "error": error,
                        "ok": error < 6e-3 and torch.equal(v, xs[0][:, heads:])})  # fmt: skip
        print(f"{tokens:6d} {seconds * 1e6:8.2f} {moved / seconds / 1e12:6.2f} {error:.1e}", flush=True)


def time_chunk(shape: str, pool: Tensor, results: list[dict]) -> None:
    """Captured steps of 8 rows and 128 tokens: one row's last 16 after many cached keys, or eight prompts of 16."""
    spec = spec_of(*SHAPES[shape])
    print(f"\n{shape} captured chunks, us (shares) by programs wanted a multiprocessor: 2, 4, 8, 16, 32")
    kept = attention_module.SHORT_PROGRAMS
    for length, rows in ((4112, [(4112, 16), (0, 112)]), (208, [(208, 16), (0, 112)]), (16, [(16, 16)] * 8)):
        batch, blocks = batch_of([*rows, *[(0, 0)] * (8 - len(rows))])
        batch = replace(batch, max_query_len=16, max_length_bound=8192)
        layers = layers_of(spec, pool, blocks)
        q = torch.randn(batch.num_tokens, spec.num_heads, spec.head_dim, device=device, dtype=torch.bfloat16)
        cells, first = [], None
        for wanted in (2, 4, 8, 16, 32):
            attention_module.SHORT_PROGRAMS = wanted
            attention = TritonAttention(spec, target())
            plan = attention.plan_for_capture(batch)
            seconds, out = graph_time([partial(attention.forward, q, cache, plan) for cache in layers])
            first = out if first is None else first
            ok = bool((out.float() - first.float()).norm() <= 6e-3 * first.float().norm())
            point = {"shape": shape, "chunk": length, "wanted": wanted, "splits": plan.prefill.splits}
            results.append(point | {"us": seconds * 1e6, "ok": ok})
            cells.append(f"{seconds * 1e6:7.1f} ({plan.prefill.splits:2d}){'' if ok else '!'}")
        print(f"{length:6d}  " + "  ".join(cells), flush=True)
    attention_module.SHORT_PROGRAMS = kept


MEASURES = {
    "chunk": time_chunk,
    "whole": time_whole,
    "decode": time_decode,
    "carveout": time_carveout,
    "prefill": time_prefill,
    "rotate": time_rotate,
}


def warm(number: int, only: list[str]) -> None:
    """Compile this worker's share of the variants into the cache on disk."""
    jobs = []
    for shape in SHAPES:
        spec = spec_of(*SHAPES[shape])
        pool = torch.randn(1100, 2, BLOCK, *spec.layout.spec.parts[0].shape, device=device).bfloat16()
        variants = (DECODE if shape == "A" else DECODE[:1]) if "decode" in only else []
        variants = variants + (WHOLE if "whole" in only else [])
        for variant, count in product(variants, (1, 40, 180)):
            jobs.append(partial(time_chain, spec, pool, count, 80, 80 if count > 1 else 4096, variant))
        for streamed, queries in product(PREFILL, (4, 16, 512)):
            if "prefill" in only:
                rows = [(1100, queries)] * (1 if queries == 16 else 5)
                jobs.append(partial(time_forward, spec, pool, rows, streamed))
    share = slice(number, None, WORKERS)
    if "whole" in only:
        check_whole([], share)
    if "check" in only:
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
        warm(options.warm, options.only.split(","))
        return
    began = time.monotonic()
    only = options.only.split(",")
    workers = []
    if {"check", "whole", "decode", "prefill"} & set(only):
        command = [sys.executable, __file__, "--only", options.only, "--warm"]
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
    for name, check in (("check", check_all), ("whole", check_whole)):
        if name in only:
            check(results)
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
