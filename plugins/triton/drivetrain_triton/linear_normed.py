"""Linears for few rows with the addition and the norm before them: host side."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from drivetrain_api.v1 import AddRmsNormSpec
from drivetrain_triton.linear import KINDS, Call
from drivetrain_triton.linear_normed_rows import normed_row_products
from drivetrain_triton.linear_normed_tiles import choose, fits, power
from drivetrain_triton.linear_tiles import Tiles
from drivetrain_triton.target import Target


class Normed(NamedTuple):
    """x [M, K], residual [M, K] or None, scale [K] and its norm; weight [N or 2 S, K], bias [N] or None; out [M, N or
    S], total [M, K]. Last axes are contiguous."""

    x: torch.Tensor
    residual: torch.Tensor | None
    scale: torch.Tensor
    norm: AddRmsNormSpec
    weight: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    total: torch.Tensor
    kind: str = ""


@lru_cache(maxsize=4096)
def settings(
    tiles: Tiles, target: Target, norm: AddRmsNormSpec, adds: bool, has_bias: bool, kind: str
) -> dict[str, Any]:
    """A launch's options."""
    options = {"EPS": norm.eps, "OFFSET": float(norm.offset), "ROUND": norm.round_before_weight, "ADD": adds}
    options |= {"HAS_BIAS": has_bias, "KIND": kind, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k}
    options |= {"EVEN_K": norm.size % tiles.block_k == 0, "OVERLAPS": target.overlaps}
    options |= {"num_warps": tiles.warps, **target.options}
    return options | {"ROWS": tiles.block_m, "WHOLE": power(norm.size)}


def normed_call(given: Normed, target: Target, tiles: Tiles) -> Call:
    """The launch of these operands with these tiles."""
    x, residual, scale, norm, weight, bias, out, total, kind = given
    rows, inputs = x.shape
    options = settings(tiles, target, norm, residual is not None, bias is not None, kind)
    other = x if residual is None else residual
    tensors = (x, other, scale, weight, weight if bias is None else bias, out, total)
    sizes = (rows, out.shape[1], inputs, x.stride(0), other.stride(0))
    programs = -(-weight.shape[0] // tiles.block_n) + 1  # the last one stores the sums
    return Call(normed_row_products, (programs,), (*tensors, *sizes), options)


def normed_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    scale: torch.Tensor,
    norm: AddRmsNormSpec,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: Target,
    kind: str = "",
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] plus residual [M, K], normed, times weight [N, K] transposed: ([M, N], the sum [M, K]).

    Rounded as by separate kernels. A residual of None: the sum is x in float32. ``kind``: gated, as ``small_gated``.
    """
    if kind and kind not in KINDS:
        raise ValueError(f"{kind!r} is no gated activation: one of {', '.join(KINDS)}")
    rows, inputs = x.shape
    outputs = weight.shape[0]
    if tiles is None:
        tiles = choose(rows, outputs, inputs, weight.element_size())
    if not fits(tiles, rows, inputs):
        raise ValueError(f"{tiles} do not fit {rows} rows of {outputs} x {inputs}")
    if x.stride(1) != 1:
        x = x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    out = torch.empty((rows, outputs // 2 if kind else outputs), dtype=weight.dtype, device=x.device)
    total = torch.empty((rows, inputs), dtype=torch.float32 if residual is None else residual.dtype, device=x.device)
    call = normed_call(Normed(x, residual, scale, norm, weight, bias, out, total, kind), target, tiles)
    call.kernel[call.grid](*call.args, **call.options)
    return out, total
