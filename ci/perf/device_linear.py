"""Linears for few rows on a device: each variant checked against float64, timed beside the vendor's product, and in a
chain of all layers with and without overlapping launches.

    python ci/perf/device_linear.py [--rows 1,8,64] [--shapes A,C.head] [--only chain] [--json FILE]

Weights are copied until a chain of products over all copies reads from memory, not from the cache; medians over
replays of a CUDA graph. Beyond the rows that are ours only the vendor is timed. The JSON is written after each shape;
the fastest tiles are printed as entries of the table in ``linear_tiles``. Kernels are compiled first, by processes side
by side.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

import torch
from device_chain import chains
from device_rates import about
from linear_parts import DEVICE, PROGRAMS, SHAPES, launch, operands_of, shape_dtype, table_of, timed
from torch.nn import functional

from drivetrain_triton.linear import Call, Operands, prepare, product_call
from drivetrain_triton.linear_tiles import MOST_SHARES, PANEL_FEWEST, PANEL_SHARES, STREAM_ROWS, Tiles, bucket, fits
from drivetrain_triton.target import Target

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)

ROW_ONE = ((4, 2048, 4), (4, 1024, 4), (8, 512, 4), (8, 1024, 8), (2, 2048, 4), (16, 512, 8))  # block_n, block_k, warps
ROW_MORE = ((4, 1024, 4), (4, 2048, 4), (2, 2048, 4))
# rows: (block_m, block_n, block_k, warps)
FRAGMENTS = {
    8: (
        (8, 16, 512, 4),
        (8, 16, 1024, 4),
        (8, 16, 1024, 8),
        (8, 16, 256, 2),
        (16, 8, 1024, 4),
        (16, 8, 512, 4),
        (8, 32, 512, 4),
    ),
    16: ((16, 16, 512, 4), (16, 16, 1024, 8), (16, 32, 512, 4), (16, 32, 256, 4)),
    32: ((32, 32, 256, 4), (32, 32, 512, 8), (32, 16, 512, 4)),
}
# (block_n, block_k, warps, stages); block_m: the rows, at least 8
STREAMS = (
    (64, 128, 4, 4),
    (64, 128, 4, 6),
    (64, 256, 4, 3),
    (64, 256, 4, 4),
    (64, 512, 4, 2),
    (128, 64, 4, 6),
    (128, 128, 4, 3),
    (128, 128, 8, 4),
    (256, 64, 8, 4),
)
# (block_n, block_k, stages, row_stages) of all programs at once
PANELS = (
    (32, 128, 4, 4),
    (32, 128, 6, 4),
    (32, 64, 12, 8),
    (64, 128, 4, 4),
    (64, 128, 6, 6),
    (64, 64, 8, 8),
    (128, 64, 4, 4),
)
PANEL_PROGRAMS = 64  # at least
# (block_m, block_n, block_k, warps, stages) of more rows than the table has
MANY = (
    (64, 128, 128, 4, 3),
    (128, 64, 128, 4, 4),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 128, 8, 3),
    (128, 256, 64, 8, 4),
    (256, 64, 64, 4, 5),
    (256, 128, 64, 8, 4),
)
STREAM_PROGRAMS = (132, 264)
CHAIN_BYTES = 320 << 20
LIMIT = {torch.bfloat16: 6e-3, torch.float32: 1e-4}


class Chosen:
    """What the command line leaves of the variants."""

    way = ""


def variants(name: str, rows: int) -> Iterator[Tiles]:
    """All tiles that are tried for a shape; the table's own first."""
    outputs, inputs, kind = SHAPES[name]
    if rows > STREAM_ROWS:
        found = [Tiles("stream", m, n, k, warps, stages=stages) for m, n, k, warps, stages in MANY]
        yield from (one for one in found if fits(one, rows, outputs, inputs))
        return
    found = [table_of(name, rows), table_of(name, rows, panels=False)]
    for n, k, warps in (ROW_ONE if rows == 1 else ROW_MORE) if rows <= 4 else ():
        found.append(Tiles("rows", rows, n, k, warps=warps))
    size = bucket(rows) if rows > 4 else 8
    if rows > 1:
        found += [Tiles("fragments", m, n, k, warps=warps) for m, n, k, warps in FRAGMENTS.get(size, ())]
    found += streams(rows, outputs, inputs)
    found += panels(rows, outputs) if shape_dtype(name) != torch.float32 else ()
    found = [one for one in found if one in found[:2] or not Chosen.way or one.way == Chosen.way]
    found = [one for one in found if one in found[:2] or inputs % one.block_k == 0]
    yield from dict.fromkeys(one for one in found if fits(one, rows, outputs, inputs, PROGRAMS, bool(kind)))


