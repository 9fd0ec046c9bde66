"""Norms inside the products behind them against norms of their own, in a chain of a model's layers in a CUDA graph.

    python ci/perf/device_normed.py [--models A,C] [--rows 1,2] [--json FILE]

The chain is what the backend would run, by its own implementation objects; one small kernel stands for rotation and
attention. First one of the two products behind norms norms its rows itself, with each of several tiles; then both do,
with the fastest. Each variant is checked against float64 before. Kernels are compiled first, by processes side by side.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from device_chain import small_norm
from linear_parts import DEVICE, ROOT, SHAPES, operands_of, timed
from torch.nn import functional

sys.path.insert(0, str(ROOT / "backends/cuda"))

from drivetrain_api.v1 import AddRmsNormSpec, GatedActivationSpec, LinearSpec, Packed
from drivetrain_cuda.linear import DeviceLinear, GatedLinear, NormedLinear
from drivetrain_cuda.table import most_small_rows
from drivetrain_triton import linear_normed_tiles
from drivetrain_triton.activations import make_gated
from drivetrain_triton.linear import Call, prepare, product_call
from drivetrain_triton.linear_normed import Normed, normed_call, normed_linear
from drivetrain_triton.linear_tiles import Tiles, choose
from drivetrain_triton.target import Target

TARGET = Target(kind="cuda", arch=90, multiprocessors=132, shared_bytes=232448, overlaps=True)
LAYERS = {"A": (32, 8), "C": (28, 28)}  # of the model; in the chain, which must not fit the second-level cache
ENTRIES = ("qkv", "gate_up")
LIMIT = 6e-3
# (model, rows): (way, block_m, block_n, block_k, warps)
TRIED = {
    ("C", 1): (("rows", 1, 8, 1024, 4), ("rows", 1, 4, 1024, 4), ("rows", 1, 16, 1024, 8), ("rows", 1, 16, 512, 4)),
    ("C", 2): (("rows", 2, 8, 1024, 4), ("rows", 2, 4, 1024, 4), ("rows", 2, 16, 1024, 8)),
    ("A", 1): (
        ("rows", 1, 4, 4096, 8),
        ("rows", 1, 2, 4096, 4),
        ("rows", 1, 8, 2048, 8),
        ("rows", 1, 16, 512, 8),
        ("rows", 1, 4, 1024, 4),
        ("rows", 1, 4, 2048, 4),
    ),
    ("A", 2): (("rows", 2, 4, 4096, 8),),
}


def tried(model: str, rows: int) -> list[Tiles]:
    """Tiles of a count of rows."""
    found = [Tiles(way, m, n, k, warps=warps) for way, m, n, k, warps in TRIED[model, rows]]  # type: ignore[arg-type]
    inputs = SHAPES[f"{model}.qkv"][1]
    return [one for one in found if linear_normed_tiles.fits(one, rows, inputs)]


def norm_of(name: str) -> AddRmsNormSpec:
    return AddRmsNormSpec(dtype="bfloat16", size=SHAPES[name][1], eps=1e-6)


def bare_call(job: tuple[str, int, Tiles | None, bool]) -> Call:
    """A launch without memory: of a plain product where there are no tiles, else behind a norm."""
    name, rows, tiles, adds = job
    outputs, inputs, kind = SHAPES[name]

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    x, weight = empty(rows, inputs), empty(outputs, inputs)
    if tiles is None:
        return product_call(operands_of(x, weight, name), TARGET, choose(rows, outputs, inputs, 90))
    stream = empty(rows, inputs, dtype=torch.float32)
    out = empty(rows, outputs // 2 if kind else outputs)
    given = Normed(x, stream if adds else None, empty(inputs), norm_of(name), weight, None, out, stream, kind)
    return normed_call(given, TARGET, tiles)


def compiled(job: tuple[str, int, Tiles | None, bool]) -> str:
    """Compile one kernel into the cache on disk; what went wrong."""
    try:
        call = bare_call(job)
        args = [one.dtype if isinstance(one, torch.Tensor) else one for one in call.args]
        call.kernel.warmup(*args, grid=call.grid, **call.options)
    except Exception as error:
        return f"{job}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def jobs_of(models: list[str], rows_list: list[int]) -> list[tuple[str, int, Tiles | None, bool]]:
    """All kernels of products that the chains launch, each once."""
    found: list[tuple[str, int, Tiles | None, bool]] = []
    for model in models:
        for rows in rows_list:
            for name in (f"{model}.{one}" for one in ("qkv", "out", "gate_up", "down")):
                if rows <= most_small_rows(*SHAPES[name][:2], 90, 2):
                    found.append((name, rows, None, False))
            for entry in ENTRIES:
                for tiles in tried(model, rows):
                    found += [(f"{model}.{entry}", rows, tiles, adds) for adds in (True, False)[: 1 + (entry == "qkv")]]
    distinct = {}
    for job in found:
        call = bare_call(job)
        distinct.setdefault((call.kernel.__name__, job[0], job[3], tuple(sorted(call.options.items()))), job)
    return list(distinct.values())


@dataclass
class Layer:
    """One layer's implementations of a model, and this layer's packed weights by name."""

    linears: dict[str, Any]
    packed: dict[str, Packed]
    scale: dict[str, torch.Tensor]


def make_layers(model: str) -> list[Layer]:
    """Layers with weights of their own."""
    linears: dict[str, Any] = {}
    for one in ("qkv", "out", "gate_up", "down"):
        outputs, inputs, kind = SHAPES[f"{model}.{one}"]
        spec = LinearSpec(dtype="bfloat16", in_features=inputs, out_features=outputs)
        linears[one] = DeviceLinear(spec, TARGET)
        if kind:
            gated = GatedActivationSpec(dtype="bfloat16", size=outputs // 2, kind=kind)  # type: ignore[arg-type]
            linears[one] = GatedLinear(spec, gated, TARGET, make_gated(gated, TARGET))
        if one in ENTRIES:
            linears[one] = NormedLinear(norm_of(f"{model}.{one}"), linears[one], 0, TARGET, kind)
    layers = []
    for _ in range(LAYERS[model][1]):
        packed, scale = {}, {}
        for one, linear in linears.items():
            outputs, inputs, _ = SHAPES[f"{model}.{one}"]
            weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=DEVICE).normal_(std=inputs**-0.5)
            packed[one] = linear.pack(weight, None)
            scale[one] = torch.rand(inputs, device=DEVICE).add_(0.5).bfloat16()
        layers.append(Layer(linears, packed, scale))
    return layers


def step(layers: list[Layer], x: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All layers: (the last branch, the stream)."""
    stream: torch.Tensor | None = None
    options: dict[str, Any] = {"SIZE": heads, "OVERLAPS": TARGET.overlaps, "num_warps": 4, **TARGET.options}
    for layer in layers:
        run, packed, scale = layer.linears, layer.packed, layer.scale
        qkv, stream = run["qkv"].apply(x, stream, scale["qkv"], packed["qkv"])
        attended = torch.empty(len(x), heads, dtype=x.dtype, device=x.device)
        small_norm[(len(x),)](qkv, attended, qkv.stride(0), **options)
        branch = run["out"].apply(attended, packed["out"])
        inner, stream = run["gate_up"].apply(branch, stream, scale["gate_up"], packed["gate_up"])
        x = run["down"].apply(inner, packed["down"])
    assert stream is not None
    return x, stream


