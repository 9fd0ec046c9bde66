"""activation.gated, activation.plain and soft_cap."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from drivetrain.ops.cases.pointwise import gated_cases, plain_cases, soft_cap_cases
from drivetrain.ops.reference.kinds import Cost, ReferenceOp, Tolerance, pointwise_tolerance, row_cost, wide
from drivetrain_api.v1 import ActivationSpec, BatchFacts, GatedActivationSpec, SoftCapSpec

Pointwise = Callable[[torch.Tensor], torch.Tensor]


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


LANES = 64  # a multiple of what any vector loop takes at once
ACTIVATIONS: dict[str, Pointwise] = {"silu": functional.silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}


def make_gated(spec: GatedActivationSpec) -> Pointwise:
    """activation.gated/1: ``fn(gate_up [T, 2 * size]) -> [T, size]``: act(first half) * second half.

    silu(x) = x / (1 + e^-x); gelu(x) = x/2 (1 + erf(x / sqrt 2)); gelu_tanh(x) = x/2 (1 + tanh(sqrt(2/pi)
    (x + 0.044715 x^3))). The activation is rounded to the dtype before it multiplies.
    """
    activation = ACTIVATIONS[spec.kind]

    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        return activation(gate_up[..., : spec.size]) * gate_up[..., spec.size :]

    return gated


def make_invariant_gated(spec: GatedActivationSpec) -> Pointwise:
    """The same over a contiguous first half: a lone row, whose half is contiguous already, meets the same kernel."""
    activation = ACTIVATIONS[spec.kind]

    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        return activation(gate_up[..., : spec.size].contiguous()) * gate_up[..., spec.size :]

    return gated


def make_plain(spec: ActivationSpec) -> Pointwise:
    """activation.plain/1: ``fn(x [T, size]) -> [T, size]``: the activation of ``make_gated``, multiplied by nothing."""
    return ACTIVATIONS[spec.kind]


def make_invariant_plain(spec: ActivationSpec) -> Pointwise:
    """The same over rows that begin at a fixed lane each, so that an element meets the same code in every batch."""
    activation, missing = ACTIVATIONS[spec.kind], -spec.size % LANES

    def plain(x: torch.Tensor) -> torch.Tensor:
        return activation(functional.pad(x, (0, missing)).contiguous())[..., : spec.size]

    return plain


def make_soft_cap(spec: SoftCapSpec) -> Pointwise:
    """soft_cap/1: ``fn(x) -> cap * tanh(x / cap)``, computed in float32, of x's dtype and shape."""

    def soft_cap(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(wide(x) / spec.cap) * spec.cap).to(x.dtype)

    return soft_cap


def gated_tolerance(dtype: str) -> Tolerance:
    """Far below zero an activation is a difference of nearly equal numbers: its error is absolute."""
    rtol = pointwise_tolerance(dtype).rtol
    return Tolerance(rtol=rtol, atol=2 * rtol)


def gated_cost(spec: GatedActivationSpec, facts: BatchFacts) -> Cost:
    """Read two halves, write one; about ten operations an element."""
    return row_cost(spec, facts, 3 * spec.size, 10 * spec.size)


def plain_cost(spec: ActivationSpec, facts: BatchFacts) -> Cost:
    """Read a row, write one; about nine operations an element."""
    return row_cost(spec, facts, 2 * spec.size, 9 * spec.size)


def soft_cap_cost(spec: SoftCapSpec, facts: BatchFacts) -> Cost:
    """For one element a token: its size is not in the spec."""
    return row_cost(spec, facts, 2, 10)


GATED_ACTIVATION = ReferenceOp(
    op=GatedActivationSpec.op,
    make=make_gated,
    invariant=make_invariant_gated,
    cases=gated_cases,
    tolerance=gated_tolerance,
    cost=gated_cost,
)
PLAIN_ACTIVATION = ReferenceOp(
    op=ActivationSpec.op,
    make=make_plain,
    invariant=make_invariant_plain,
    cases=plain_cases,
    tolerance=gated_tolerance,
    cost=plain_cost,
)
SOFT_CAP = ReferenceOp(
    op=SoftCapSpec.op,
    make=make_soft_cap,
    invariant=make_soft_cap,
    cases=soft_cap_cases,
    tolerance=pointwise_tolerance,
    cost=soft_cap_cost,
)
