"""Model A's products in a chain of 32 layers in one CUDA graph, with overlapping launches and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from linear_parts import DEVICE, SHAPES, launch, operands_of, timed
from torch.nn import functional
from triton import language as tl

from drivetrain_triton.linear import product_call
from drivetrain_triton.linear_tiles import Tiles, choose
from drivetrain_triton.overlap import let_next_begin, wait_for_earlier
from drivetrain_triton.target import Target

HIDDEN, INNER, LAYERS = 4096, 14336, 32


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
    """Model A's products at a few rows, with a small kernel where a model has norms, rope and attention."""

    def __init__(self, rows: int) -> None:
        def empty(size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(rows, size, dtype=dtype, device=DEVICE)

        self.rows, self.x = rows, torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        self.a, self.b, self.qkv, self.inner = empty(HIDDEN), empty(HIDDEN), empty(6144), empty(INNER)
        self.y, self.logits = empty(HIDDEN), empty(128256, torch.float32)

    def norm(self, x: torch.Tensor, out: torch.Tensor, target: Target) -> Callable[[], None]:
        options = {"SIZE": HIDDEN, "OVERLAPS": target.overlaps, "num_warps": 4, **target.options}
        return lambda: small_norm[(self.rows,)](x, out, x.stride(0), **options)

    def steps(self, weights: list[dict[str, torch.Tensor]], tiles: dict[str, Tiles] | None, target: Target) -> Any:
        """All launches of a step in order. Without tiles: the vendor's products."""

        def product(name: str, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
            if tiles is None:
                return self.vendor(x, weight, out, name)
            call = product_call(operands_of(x, weight, name, out), target, tiles[name])
            return lambda: launch(call)

        found: list[Callable[[], Any]] = [self.norm(self.x, self.a, target)]
        for layer in weights[:-1]:
            found += [product("A.qkv", self.a, layer["A.qkv"], self.qkv)]
            found += [self.norm(self.qkv, self.b, target), self.norm(self.b, self.a, target)]
            found += [product("A.out", self.a, layer["A.out"], self.y), self.norm(self.y, self.b, target)]
            found += [product("A.gate_up", self.b, layer["A.gate_up"], self.inner)]
            found += [product("A.down", self.inner, layer["A.down"], self.y), self.norm(self.y, self.a, target)]
        return [*found, product("A.head", self.a, weights[-1]["A.head"], self.logits)]

    def vendor(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, name: str) -> Callable[[], Any]:
        if name == "A.head":
            return lambda: out.copy_(torch.mm(x, weight.T, out_dtype=torch.float32))
        if name != "A.gate_up":
            return lambda: torch.mm(x, weight.T, out=out)

        def both() -> None:
            gate, up = functional.linear(x, weight).chunk(2, dim=1)
            torch.mul(functional.silu(gate), up, out=out)

        return both


def chain_weights() -> list[dict[str, torch.Tensor]]:
    """15 GB: every layer its own, and the head."""

    def made(name: str) -> torch.Tensor:
        outputs, inputs, _ = SHAPES[name]
        return torch.empty(outputs, inputs, dtype=torch.bfloat16, device=DEVICE).normal_(std=inputs**-0.5)

    layers = [{n: made(n) for n in SHAPES if n[0] == "A" and n != "A.head"} for _ in range(LAYERS)]
    return [*layers, {"A.head": made("A.head")}]


def best_tiles(results: dict[str, Any], rows: int) -> dict[str, Tiles]:
    """The fastest right variant of each of A's shapes, or the table's."""
    found = {}
    for name, (outputs, inputs, _) in SHAPES.items():
        tried = results.get(name, {}).get(rows, {}).get("variants", [])
        good = sorted((one for one in tried if one.get("right")), key=lambda one: one["seconds"])
        found[name] = Tiles(**good[0]["tiles"]) if good else choose(rows, outputs, inputs, 90)
    return found


def chain_settings(results: dict[str, Any], rows: int) -> dict[str, tuple[dict[str, Tiles] | None, bool]]:
    """name: (tiles, overlaps)."""
    table = {name: choose(rows, outputs, inputs, 90) for name, (outputs, inputs, _) in SHAPES.items()}
    best = best_tiles(results, rows)
    no_fetch = {name: replace(one, ahead=0) for name, one in best.items()}
    twice = {name: replace(one, ahead=min(8192, max(one.ahead, 1024) * 2)) for name, one in best.items()}
    settings: dict[str, tuple[dict[str, Tiles] | None, bool]] = {"vendor": (None, False)}
    settings |= {"table, overlaps": (table, True), "table, none": (table, False)}
    settings |= {"best, overlaps": (best, True), "best, none": (best, False)}
    return settings | {"best, no fetch ahead": (no_fetch, True), "best, twice ahead": (twice, True)}


def kernels(results: dict[str, Any], target: Target, rows_list: tuple[int, ...]) -> list[Any]:
    """(shape, rows, tiles, target) of every launch, to compile before."""
    return [
        (name, rows, tiles[name], replace(target, overlaps=overlaps))
        for rows in rows_list
        for tiles, overlaps in chain_settings(results, rows).values()
        for name in SHAPES
        if tiles and name[0] == "A"
    ]


def chains(results: dict[str, Any], target: Target, compile_all: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Milliseconds a step of every setting; the same tiles must give the same bits with overlaps and without."""
    rows_list = (1, 8)
    compile_all(kernels(results, target, rows_list))
    weights, found = chain_weights(), {}
    floor = sum(one.nbytes for layer in weights for one in layer.values()) / 4.6e12 * 1e3
    for rows in rows_list:
        chain, bits = Chain(rows), {}
        for name, (tiles, overlaps) in chain_settings(results, rows).items():
            steps = chain.steps(weights, tiles, replace(target, overlaps=overlaps))
            chain.logits.fill_(float("nan"))
            found[f"{rows}: {name}"] = timed(lambda steps=steps: [step() for step in steps] and None, 20) * 1e3
            bits[name] = chain.logits.clone()
        texts = [f"{name} {found[f'{rows}: {name}']:.3f}" for name in bits]
        print(f"chain of {LAYERS} layers, {rows} rows, ms (floor {floor:.2f}): {'; '.join(texts)}")
        for one in ("table", "best"):
            same = torch.equal(bits[f"{one}, overlaps"], bits[f"{one}, none"])
            faster = found[f"{rows}: {one}, none"] / found[f"{rows}: {one}, overlaps"]
            print(f"  {one}: overlaps {faster:.3f}x faster; bits {'equal' if same else 'DIFFER'}", flush=True)
            found[f"{rows}: {one}, same bits"] = same
    return found