def use(model: str, rows: int, layers: list[Layer], chosen: dict[str, Tiles]) -> None:
    """Let the products of these names norm their rows with these tiles, and no others."""
    for entry in ENTRIES:
        outputs, inputs, _ = SHAPES[f"{model}.{entry}"]
        layers[0].linears[entry]._most = rows if entry in chosen else 0
        if entry in chosen:
            linear_normed_tiles.MEASURED[outputs, inputs] = {rows: chosen[entry]}
    linear_normed_tiles.choose.cache_clear()


def error_of(name: str, rows: int, layer: Layer, tiles: Tiles) -> float:
    """Relative error of one launch against float64; infinite where the sum or a second launch differs."""
    entry, (_, inputs, kind) = name.split(".")[1], SHAPES[name]
    x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
    stream = torch.randn(rows, inputs, device=DEVICE) * 4
    (weight, _), scale = layer.packed[entry].data, layer.scale[entry]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return normed_linear(x, stream, scale, norm_of(name), weight, None, TARGET, kind, tiles)

    (got, total), (again, _) = run(), run()
    wide = x.double() + stream.double()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * scale.double()).bfloat16()
    want = normed.double() @ weight.double().T
    if kind:
        gate, up = want.bfloat16().chunk(2, dim=1)
        want = functional.silu(gate.float()).bfloat16().double() * up.double()
    error = float((got.double() - want).norm() / want.norm())
    right = torch.equal(total, x.float() + stream) and torch.equal(got, again) and error == error
    return error if right else float("inf")


