"""norm.rms, norm.layer, and both after an addition."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drivetrain.ops.cases.pointwise import add_layer_cases, add_rms_cases, layer_cases, rms_cases
from drivetrain.ops.reference.kinds import Cost, ReferenceOp, Tolerance, pointwise_tolerance, row_cost, wide
from drivetrain_api.v1 import AddLayerNormSpec, AddRmsNormSpec, BatchFacts, LayerNormSpec, RmsNormSpec

NormSpec = RmsNormSpec | AddRmsNormSpec


def rms(x: torch.Tensor, weight: torch.Tensor, spec: NormSpec) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis; x [..., size], weight [size] or [N, size].

    The mean, the root and the quotient are float32. Then, with ``round_before_weight``, the quotient is
    rounded to the weight's dtype and the product is of that dtype; without, the product is float32 and rounded once.
    The result has the weight's dtype, also where x is a float32 stream in a model of a smaller dtype.
    """
    x32 = wide(x)
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + spec.eps)
    if spec.round_before_weight:
        scale = weight + spec.offset if spec.offset else weight
        return normed.to(weight.dtype) * scale
    scale = wide(weight) + spec.offset if spec.offset else wide(weight)
    return (normed * scale).to(weight.dtype)


def make_rms(spec: RmsNormSpec) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """norm.rms/1: ``fn(x [..., size], weight [size]) -> [..., size]``; see ``rms``."""
    return lambda x, weight: rms(x, weight, spec)


def make_add_rms(
    spec: AddRmsNormSpec,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """norm.add_rms/1: ``fn(x, residual, weight) -> (normed, total)``: total = x + residual, of the
    residual's dtype (float32 in models that keep the stream so); normed = norm.rms of that total.
    """

    def add_rms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return rms(total, weight, spec), total

    return add_rms


def layer(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, spec: LayerNormSpec | AddLayerNormSpec
) -> torch.Tensor:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias over the last axis; weight and bias [size].

    All of it is float32, and rounded once to the weight's dtype, also where x is a float32 stream in a model of a
    smaller dtype.
    """
    x32 = wide(x)
    centred = x32 - x32.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + spec.eps)
    return (normed * wide(weight) + wide(bias)).to(weight.dtype)


def make_layer(spec: LayerNormSpec) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """norm.layer/1: ``fn(x [..., size], weight [size], bias [size]) -> [..., size]``; see ``layer``."""
    return lambda x, weight, bias: layer(x, weight, bias, spec)


def make_add_layer(
    spec: AddLayerNormSpec,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """norm.add_layer/1: ``fn(x, residual, weight, bias) -> (normed, total)``: total = x + residual, of the
    residual's dtype (float32 in models that keep the stream so); normed = norm.layer of that total.
    """

    def add_layer(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return layer(total, weight, bias, spec), total

    return add_layer


def layer_cost(spec: LayerNormSpec, facts: BatchFacts) -> Cost:
    """Read and write a row; seven operations an element."""
    return row_cost(spec, facts, 2 * spec.size, 7 * spec.size)


def add_layer_cost(spec: AddLayerNormSpec, facts: BatchFacts) -> Cost:
    """Read two rows, write two; eight operations an element."""
    return row_cost(spec, facts, 4 * spec.size, 8 * spec.size)


def layer_tolerance(dtype: str) -> Tolerance:
    """A mean is taken off: near it an element's error is that of the row, not of the element."""
    rtol = pointwise_tolerance(dtype).rtol
    return Tolerance(rtol=rtol, atol=2 * rtol)


def rms_cost(spec: RmsNormSpec, facts: BatchFacts) -> Cost:
    """Read and write a row; four operations an element."""
    return row_cost(spec, facts, 2 * spec.size, 4 * spec.size)


def add_rms_cost(spec: AddRmsNormSpec, facts: BatchFacts) -> Cost:
    """Read two rows, write two; five operations an element."""
    return row_cost(spec, facts, 4 * spec.size, 5 * spec.size)


RMS_NORM = ReferenceOp(
    op=RmsNormSpec.op,
    make=make_rms,
    invariant=make_rms,
    cases=rms_cases,
    tolerance=pointwise_tolerance,
    cost=rms_cost,
)
ADD_RMS_NORM = ReferenceOp(
    op=AddRmsNormSpec.op,
    make=make_add_rms,
    invariant=make_add_rms,
    cases=add_rms_cases,
    tolerance=pointwise_tolerance,
    cost=add_rms_cost,
)
LAYER_NORM = ReferenceOp(
    op=LayerNormSpec.op,
    make=make_layer,
    invariant=make_layer,
    cases=layer_cases,
    tolerance=layer_tolerance,
    cost=layer_cost,
)
ADD_LAYER_NORM = ReferenceOp(
    op=AddLayerNormSpec.op,
    make=make_add_layer,
    invariant=make_add_layer,
    cases=add_layer_cases,
    tolerance=layer_tolerance,
    cost=add_layer_cost,
)
