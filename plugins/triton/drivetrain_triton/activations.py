"""Activations, in one launch: act(first half) * second half of each row, or act of the whole row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import language as tl

from drivetrain_api.v1 import ActivationSpec, GatedActivationSpec

from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier
from .target import Target

BLOCK = 1024
WARPS = 4


@triton.jit
def activated(x, KIND: tl.constexpr):
    """silu, gelu or gelu_tanh of a float32 tile.

    (1 + tanh z) / 2 is the logistic function of 2 z, which needs an exponential only.
    """
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    else:
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@kernel
@triton.jit
def _gated(gate_up, out, stride, KIND: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """gate_up [T, 2 SIZE], rows ``stride`` apart -> out [T, SIZE]. The activation is rounded before it multiplies."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + SIZE + column, mask=inside, other=0.0)
    act = activated(gate.to(tl.float32), KIND).to(gate.dtype)
    product = act.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * SIZE + column, product.to(gate.dtype), mask=inside)


@kernel
@triton.jit
def _plain(x, out, stride, KIND: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """x [T, SIZE], rows ``stride`` apart -> out [T, SIZE]."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + row * stride + column, mask=inside, other=0.0)
    tl.store(out + row * SIZE + column, activated(value.to(tl.float32), KIND).to(value.dtype), mask=inside)


def _shape(spec: ActivationSpec | GatedActivationSpec, target: Target) -> tuple[int, dict[str, Any]]:
    """Return how many programs a row takes, and a launch's options."""
    block = min(BLOCK, triton.next_power_of_2(spec.size))
    settings = {"KIND": spec.kind, "SIZE": spec.size, "BLOCK": block, "OVERLAPS": target.overlaps, "num_warps": WARPS}
    return triton.cdiv(spec.size, block), settings | target.options


def make_plain(spec: ActivationSpec, target: Target) -> Callable[[torch.Tensor], torch.Tensor]:
    """activation.plain/1: ``fn(x [T, size]) -> [T, size]``."""
    size, (pieces, settings) = spec.size, _shape(spec, target)

    def plain(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if out.numel():
            if x.dim() != 2 or x.stride(-1) != 1:
                x = x.reshape(-1, size).contiguous()
            _plain[(x.shape[0], pieces)](x, out, x.stride(0), **settings)
        return out

    return plain


def make_gated(spec: GatedActivationSpec, target: Target) -> Callable[[torch.Tensor], torch.Tensor]:
    """activation.gated/1: ``fn(gate_up [T, 2 * size]) -> [T, size]``."""
    size, (pieces, settings) = spec.size, _shape(spec, target)

    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
        if out.numel():
            if gate_up.dim() != 2 or gate_up.stride(-1) != 1:
                gate_up = gate_up.reshape(-1, 2 * size).contiguous()
            _gated[(gate_up.shape[0], pieces)](gate_up, out, gate_up.stride(0), **settings)
        return out

    return gated