def chain_time(layers: list[Layer], x: torch.Tensor, heads: int) -> tuple[float, torch.Tensor]:
    """Seconds of a chain, and its results side by side."""
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def work() -> None:
        held[:] = [step(layers, x, heads)]

    work()  # kernels that are not compiled yet
    seconds = timed(work)
    return seconds, torch.cat([held[0][0].float(), held[0][1]])


def one_size(model: str, rows: int, layers: list[Layer]) -> dict[str, Any]:
    """All variants of a model at a count of rows; prints microseconds a layer."""
    heads, inputs = SHAPES[f"{model}.out"][1], SHAPES[f"{model}.qkv"][1]
    x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
    in_chain, scale = len(layers), LAYERS[model][0] / len(layers) * 1e3
    use(model, rows, layers, {})
    separate, wanted = chain_time(layers, x, heads)
    found: dict[str, Any] = {"separate_ms": separate * scale, "entries": {}}
    best: dict[str, Tiles] = {}
    print(f"{model} {rows} rows: norms of their own {separate * scale:.3f} ms a step", flush=True)
    for entry in ENTRIES:
        entries = []
        for tiles in tried(model, rows):
            error = error_of(f"{model}.{entry}", rows, layers[1], tiles)
            use(model, rows, layers, {entry: tiles})
            seconds, got = chain_time(layers, x, heads)
            apart = float((got - wanted).norm() / wanted.norm())
            saved = (separate - seconds) / in_chain * 1e6
            entries.append({"tiles": asdict(tiles), "error": error, "apart": apart, "saved_us_a_layer": saved})
            text = f"{tiles.way} {tiles.block_m}x{tiles.block_n}x{tiles.block_k} w{tiles.warps}"
            wrong = "" if error <= LIMIT else "  WRONG"
            print(f"  {entry:8} {text:28} {saved:+6.2f} us a layer; error {error:.1e}, {apart:.1e} apart{wrong}")
        right = [one for one in entries if one["error"] <= LIMIT]
        first = max(right, key=lambda one: one["saved_us_a_layer"], default=None)
        found["entries"][entry] = entries
        if first is not None and first["saved_us_a_layer"] > 0:
            best[entry] = Tiles(**first["tiles"])
    use(model, rows, layers, best)
    seconds, _ = chain_time(layers, x, heads)
    found |= {"best": {name: asdict(tiles) for name, tiles in best.items()}, "best_ms": seconds * scale}
    print(f"  best of {', '.join(best) or 'none'}: {seconds * scale:.3f} ms a step", flush=True)
    return found


def print_table(results: dict[str, Any]) -> None:
    """The tiles that won, as entries of ``linear_normed_tiles``; shapes without one are faster with norms apart."""
    by_shape: dict[str, list[str]] = {}
    for size, found in results.items():
        model, rows = size.split()
        for entry, tiles in found["best"].items():
            values = ", ".join(json.dumps(tiles[key]) for key in ("way", "block_m", "block_n", "block_k", "warps"))
            by_shape.setdefault(f"{model}.{entry}", []).append(f"{rows}: Tiles({values})")
    for name, entries in by_shape.items():
        print(f"    {SHAPES[name][:2]}: {{{', '.join(entries)}}},  # {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="C,A")
    parser.add_argument("--rows", default="1,2")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    models, rows_list = given.models.split(","), [int(one) for one in given.rows.split(",")]
    begin = time.perf_counter()
    jobs = jobs_of(models, rows_list)
    # Before anything touches the device: workers are forks, with contexts of their own.
    with multiprocessing.get_context("fork").Pool(given.workers) as pool:
        failed = [error for error in pool.map(compiled, jobs, chunksize=1) if error]
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - begin:.1f} s", *failed, sep="\n", flush=True)
    prepare(torch.empty(1, device=DEVICE).device)
    torch.manual_seed(0)
    out: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "device": "", "sizes": {}}
    out["device"] = torch.cuda.get_device_name()
    for model in models:
        layers = make_layers(model)
        for rows in rows_list:
            out["sizes"][f"{model} {rows}"] = one_size(model, rows, layers)
            if given.json:
                Path(given.json).write_text(json.dumps(out, indent=1) + "\n")
        del layers
        torch.cuda.empty_cache()
    print_table(out["sizes"])
    print(f"{time.perf_counter() - begin:.1f} s in all")


if __name__ == "__main__":
    main()
