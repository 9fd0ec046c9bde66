"""Linears of which a row's bits never depend on the other rows: one arithmetic for every number of rows.

The inputs K are cut into shares by the weight's shape alone. A share is summed from zero by matrix instructions over
K in order, and shares are added in order. One program may do all shares of a tile, or one program each share, and a
second kernel adds: the same sums in the same order. What else changes with the number of rows is how many of them a
program holds, and that only where every height is made of the same instruction (``tiles_of``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton import language as tl

from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier
from .target import Target

PROGRAMS = 128  # wanted of few rows: shares are cut until there are so many
SHORTEST = 256  # inputs of a share, at least
PARTIAL_BYTES = 16 << 20  # what shares apart may leave in memory before they are added
ONE_HEIGHT = (100, 101, 103, 110)  # matrix units whose instructions hold all rows of a tile
GROUP = 8  # tiles of rows that take the same weights one after another, while caches hold them
ADDED = 1024  # columns of a program that adds shares


class Tiles(NamedTuple):
    """``rows`` x ``outs`` results of a program of ``warps``, ``step`` inputs at a time, ``stages`` of them under
    way."""

    rows: int
    outs: int
    step: int
    warps: int
    stages: int


def tiles_of(rows: int, ins: int, item_bytes: int, target: Target) -> Tiles:
    """Tiles for a number of rows: the height changes only where an element's sum stays the same instructions.

    float32 without matrix units is a chain of fused multiply-adds over K, whatever the tile. 16-bit values: before
    compute capability 9.0, and in 12.0, a tile of any height is made of m16n8k16; in 9.0 of m64n128k16 where its rows
    are a multiple of 64 and four warps take each 64. In 10.0 the height is part of the instruction, so there is one.
    """
    step = 32 if ins % 64 else 64  # masked loads take registers
    if item_bytes == 4:
        return Tiles(16, 64, 32, 4, 3) if rows <= 16 else Tiles(64, 64, 16, 8, 3)
    if target.arch in ONE_HEIGHT:
        return Tiles(128, 128, step, 8, 4)
    if target.arch == 90:
        return Tiles(64, 128, step, 4, 5) if rows <= 64 else Tiles(128, 128, step, 8, 4)
    return Tiles(16, 128, step, 4, 4) if rows <= 16 else Tiles(128, 128, 32, 8, 4)


@lru_cache(maxsize=4096)
def shares_of(outs: int, ins: int) -> tuple[int, int]:
    """(shares, inputs of each) of a weight: by its shape only, as the order of a sum must not hang on the rows."""
    panels, shares = -(-outs // 128), 1
    while panels * shares < PROGRAMS and ins >= 2 * shares * SHORTEST:
        shares *= 2
    each = -(-ins // (shares * 64)) * 64  # a multiple of every step
    return max(1, -(-ins // each)), each


@triton.jit
def place_of(number, tiles, panels, GROUP: tl.constexpr):
    """(tile, panel) of a program: groups of GROUP tiles go through all panels together."""
    group = number // (GROUP * panels)
    first = group * GROUP
    size = tl.minimum(tiles - first, GROUP)
    inside = number - group * GROUP * panels
    return first + inside % size, inside // size


@kernel
@triton.jit(do_not_specialize=["rows", "tiles", "taken"])
def invariant_products(
    x,  # [rows, ins], rows x_stride apart
    weight,  # [outs, ins] contiguous
    bias,  # [outs]; only with BIAS
    out,  # [rows, outs], or float32 sums of shares [shares, rows, outs] where not DIRECT
    rows,
    tiles,
    taken,
    x_stride,
    ins,
    outs,
    size,
    EVEN: tl.constexpr,  # steps of BLOCK_K fill the inputs
    BIAS: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (tiles * panels, programs a tile): each takes ``taken`` shares of ``size`` inputs, a multiple of BLOCK_K."""
    let_next_begin(OVERLAPS)
    tile, panel = place_of(tl.program_id(0), tiles, tl.cdiv(outs, BLOCK_N), GROUP)
    row, column = tile * BLOCK_M + tl.arange(0, BLOCK_M), panel * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    there = (row < rows)[:, None]
    x_rows = x + row.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + tl.minimum(column, outs - 1).to(tl.int64)[:, None] * ins
    wait_for_earlier(OVERLAPS)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for share in range(tl.program_id(1) * taken, (tl.program_id(1) + 1) * taken):
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(share * size, tl.minimum((share + 1) * size, ins), BLOCK_K):
            at = (first + step)[None, :]
            if EVEN:
                a = tl.load(x_rows + at, mask=there, other=0.0)
                b = tl.load(weight_rows + at)
            else:
                a = tl.load(x_rows + at, mask=there & (at < ins), other=0.0)
                b = tl.load(weight_rows + at, mask=at < ins, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        total += acc
    if DIRECT:
        if BIAS:
            total += tl.load(bias + column, mask=column < outs, other=0.0).to(tl.float32)[None, :]
        goal = out
    else:
        goal = out + tl.program_id(1).to(tl.int64) * rows * outs
    place = goal + row.to(tl.int64)[:, None] * outs + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=there & (column < outs)[None, :])


