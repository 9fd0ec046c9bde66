"""Decode attention by bulk copies on a device: each variant checked against float64, then timed in graphs beside the
kernel that loads through registers, alone and between the products of a layer.

    python ci/perf/device_token_stream.py --json FILE [--seconds 95] [--variants 0,3]

A child process does the work and says a line of JSON a result; where it hangs or dies, its variant is noted and another
child goes on with the next one. Kernels are compiled first, side by side.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_cases import BLOCK, Cache, batch_of, device, target
from device_rates import about
from linear_parts import operands_of
from token_stream_cases import VARIANTS, Variant, check, checks, inputs, runner, spec_named

from drivetrain_api.v1 import AttentionSpec
from drivetrain_triton.attention_token_stream import token_stream_kernel
from drivetrain_triton.launch import compiling
from drivetrain_triton.linear import prepare, product_call
from drivetrain_triton.linear_tiles import choose

HANGS, BOUND, COPIES = 30.0, 4096, 6  # seconds without a word; tokens that plans allow for; layers of weights
L2_BYTES = 150 << 20


def layers_of(spec: AttentionSpec, pool: torch.Tensor, blocks: int) -> list[Cache]:
    size = blocks * pool[0].numel() * 2
    count = max(1, min(96, max(COPIES, -(-L2_BYTES // size)), len(pool) // blocks))
    return [Cache(pool, i * blocks, blocks) for i in range(count)]


def graph_time(work: list[Any], repeats: int = 5) -> float:
    """Median seconds of one of ``work``, all in one graph."""
    for run in work[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run() for run in work]
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(work))
    del kept
    return sorted(times[2:])[repeats // 2]


@dataclass
class Products:
    """A layer's products before and behind attention, of A, by its weights in turn."""

    qkv: list[torch.Tensor]
    out: list[torch.Tensor]

    def around(self, number: int, y: torch.Tensor, attend: Any, rows: int) -> Any:
        """-> one layer as a function: y [rows, 4096] -> the next y."""
        qkv, last = self.qkv[number % COPIES], self.out[number % COPIES]
        x, after = torch.empty(rows, 6144, dtype=y.dtype, device=device), torch.empty_like(y)
        if rows > 64:

            def layer() -> torch.Tensor:
                torch.mm(y, qkv.T, out=x)
                return torch.mm(attend(x.view(rows, 48, 128)).view(rows, 4096), last.T, out=after)

            return layer

        def product(name: str, source: torch.Tensor, weight: torch.Tensor, to: torch.Tensor) -> None:
            call = product_call(operands_of(source, weight, name, to), target(), choose(rows, *weight.shape, 90))
            call.kernel[call.grid](*call.args, **call.options)

        def quick() -> torch.Tensor:
            product("A.qkv", y, qkv, x)
            product("A.out", attend(x.view(rows, 48, 128)).view(rows, 4096), last, after)
            return after

        return quick


def time_point(
    name: str, rows: int, context: int, variant: Variant, pool: torch.Tensor, products: Products | None
) -> dict[str, Any]:
    """Microseconds of a layer's attention of decode rows, alone or between its products, and whether the last layer's
    result is near that of the kernel that loads through registers."""
    spec, normed = spec_named(name), name == "C"
    batch, blocks = batch_of([(context, 1)] * rows, slack=max(0, BOUND - context))
    run, plan = runner(spec, variant, batch, normed)
    x, weight, cos, sin = inputs(spec, rows, normed)
    layers = layers_of(spec, pool, blocks)
    if products is None:
        work = [partial(run, x, weight, cos, sin, cache, plan) for cache in layers]
    else:
        y = torch.randn(rows, 4096, device=device).bfloat16()

        def attends(cache: Cache) -> Any:
            return lambda made: run(made, weight, cos, sin, cache, plan)

        work = [products.around(i, y, attends(cache), rows) for i, cache in enumerate(layers)]
    seconds = graph_time(work)
    got = run(x, weight, cos, sin, layers[-1], plan).float()
    other, apart = runner(spec, VARIANTS[0], batch, normed)
    want = other(x, weight, cos, sin, layers[-1], apart).float()
    ok = bool((got - want).norm() < 6e-3 * want.norm())
    point = {"shape": name, "rows": rows, "context": context, "chain": products is not None}
    return point | {"us": seconds * 1e6, "splits": plan.decode.splits, "ok": ok}


