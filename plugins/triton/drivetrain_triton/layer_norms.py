"""Layer norms, alone and after a residual sum: one launch, a program a row, float32 inside.

A row is walked three times: for its mean, for the squares of what is left, and for the result. How it is summed depends
on its size alone, so its bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton import language as tl

from drivetrain_api.v1 import AddLayerNormSpec, LayerNormSpec

from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier
from .target import Target

PIECE = 4096  # elements of a row that a program holds at once


@triton.jit
def summed(x, residual, at, SIZE: tl.constexpr, ADD: tl.constexpr):
    """A piece of the row in float32: x, or x + residual as it is kept, rounded to the residual's dtype."""
    value = tl.load(x + at, mask=at < SIZE, other=0.0).to(tl.float32)
    if ADD:
        stream = tl.load(residual + at, mask=at < SIZE, other=0.0)
        value = (value + stream.to(tl.float32)).to(stream.dtype).to(tl.float32)
    return value


@kernel
@triton.jit
def _layer_norm(
    x,  # [rows, SIZE], rows x_stride apart
    residual,  # the same, rows residual_stride apart; only with ADD
    weight,  # [SIZE]
    bias,  # [SIZE]
    normed,  # [rows, SIZE] contiguous
    total,  # the same; only with ADD
    x_stride,
    residual_stride,
    EPS: tl.constexpr,
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x += row * x_stride
    residual += row * residual_stride
    out = row * SIZE
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, SIZE, BLOCK):
        at = first + column
        value = summed(x, residual, at, SIZE, ADD)
        if ADD:
            tl.store(total + out + at, value.to(total.dtype.element_ty), mask=at < SIZE)
        sums += value
    mean = tl.sum(sums, axis=0) / SIZE
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, SIZE, BLOCK):
        at = first + column
        centred = tl.where(at < SIZE, summed(x, residual, at, SIZE, ADD) - mean, 0.0)
        squares += centred * centred
    factor = tl.rsqrt(tl.sum(squares, axis=0) / SIZE + EPS)
    for first in range(0, SIZE, BLOCK):
        at = first + column
        w = tl.load(weight + at, mask=at < SIZE, other=0.0)
        b = tl.load(bias + at, mask=at < SIZE, other=0.0)
        result = (summed(x, residual, at, SIZE, ADD) - mean) * factor * w.to(tl.float32) + b.to(tl.float32)
        tl.store(normed + out + at, result.to(w.dtype), mask=at < SIZE)


class LayerNorm:
    """norm.layer/1 and norm.add_layer/1 of one spec."""

    def __init__(self, spec: LayerNormSpec | AddLayerNormSpec, target: Target) -> None:
        self._size = spec.size
        block = min(PIECE, triton.next_power_of_2(spec.size))
        self._settings = {
            "EPS": spec.eps,
            "SIZE": spec.size,
            "BLOCK": block,
            "OVERLAPS": target.overlaps,
            "num_warps": max(1, min(16, block // 256)),
        } | target.options

    def norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """x [..., size], weight and bias [size] -> [..., size] of the weight's dtype."""
        normed = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
        rows, stride = self._rows(x)
        if x.numel():
            grid = (x.numel() // self._size,)
            _layer_norm[grid](rows, rows, weight, bias, normed, normed, stride, 0, ADD=False, **self._settings)
        return normed

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and residual [..., size] -> (normed of the weight's dtype, x + residual of the residual's dtype)."""
        normed = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
        total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
        (rows, stride), (stream, apart) = self._rows(x), self._rows(residual)
        if x.numel():
            grid = (x.numel() // self._size,)
            _layer_norm[grid](rows, stream, weight, bias, normed, total, stride, apart, ADD=True, **self._settings)
        return normed, total

    def _rows(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """x as rows that lie one stride apart, and the stride."""
        if x.dim() == 2 and x.stride(1) == 1:
            return x, x.stride(0)
        return x.contiguous(), self._size


def make_layer(
    spec: LayerNormSpec, target: Target
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """norm.layer/1."""
    return LayerNorm(spec, target).norm


def make_add_layer(
    spec: AddLayerNormSpec, target: Target
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """norm.add_layer/1."""
    return LayerNorm(spec, target).add_norm