@kernel
@triton.jit
def add_shares(
    partial,  # [SHARES, rows, OUTS] float32
    bias,  # [OUTS]; only with BIAS
    out,  # [rows, OUTS]
    OUTS: tl.constexpr,
    SHARES: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (rows, pieces of a row): shares in order, then the bias, rounded once: as one program does for all."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < OUTS
    place = row * OUTS + column
    apart = tl.num_programs(0).to(tl.int64) * OUTS
    total = tl.load(partial + place, mask=inside, other=0.0)
    for share in tl.static_range(1, SHARES):
        total += tl.load(partial + share * apart + place, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


class Operands(NamedTuple):
    """x [M, K] with last axis contiguous, weight [N, K] contiguous, bias [N] or None; out [M, N]."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor


class Launch(NamedTuple):
    """One launch, not yet made: ``kernel[grid](*args, **options)``."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


@lru_cache(maxsize=4096)
def settings(tiles: Tiles, ins: int, biased: bool, direct: bool, target: Target) -> dict[str, Any]:
    """A launch's options."""
    ways = {"EVEN": ins % tiles.step == 0, "BIAS": biased and direct, "DIRECT": direct}
    blocks = {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.outs, "BLOCK_K": tiles.step, "GROUP": GROUP}
    options = {"OVERLAPS": target.overlaps, "num_warps": tiles.warps, "num_stages": tiles.stages}
    return ways | blocks | options | target.options


def launches_of(operands: Operands, target: Target) -> list[Launch]:
    """What is to be run: one kernel, or where that leaves the device empty, one for the shares and one that adds."""
    x, weight, bias, out = operands
    (rows, ins), outs = x.shape, weight.shape[0]
    tiles, (shares, size) = tiles_of(rows, ins, weight.element_size(), target), shares_of(outs, ins)
    height = -(-rows // tiles.rows)
    programs, terms = height * -(-outs // tiles.outs), weight if bias is None else bias
    if shares == 1 or programs >= target.multiprocessors or 4 * shares * rows * outs > PARTIAL_BYTES:
        options = settings(tiles, ins, bias is not None, True, target)
        args = (x, weight, terms, out, rows, height, shares, x.stride(0), ins, outs, size)
        return [Launch(invariant_products, (programs, 1), args, options)]
    partial = torch.empty((shares, rows, outs), dtype=torch.float32, device=x.device)
    args = (x, weight, terms, partial, rows, height, 1, x.stride(0), ins, outs, size)
    parts = settings(tiles, ins, bias is not None, False, target)
    added = {"OUTS": outs, "SHARES": shares, "BIAS": bias is not None, "BLOCK": ADDED, "OVERLAPS": target.overlaps}
    grid, added = (rows, -(-outs // ADDED)), added | {"num_warps": 4} | target.options
    return [
        Launch(invariant_products, (programs, shares), args, parts),
        Launch(add_shares, grid, (partial, terms, out), added),
    ]


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, target: Target
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N]; summed in float32, rounded once."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    for launch in launches_of(Operands(x, weight, bias, out), target):
        launch.kernel[launch.grid](*launch.args, **launch.options)
    return out