def points(variant: Variant) -> list[tuple[str, int, int, bool]]:
    """(shape, rows, context, whether between products)."""
    found = []
    for rows in variant.rows:
        found += [("A", rows, 208, False), ("A", rows, 208, True), ("A", rows, 640, False), ("A", rows, 640, True)]
        found += [("C", rows, 208, False)]
        if rows == 1:
            found += [("A", 1, 4096, False), ("A", 8, 4096, False)]
    return found


def say(**words: Any) -> None:
    print("@" + json.dumps(words), flush=True)


def carve() -> None:
    """Ask for as much shared memory a multiprocessor as there can be, for all kernels that have run."""
    driver, preferred_carveout = ctypes.CDLL("libcuda.so.1"), 9
    for cached in token_stream_kernel.device_caches.values():
        for made in cached[0].values():
            driver.cuFuncSetAttribute(ctypes.c_void_p(made.function), preferred_carveout, 100)


def go_on() -> None:
    """End this child where the device does not work any more: another one goes on."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=device).item()
    except Exception as error:
        print(str(error)[:300], file=sys.stderr, flush=True)
        os._exit(3)


def do_variant(number: int, pool: torch.Tensor, products: Products) -> None:
    """All checks of one variant, then its times where it was right."""
    variant, right = VARIANTS[number], True
    for name, lengths, normed, slack, dtype in checks(number):
        try:
            found = check(name, lengths, variant, normed, slack, dtype)
        except Exception as error:
            found = {"check": name, "ok": False, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
            say(variant=number, **found)
            go_on()
            right = False
            continue
        right = right and found["ok"]
        say(variant=number, **found)
    if variant.carved:
        carve()
    for name, rows, context, chained in points(variant) if right else ():
        try:
            found = time_point(name, rows, context, variant, pool, products if chained else None)
        except Exception as error:
            found = {"shape": name, "rows": rows, "context": context, "chain": chained, "ok": False,
                     "failed": f"{type(error).__name__}: {str(error)[:300]}"}  # fmt: skip
            say(variant=number, **found)
            go_on()
            continue
        say(variant=number, **found)
    say(variant=number, done=True)


def prepared() -> tuple[torch.Tensor, Products]:
    """The pool of caches, and weights."""
    prepare(torch.empty(1, device=device).device)
    pool = torch.randn(512 * 41 * COPIES + 64, 2, BLOCK, 8, 128, device=device, dtype=torch.bfloat16)
    qkv, out = ([torch.randn(n, 4096, device=device, dtype=torch.bfloat16) / 64 for _ in range(COPIES)]
                for n in (6144, 4096))  # fmt: skip
    return pool, Products(qkv, out)


def warm(numbers: list[int]) -> None:
    """Compile what the variants need, without running any of it; each failure is said by the variant later."""
    began = time.monotonic()
    pool, products = prepared()
    try:
        with compiling() as report:
            for number in numbers:
                variant = VARIANTS[number]
                for name, lengths, normed, slack, dtype in checks(number):
                    spec, rows = spec_named(name, dtype), [(length, 1) for length in lengths]
                    batch, blocks = batch_of(rows, slack=slack)
                    run, plan = runner(spec, variant, batch, normed)
                    shape = (blocks, 2, BLOCK, spec.num_kv_heads, 128)
                    empty = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                    run(*inputs(spec, len(lengths), normed), Cache(empty, 0, blocks), plan)
                for name, rows, context, chained in points(variant):
                    spec = spec_named(name)
                    batch, blocks = batch_of([(context, 1)] * rows, slack=max(0, BOUND - context))
                    run, plan = runner(spec, variant, batch, name == "C")
                    given = inputs(spec, rows, name == "C")
                    attend = partial(run, *given, Cache(pool, 0, blocks), plan)
                    attend()
                    if chained and rows <= 64:
                        y = torch.empty(rows, 4096, device=device, dtype=torch.bfloat16)
                        products.around(0, y, lambda made, attend=attend: attend(), rows)()
        print(f"{report.built} kernels compiled, {report.found} found", end="; ")
    except Exception as error:
        print(f"while compiling: {type(error).__name__}: {str(error)[:300]}", end="; ")
    print(f"{time.monotonic() - began:.0f} s", flush=True)


def child(numbers: list[int]) -> None:
    torch.manual_seed(time.time_ns() % (1 << 31))
    pool, products = prepared()
    for number in numbers:
        do_variant(number, pool, products)


def heard(numbers: list[int], until: float, results: list[dict[str, Any]]) -> list[int]:
    """Run a child; -> the variants that it did not come to."""
    command = [sys.executable, __file__, "--child", ",".join(map(str, numbers))]
    work = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []

    def read() -> None:
        for line in work.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    threading.Thread(target=lambda: errors.extend(work.stderr or ()), daemon=True).start()
    left, mine = list(numbers), []
    while left and time.monotonic() < until:
        try:
            line = lines.get(timeout=min(HANGS, max(0.1, until - time.monotonic())))
        except queue.Empty:
            line = None
        if line is None:
            why = "out of time" if time.monotonic() >= until else "hangs" if work.poll() is None else "died"
            results.append({"variant": left[0], "failed": why, "ok": False, "said": "".join(errors)[-600:]})
            mine.append(results[-1])
            show(left.pop(0), mine)
            mine = []
            break
        if not line.startswith("@"):
            continue
        found = json.loads(line[1:])
        if found.pop("done", False):
            show(left.pop(0), mine)
            mine = []
        else:
            results.append(found)
            mine.append(found)
    if work.poll() is None:
        work.kill()
    work.wait()
    return left


def show(number: int, found: list[dict[str, Any]]) -> None:
    """One line of a variant: how many checks were right, and microseconds by rows and context, alone | in a chain."""
    tested = [one for one in found if "check" in one]
    text = f"{number:2d} {VARIANTS[number]!s:20s} {sum(one['ok'] for one in tested)}/{len(tested)} right"
    times: dict[str, dict[bool, str]] = {}
    for one in found:
        if "us" in one:
            place = f"{one['shape']} {one['rows']}x{one['context']}"
            times.setdefault(place, {})[one["chain"]] = f"{one['us']:.1f}{'' if one['ok'] else '!'}"
    for place, both in times.items():
        text += f"; {place} {both.get(False, '-')}" + (f" | {both[True]}" if True in both else "")
    print(text, flush=True)
    for one in found:
        if not one["ok"]:
            print("   WRONG", json.dumps(one)[:700], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--variants", default=",".join(map(str, range(len(VARIANTS)))))
    parser.add_argument("--seconds", type=float, default=95.0)
    parser.add_argument("--child", default="")
    parser.add_argument("--warm", default="")
    options = parser.parse_args()
    if options.warm or options.child:
        (warm if options.warm else child)([int(one) for one in (options.warm or options.child).split(",")])
        return
    began, results = time.monotonic(), []
    try:
        subprocess.run(
            [sys.executable, __file__, "--warm", options.variants], timeout=0.5 * options.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        print("compiling takes too long; the rest is compiled as it is met")
    left = [int(one) for one in options.variants.split(",")]
    while left and time.monotonic() - began < options.seconds:
        left = heard(left, began + options.seconds, results)
        save(options.json, results, began)
    if left:
        print("not come to:", left)
    print(f"{sum(not one['ok'] for one in results)} wrong, {time.monotonic() - began:.0f} s")


def save(path: Path | None, results: list[dict[str, Any]], began: float) -> None:
    if path:
        named = [one | {"variant": str(VARIANTS[one["variant"]])} for one in results]
        facts = about(device()) | {"seconds": round(time.monotonic() - began, 1), "results": named}
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
