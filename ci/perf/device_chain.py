"""A model's products in a chain of all its layers in one CUDA graph, with overlapping launches and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from linear_parts import DEVICE, SHAPES, launch, operands_of, table_of, timed
from torch.nn import functional
from triton import language as tl

from drivetrain_triton.linear import product_call
from drivetrain_triton.linear_tiles import Tiles
from drivetrain_triton.overlap import let_next_begin, wait_for_earlier
from drivetrain_triton.target import Target

LAYERS = {"A": 32, "C": 28}
CHAIN_ROWS = (1, 2, 4, 8, 16, 32, 64)


@triton.jit(do_not_specialize=["stride"])
def small_norm(x, out, stride, SIZE: tl.constexpr, OVERLAPS: tl.constexpr):  # noqa: ANN001, ANN201
    """A row scaled to unit mean square: stands for the small kernels between products."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    at = tl.program_id(0).to(tl.int64)
    values = tl.load(x + at * stride + tl.arange(0, SIZE)).to(tl.float32)
    scaled = values / tl.sqrt(tl.sum(values * values, axis=0) / SIZE + 1e-6)
    tl.store(out + at * SIZE + tl.arange(0, SIZE), scaled.to(out.dtype.element_ty))


class Chain:
    """A model's products at a few rows, with a small kernel where it has norms, rope and attention."""

    def __init__(self, model: str, rows: int) -> None:
        def empty(name: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            outputs, _, kind = SHAPES[f"{model}.{name}"]
            return torch.empty(rows, outputs // 2 if kind else outputs, dtype=dtype, device=DEVICE)

        self.model, self.rows = model, rows
        self.qkv, self.y, self.inner = empty("qkv"), empty("out"), empty("gate_up")
        self.logits = empty("head", torch.float32)
        self.x, self.a, self.b = torch.randn_like(self.y), torch.empty_like(self.y), torch.empty_like(self.y)
        heads = SHAPES[f"{model}.out"][1]  # what attention gives
        self.c, self.d = (torch.empty(rows, heads, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))

    def norm(self, x: torch.Tensor, out: torch.Tensor, target: Target) -> Callable[[], None]:
        options = {"SIZE": out.shape[1], "OVERLAPS": target.overlaps, "num_warps": 4, **target.options}
        return lambda: small_norm[(self.rows,)](x, out, x.stride(0), **options)

    def steps(self, weights: list[dict[str, torch.Tensor]], tiles: dict[str, Tiles] | None, target: Target) -> Any:
        """All launches of a step in order. Without tiles: the vendor's products."""

        def product(name: str, x: torch.Tensor, layer: dict[str, torch.Tensor], out: torch.Tensor) -> Callable[[], Any]:
            full = f"{self.model}.{name}"
            if tiles is None:
                return self.vendor(x, layer[full], out, name)
            call = product_call(operands_of(x, layer[full], full, out), target, tiles[full])
            return lambda: launch(call)

        found: list[Callable[[], Any]] = [self.norm(self.x, self.a, target)]
        for layer in weights[:-1]:
            found += [product("qkv", self.a, layer, self.qkv)]
            found += [self.norm(self.qkv, self.c, target), self.norm(self.c, self.d, target)]
            found += [product("out", self.d, layer, self.y), self.norm(self.y, self.b, target)]
            found += [product("gate_up", self.b, layer, self.inner)]
            found += [product("down", self.inner, layer, self.y), self.norm(self.y, self.a, target)]
        return [*found, product("head", self.a, weights[-1], self.logits)]

    def vendor(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, name: str) -> Callable[[], Any]:
        if name == "head":
            return lambda: out.copy_(torch.mm(x, weight.T, out_dtype=torch.float32))
        if name != "gate_up":
            return lambda: torch.mm(x, weight.T, out=out)

        def both() -> None:
            gate, up = functional.linear(x, weight).chunk(2, dim=1)
            torch.mul(functional.silu(gate), up, out=out)

        return both


def chain_weights(model: str) -> list[dict[str, torch.Tensor]]:
    """Every layer its own, and the head."""

    def made(name: str) -> torch.Tensor:
        outputs, inputs, _ = SHAPES[name]
        return torch.empty(outputs, inputs, dtype=torch.bfloat16, device=DEVICE).normal_(std=inputs**-0.5)

    head, names = f"{model}.head", [name for name in SHAPES if name[0] == model]
    layers = [{name: made(name) for name in names if name != head} for _ in range(LAYERS[model])]
    return [*layers, {head: made(head)}]


def best_tiles(results: dict[str, Any], rows: int) -> dict[str, Tiles]:
    """The fastest right variant of each shape, or the table's."""
    found = {}
    for name in SHAPES:
        tried = results.get(name, {}).get(rows, {}).get("variants", [])
        good = sorted((one for one in tried if one.get("right")), key=lambda one: one["seconds"])
        found[name] = Tiles(**good[0]["tiles"]) if good else table_of(name, rows)
    return found


def chain_settings(results: dict[str, Any], rows: int) -> dict[str, tuple[dict[str, Tiles] | None, bool]]:
    """name: (tiles, overlaps)."""
    table = {name: table_of(name, rows) for name in SHAPES}
    without = {name: table_of(name, rows, panels=False) for name in SHAPES}
    best = best_tiles(results, rows)
    settings: dict[str, tuple[dict[str, Tiles] | None, bool]] = {"vendor": (None, False)}
    settings |= {"table, overlaps": (table, True), "table, none": (table, False)}
    if without != table:
        settings |= {"table without panels, overlaps": (without, True)}
    return settings | {"best, overlaps": (best, True), "best, none": (best, False)}


def kernels(results: dict[str, Any], target: Target, sizes: list[tuple[str, int]]) -> list[Any]:
    """(shape, rows, tiles, target) of every launch, to compile before."""
    return [
        (name, rows, tiles[name], replace(target, overlaps=overlaps))
        for model, rows in sizes
        for tiles, overlaps in chain_settings(results, rows).values()
        for name in SHAPES
        if tiles and name[0] == model
    ]


def chains(
    results: dict[str, Any], sizes: list[tuple[str, int]], target: Target, compile_all: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    """Milliseconds a step in every setting, for all (model, rows) of ours."""
    sizes = [(model, rows) for model, rows in sizes if rows in CHAIN_ROWS]
    compile_all(kernels(results, target, sizes))
    found: dict[str, Any] = {}
    for model in dict.fromkeys(model for model, _ in sizes):
        weights = chain_weights(model)
        for rows in (rows for one, rows in sizes if one == model):
            found[f"{model} {rows}"] = one_chain(Chain(model, rows), weights, chain_settings(results, rows), target)
        del weights
        torch.cuda.empty_cache()
    return found


def one_chain(chain: Chain, weights: list[dict[str, torch.Tensor]], settings: Any, target: Target) -> dict[str, Any]:
    """One chain in all settings. The same tiles must give the same bits with overlaps and without."""
    found: dict[str, Any] = {}
    bits = {}
    for name, (tiles, overlaps) in settings.items():
        steps = chain.steps(weights, tiles, replace(target, overlaps=overlaps))
        work = partial(run_all, steps)
        chain.logits.fill_(float("nan"))
        found[name] = timed(work, 20) * 1e3
        bits[name] = chain.logits.clone()
    floor = sum(one.nbytes for layer in weights for one in layer.values()) / 4.6e12 * 1e3
    texts = "; ".join(f"{name} {found[name]:.3f}" for name in bits)
    print(f"chain of {chain.model}, {chain.rows} rows, ms a step (floor {floor:.2f}): {texts}")
    for one in ("table", "best"):
        same = torch.equal(bits[f"{one}, overlaps"], bits[f"{one}, none"])
        apart = float((bits[f"{one}, overlaps"] - bits["vendor"]).norm() / bits["vendor"].norm())
        faster = found[f"{one}, none"] / found[f"{one}, overlaps"]
        text = f"  {one}: overlaps {faster:.3f}x faster; bits {'equal' if same else 'DIFFER'}"
        print(f"{text}; {apart:.3f} from the vendor's after all layers", flush=True)
        found |= {f"{one}, same bits": same, f"{one}, from vendor": apart}
    return found


def run_all(steps: list[Callable[[], Any]]) -> None:
    for step in steps:
        step()
