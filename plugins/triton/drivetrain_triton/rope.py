"""Rotary positions: tables of cosines and sines, and the rotation of heads. One launch each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton import language as tl

from drivetrain_api.v1 import RopeAnglesSpec, RopeSpec

from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier
from .target import Target

TOKENS = 4  # of a program of _angles
HEADS = 8  # of a program of _rotate
WARPS = 4


@triton.jit
def cos_sin(phase):
    """Cosine and sine of a float32 tile, within 2e-7 for phases up to 2^26.

    The nearest multiple of pi/2 is taken off in float64, where that product is accurate enough without a table;
    what is left, at most pi/4, goes through Taylor's polynomials.
    """
    wide = phase.to(tl.float64)
    quarter = tl.floor(wide * tl.full((), 0.6366197723675814, tl.float64) + tl.full((), 0.5, tl.float64))
    left = (wide - quarter * tl.full((), 1.5707963267948966, tl.float64)).to(tl.float32)
    turn = quarter.to(tl.int64).to(tl.int32) & 3
    square = left * left
    even = 1.0 + square * (
        -0.5 + square * (1 / 24 + square * (-1 / 720 + square * (1 / 40320 - square * (1 / 3628800))))
    )
    odd = left + left * square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square * (1 / 362880))))
    swapped = (turn & 1) == 1
    cos = tl.where(swapped, odd, even)
    sin = tl.where(swapped, even, odd)
    return tl.where((turn == 1) | (turn == 2), -cos, cos), tl.where(turn >= 2, -sin, sin)


@kernel
@triton.jit(do_not_specialize=["tokens", "position_stride"], do_not_specialize_on_alignment=["positions"])
def _angles(
    positions,  # [tokens], or three such rows position_stride apart with ROWS = 3
    inv_freq,  # [HALF]
    cos,  # [tokens, HALF]
    sin,
    tokens,
    position_stride,
    FACTOR: tl.constexpr,
    FIRST: tl.constexpr,  # frequencies of the first section, and of the first two together
    SECOND: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # Once a step, between its preparation and its layers: the next kernel begins only when the preparation has ended
    # (see ``overlap``).
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens) & (column < HALF)
    frequency = tl.load(inv_freq + column, mask=column < HALF, other=0.0)
    wait_for_earlier(OVERLAPS)
    let_next_begin(OVERLAPS)
    if ROWS == 1:
        position = tl.load(positions + token, mask=token < tokens, other=0)
    else:
        section = (column >= FIRST).to(tl.int32) + (column >= SECOND).to(tl.int32)
        position = tl.load(positions + section * position_stride + token, mask=inside, other=0)
    c, s = cos_sin(position.to(tl.float32) * frequency)
    out = token.to(tl.int64) * HALF + column
    tl.store(cos + out, c * FACTOR, mask=inside)
    tl.store(sin + out, s * FACTOR, mask=inside)


@kernel
@triton.jit
def _rotate(
    x,  # [T, heads, DIM]
    cos,  # [T, HALF] float32
    sin,
    out,  # [T, heads, DIM] contiguous
    heads,
    token_stride,
    head_stride,
    angle_stride,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,  # power of two not below DIM - 2 HALF; 0: none
    HALVES: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (pair < HALF)
    source = x + token * token_stride + head * head_stride
    goal = out + (token * heads + head) * DIM
    c = tl.load(cos + token * angle_stride + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + token * angle_stride + pair, mask=pair < HALF, other=0.0)
    if HALVES:
        a = tl.load(source + pair, mask=inside, other=0.0)
        b = tl.load(source + HALF + pair, mask=inside, other=0.0)
    else:
        both = (2 * pair)[:, :, None] + tl.arange(0, 2)[None, None, :]
        known = tl.broadcast_to(inside[:, :, None], (HEADS, BLOCK, 2))
        a, b = tl.split(tl.load(source[:, :, None] + both, mask=known, other=0.0))
    kind = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    first, second = (a * c - b * s).to(kind), (b * c + a * s).to(kind)
    if HALVES:
        tl.store(goal + pair, first, mask=inside)
        tl.store(goal + HALF + pair, second, mask=inside)
    else:
        tl.store(goal[:, :, None] + both, tl.join(first, second), mask=known)
    if REST > 0:
        column = 2 * HALF + tl.arange(0, REST)[None, :]
        there = (head < heads) & (column < DIM)
        tl.store(goal + column, tl.load(source + column, mask=there, other=0.0), mask=there)


def make_angles(
    spec: RopeAnglesSpec, target: Target
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """rope.angles/1: ``fn(positions [T] or [3, T], inv_freq [rotary_dim / 2]) -> (cos, sin)``."""
    half = spec.rotary_dim // 2
    sections = (*spec.sections, 0, 0)
    settings = {
        "FACTOR": float(spec.attention_factor),
        "FIRST": sections[0],
        "SECOND": sections[0] + sections[1],
        "HALF": half,
        "BLOCK": triton.next_power_of_2(half),
        "TOKENS": TOKENS,
        "OVERLAPS": target.overlaps,
    } | target.options

    def angles(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, rows = positions.shape[-1], 1 if positions.dim() == 1 else 3
        if positions.stride(-1) != 1:
            positions = positions.contiguous()
        cos = torch.empty((tokens, half), dtype=torch.float32, device=positions.device)
        sin = torch.empty_like(cos)
        if tokens:
            grid = (triton.cdiv(tokens, TOKENS),)
            stride = positions.stride(0) if rows == 3 else 0
            _angles[grid](positions, inv_freq, cos, sin, tokens, stride, ROWS=rows, num_warps=WARPS, **settings)
        return cos, sin

    return angles


def make_rope(spec: RopeSpec, target: Target) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """rope.apply/1: ``fn(x [T, N, D], cos, sin [T, rotary_dim / 2]) -> [T, N, D]`` contiguous."""
    half, rest = spec.rotary_dim // 2, spec.head_dim - spec.rotary_dim
    settings = {
        "DIM": spec.head_dim,
        "HALF": half,
        "BLOCK": triton.next_power_of_2(half),
        "REST": triton.next_power_of_2(rest) if rest else 0,
        "HALVES": spec.style == "halves",
        "HEADS": HEADS,
        "OVERLAPS": target.overlaps,
    } | target.options

    def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        tokens, heads, dim = x.shape
        out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
        if x.numel():
            if x.stride(-1) != 1:
                x = x.contiguous()
            if cos.stride() != sin.stride() or cos.stride(-1) != 1:
                cos, sin = cos.contiguous(), sin.contiguous()
            grid = (tokens, triton.cdiv(heads, HEADS))
            strides = (x.stride(0), x.stride(1), cos.stride(0))
            _rotate[grid](x, cos, sin, out, heads, *strides, num_warps=WARPS, **settings)
        return out

    return rope