def streams(rows: int, outputs: int, inputs: int) -> Iterator[Tiles]:
    """Bulk copies: one share, and shares so that about as many programs run as the device holds."""
    for n, k, warps, stages in STREAMS:
        tiles, most = ceil(outputs / n), inputs // k
        counts = {max(1, min(round(programs / tiles), most, MOST_SHARES)) for programs in STREAM_PROGRAMS}
        most_m = max(8, bucket(rows))
        sizes = {most_m, most_m // 2} if rows >= 32 and outputs <= 8192 else {most_m}
        for shares in sorted(counts):
            yield from (Tiles("stream", m, n, k, warps, shares, stages) for m in sizes)


def panels(rows: int, outputs: int) -> Iterator[Tiles]:
    """``linear_panel`` with shares so that most multiprocessors have a program."""
    for n, k, stages, row_stages in PANELS if PANEL_FEWEST <= rows <= STREAM_ROWS else ():
        for shares in PANEL_SHARES:
            if outputs // n * shares >= PANEL_PROGRAMS:
                yield Tiles("panel", bucket(rows), n, k, shares=shares, stages=stages, row_stages=row_stages)


def meta_call(name: str, rows: int, tiles: Tiles, target: Target) -> Call:
    """A launch without memory, to compile for."""
    outputs, inputs, _ = SHAPES[name]
    x, weight = (torch.empty(size, inputs, dtype=torch.bfloat16, device="meta") for size in (rows, outputs))
    return product_call(operands_of(x, weight, name), target, tiles)


def compiled(job: tuple[str, int, Tiles, Target]) -> tuple[float, str]:
    """Compile one kernel into the cache on disk; seconds, and what went wrong."""
    begin = time.perf_counter()
    try:
        call = meta_call(*job)
        args = [one.dtype if isinstance(one, torch.Tensor) else one for one in call.args]
        call.kernel.warmup(*args, grid=call.grid, **call.options)
    except Exception as error:
        return time.perf_counter() - begin, f"{job[:3]}: {type(error).__name__}: {str(error)[:200]}"
    return time.perf_counter() - begin, ""


def compile_all(jobs: list[tuple[str, int, Tiles, Target]], pool: Any) -> dict[str, Any]:
    """Compile what the jobs need, each kernel once."""
    distinct = {}
    for job in jobs:
        call = meta_call(*job)
        sizes = tuple(1 if one == 1 else one % 16 == 0 for one in call.args[-3:])
        kinds = tuple(one.dtype for one in call.args[:6] if isinstance(one, torch.Tensor))
        distinct.setdefault((call.kernel.__name__, kinds, sizes, tuple(sorted(call.options.items()))), job)
    begin = time.perf_counter()
    done = pool.map(compiled, list(distinct.values()), chunksize=1)
    failed = [error for _, error in done if error]
    for error in failed:
        print("does not compile:", error)
    wall = time.perf_counter() - begin
    slowest = max((seconds for seconds, _ in done), default=0.0)
    print(f"{len(done)} kernels compiled in {wall:.1f} s, the slowest in {slowest:.1f} s", flush=True)
    return {"kernels": len(done), "seconds": wall, "failed": failed}


def expected(x: torch.Tensor, weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The product in float64, by pieces of the weight; gated: with the two roundings before the activation."""
    wide = x.double()
    pieces = [wide @ piece.double().T for piece in weight.split(32768)]
    both = torch.cat(pieces, dim=1)
    if not kind:
        return both
    both = both.to(x.dtype)
    gate, up = both.chunk(2, dim=1)
    return functional.silu(gate.float()).to(x.dtype).double() * up.double()


def error_of(operands: Operands, want: torch.Tensor, target: Target, tiles: Tiles) -> tuple[float, bool]:
    """Relative error of one launch into NaN (infinite if any is left), and whether a second has the same bits."""
    results = []
    for _ in range(2):
        operands.out.fill_(float("nan"))
        launch(product_call(operands, target, tiles))
        results.append(operands.out.clone())
    difference = (results[0].double() - want).norm() / want.norm()
    value = float(difference)
    return (value if value == value else float("inf")), torch.equal(*results)


def vendor(x: torch.Tensor, weights: list[torch.Tensor], name: str) -> Callable[[], None]:
    """The vendor's product over all copies (of gated weights: without the activation)."""
    if shape_dtype(name) == torch.float32:
        return lambda: [torch.mm(x, weight.T, out_dtype=torch.float32) for weight in weights] and None
    return lambda: [functional.linear(x, weight) for weight in weights] and None


def one_variant(
    x: torch.Tensor, weights: list[torch.Tensor], name: str, want: torch.Tensor, setting: tuple[Target, Tiles]
) -> dict[str, Any]:
    """Check and time one variant on one shape."""
    target, tiles = setting
    found: dict[str, Any] = {"tiles": asdict(tiles)}
    try:
        error, same = error_of(operands_of(x, weights[0], name), want, target, tiles)
        found |= {"error": error, "same_bits": same}
        out = operands_of(x, weights[0], name).out
        calls = [product_call(operands_of(x, weight, name, out), target, tiles) for weight in weights]
        found["seconds"] = timed(lambda: [launch(call) for call in calls] and None) / len(weights)
        found["right"] = error <= LIMIT[shape_dtype(name)] and same
    except Exception as failure:
        torch.cuda.synchronize()
        found["failed"] = f"{type(failure).__name__}: {str(failure)[:300]}"
    return found


def label(tiles: dict[str, Any]) -> str:
    """Tiles in short."""
    text = f"{tiles['way']} {tiles['block_m']}x{tiles['block_n']}x{tiles['block_k']} w{tiles['warps']}"
    if tiles["way"] in ("stream", "panel"):
        text += f" x{tiles['shares']} s{tiles['stages']}" + (f"/{tiles['row_stages']}" if tiles["row_stages"] else "")
    return text


def one_shape(name: str, rows_list: list[int], target: Target) -> dict[int, dict[str, Any]]:
    """All rows and variants of one shape; prints a line for each count of rows."""
    outputs, inputs, kind = SHAPES[name]
    nbytes = outputs * inputs * 2
    first = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE) * inputs**-0.5 * (2.0 if kind else 1.0)
    weights = [first] + [
        first.clone() for _ in range(max(3 if nbytes > CHAIN_BYTES else 8, ceil(CHAIN_BYTES / nbytes)) - 1)
    ]
    all_x = torch.randn(max(rows_list), inputs, dtype=torch.bfloat16, device=DEVICE)
    want = expected(all_x, first, kind)
    results = {}
    for rows in rows_list:
        x = all_x[:rows].contiguous()
        base = timed(vendor(x, weights, name)) / len(weights)
        tried = []
        for tiles in variants(name, rows):
            tried.append(one_variant(x, weights, name, want[:rows], (target, tiles)))
        results[rows] = {"vendor_seconds": base, "bytes": nbytes, "variants": tried}
        report(name, rows, nbytes, base, tried)
    return results


def report(name: str, rows: int, nbytes: int, base: float, tried: list[dict[str, Any]]) -> None:
    """The vendor's rate, the table's, the best three."""
    for one in tried:
        if "failed" in one or not one["right"]:
            print(f"  WRONG {name} {rows}: {label(one['tiles'])}: {one.get('failed') or one}")
    good = sorted((one for one in tried if one.get("right")), key=lambda one: one["seconds"])
    rate = nbytes / 1e12
    text = f"{name:10} {rows:4} vendor {rate / base:5.2f}"
    if rows <= STREAM_ROWS and tried and tried[0].get("right"):
        text += f" table {rate / tried[0]['seconds']:5.2f}"
    for one in good[:3]:
        text += f" | {rate / one['seconds']:5.2f} ({base / one['seconds']:4.2f}x) {label(one['tiles'])}"
    print(text, flush=True)


def literal(tiles: Tiles) -> str:
    """Tiles as source."""
    values = list(asdict(tiles).values())
    count = {"stream": 7, "panel": 8}.get(tiles.way, 5)
    return f"Tiles({', '.join(json.dumps(one) if isinstance(one, str) else str(one) for one in values[:count])})"


def print_table(results: dict[str, Any]) -> None:
    """The fastest right tiles as entries of the table."""
    for name, by_rows in results.items():
        best = {}
        for rows, found in by_rows.items():
            good = sorted((one for one in found["variants"] if one.get("right")), key=lambda one: one["seconds"])
            best |= {rows: Tiles(**good[0]["tiles"])} if good else {}
        entries = ", ".join(f"{rows}: {literal(tiles)}" for rows, tiles in best.items())
        print(f"    {SHAPES[name][:2]}: {{{entries}}},  # {name}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="counts of rows, with commas")
    parser.add_argument("--shapes", default="", help="names or models, with commas")
    parser.add_argument("--way", default="", help="only variants of this way, beside the table's")
    parser.add_argument("--only", choices=("shapes", "chain"), default="")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--json", default="")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    target = Target(kind="cuda", arch=90, multiprocessors=PROGRAMS, shared_bytes=232448, overlaps=True)
    rows_list = [int(one) for one in given.rows.split(",") if one] or list(ROWS)
    wanted = [one for one in given.shapes.split(",") if one]
    names = [name for name in SHAPES if not wanted or name in wanted or name[0] in wanted]
    sizes = [(name, rows) for name in names for rows in rows_list] if given.only != "chain" else []
    Chosen.way = given.way
    jobs = [(n, r, tiles, target) for n, r in sizes for tiles in variants(n, r)]
    out: dict[str, Any] = about(torch.device(DEVICE))
    # Before anything touches the device: workers are forks, with contexts of their own.
    with multiprocessing.get_context("fork").Pool(given.workers) as pool:
        out["compile"] = compile_all(jobs, pool)
        out["shapes"] = {}
        prepare(torch.empty(1, device=DEVICE).device)
        torch.manual_seed(0)
        try:
            for name in names if sizes else ():
                out["shapes"][name] = one_shape(name, rows_list, target)
                torch.cuda.empty_cache()
                save(out, given.json)
            print_table(out["shapes"])
            if given.only != "shapes":
                sizes = [(model, rows) for model in sorted({name[0] for name in names}) for rows in rows_list]
                out["chain_ms"] = chains(out["shapes"], sizes, target, lambda jobs: compile_all(jobs, pool))
        finally:
            save(out, given.json)


def save(out: dict[str, Any], path: str) -> None:
    if path:
        Path(path).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
