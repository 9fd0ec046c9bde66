"""RMS norms, alone and after a residual sum. One launch, float32 inside.

A row is held in registers whole up to ``WHOLE`` elements; rows of a few hundred share a program. Longer rows are
walked twice. How a row is summed depends on its size alone, so its bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton import language as tl

from drivetrain_api.v1 import AddRmsNormSpec, RmsNormSpec

from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier
from .target import Target

WHOLE = 16384
PIECE = 2048
TILE = 1024  # elements that a program of small rows holds


@triton.jit
def weighted(normed, weight, OFFSET: tl.constexpr, ROUND: tl.constexpr):
    """``normed`` float32 times (weight + OFFSET); with ROUND both factors are rounded to the weight's dtype first."""
    if ROUND:
        scale = weight
        if OFFSET != 0.0:
            scale = (weight.to(tl.float32) + OFFSET).to(weight.dtype)
        return normed.to(weight.dtype).to(tl.float32) * scale.to(tl.float32)
    else:
        return normed * (weight.to(tl.float32) + OFFSET)


@kernel
@triton.jit(do_not_specialize=["rows"])
def _norm(
    x,  # element (row, column) at (row // heads) * token_stride + row % heads * head_stride + column
    residual,  # [rows, SIZE], rows residual_stride apart; only with ADD
    weight,  # [SIZE], or [heads, SIZE] with OWN
    normed,  # [rows, SIZE] contiguous
    total,  # the same; only with ADD
    rows,
    heads,
    token_stride,
    head_stride,
    residual_stride,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND: tl.constexpr,
    ADD: tl.constexpr,
    OWN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    head = row % heads
    inside = (row < rows) & (column < SIZE)
    own = weight + column
    if OWN:
        own += head * SIZE
    w = tl.load(own, mask=column < SIZE, other=0.0)
    wait_for_earlier(OVERLAPS)
    place = (row // heads).to(tl.int64) * token_stride + head * head_stride + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    out = row.to(tl.int64) * SIZE + column
    if ADD:
        stream = tl.load(residual + row.to(tl.int64) * residual_stride + column, mask=inside, other=0.0)
        kept = (value + stream.to(tl.float32)).to(stream.dtype)
        tl.store(total + out, kept, mask=inside)
        value = kept.to(tl.float32)
    mean = tl.sum(value * value, axis=1, keep_dims=True) / SIZE
    result = weighted(value * tl.rsqrt(mean + EPS), w, OFFSET, ROUND)
    tl.store(normed + out, result.to(w.dtype), mask=inside)


@kernel
@triton.jit
def _long_norm(
    x,
    residual,
    weight,
    normed,
    total,
    heads,
    token_stride,
    head_stride,
    residual_stride,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND: tl.constexpr,
    ADD: tl.constexpr,
    OWN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """As ``_norm``, for a row that registers do not hold: summed, then read again."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x += (row // heads).to(tl.int64) * token_stride + row % heads * head_stride
    residual += row.to(tl.int64) * residual_stride
    out = row.to(tl.int64) * SIZE
    if OWN:
        weight += row % heads * SIZE
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, SIZE, BLOCK):
        at = first + column
        value = tl.load(x + at, mask=at < SIZE, other=0.0).to(tl.float32)
        if ADD:
            stream = tl.load(residual + at, mask=at < SIZE, other=0.0)
            kept = (value + stream.to(tl.float32)).to(stream.dtype)
            tl.store(total + out + at, kept, mask=at < SIZE)
            value = kept.to(tl.float32)
        squares += value * value
    factor = tl.rsqrt(tl.sum(squares, axis=0) / SIZE + EPS)
    for first in range(0, SIZE, BLOCK):
        at = first + column
        value = tl.load(x + at, mask=at < SIZE, other=0.0).to(tl.float32)
        if ADD:
            stream = tl.load(residual + at, mask=at < SIZE, other=0.0)
            value = (value + stream.to(tl.float32)).to(stream.dtype).to(tl.float32)
        w = tl.load(weight + at, mask=at < SIZE, other=0.0)
        tl.store(normed + out + at, weighted(value * factor, w, OFFSET, ROUND).to(w.dtype), mask=at < SIZE)


def row_shape(size: int) -> tuple[int, int, int]:
    """(BLOCK, ROWS, warps) for a row size: 8 elements a thread, one 16-byte load of bfloat16, up to 16 warps.

    More warps shorten a lone row's time, which decides at decode; at prefill two such programs share a processor.
    """
    block = triton.next_power_of_2(size)
    rows = max(1, TILE // block)
    return block, rows, max(1, min(16, rows * block // 256))


def as_rows(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return (x, heads, token stride, head stride): x as it is where two strides tell where its rows are."""
    own = weight.dim() == 2
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        x = x.reshape(-1, *weight.shape).contiguous()
    if x.dim() == 3:
        return x, x.shape[1], x.stride(0), x.stride(1)
    if own:
        return x, x.shape[0], 0, x.stride(0)
    return x, 1, x.stride(0), 0


class Norm:
    """norm.rms/1 and norm.add_rms/1 of one spec."""

    def __init__(self, spec: RmsNormSpec | AddRmsNormSpec, target: Target) -> None:
        self._size = spec.size
        self._settings = {
            "EPS": spec.eps,
            "OFFSET": float(spec.offset),
            "ROUND": spec.round_before_weight,
            "SIZE": spec.size,
            "OVERLAPS": target.overlaps,
        } | target.options
        self._block, self._rows, self._warps = row_shape(spec.size)

    def rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [..., size], weight [size] or [N, size] -> [..., size] of the weight's dtype."""
        normed = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
        if x.numel():
            self._launch(x, x, weight, normed, normed, 0, False)
        return normed

    def add_rms(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and residual [..., size] -> (normed of the weight's dtype, x + residual of the residual's dtype)."""
        normed = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
        total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
        if residual.dim() != 2 or residual.stride(-1) != 1:
            residual = residual.contiguous()
        stride = residual.stride(0) if residual.dim() == 2 else self._size
        if x.numel():
            self._launch(x, residual, weight, normed, total, stride, True)
        return normed, total

    def _launch(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        normed: torch.Tensor,
        total: torch.Tensor,
        residual_stride: int,
        add: bool,
    ) -> None:
        rows = x.numel() // self._size
        x, *place = as_rows(x, weight)
        tensors, own = (x, residual, weight, normed, total), weight.dim() == 2
        if self._size > WHOLE:
            _long_norm[(rows,)](
                *tensors, *place, residual_stride, ADD=add, OWN=own, BLOCK=PIECE, num_warps=16, **self._settings
            )
            return
        _norm[(triton.cdiv(rows, self._rows),)](
            *tensors,
            rows,
            *place,
            residual_stride,
            ADD=add,
            OWN=own,
            BLOCK=self._block,
            ROWS=self._rows,
            num_warps=self._warps,
            **self._settings,
        )


def make_rms(spec: RmsNormSpec, target: Target) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """norm.rms/1."""
    return Norm(spec, target).rms


def make_add_rms(
    spec: AddRmsNormSpec, target: Target
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """norm.add_rms/1."""
    return Norm(spec, target).add_rms
