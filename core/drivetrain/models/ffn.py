"""Feed-forwards: the part of a layer that looks at one token. Looked up by the type of their spec."""

from __future__ import annotations

from typing import Protocol

import torch

from drivetrain.models.parameters import PartContext
from drivetrain.models.registry import Registry
from drivetrain.models.spec import GatedMlp, PlainMlp
from drivetrain.models.step import StepView
from drivetrain_api.v1 import ActivationSpec, GatedActivationSpec


class FeedForward(Protocol):
    """One layer's feed-forward, built."""

    def forward(self, x: torch.Tensor, step: StepView) -> torch.Tensor:
        """x [T, hidden], normed (or what a ``first_projection`` that is None makes of it) -> the output [T, hidden]."""


_parts = Registry[FeedForward]("feed-forward")
register, make_ffn = _parts.register, _parts.make


class GatedFeedForward:
    """One fused gate/up product and the gated activation, in one op with each other and with the norm before them where
    the backend has one; then the down product."""

    def __init__(self, spec: GatedMlp, context: PartContext) -> None:
        gated = GatedActivationSpec(dtype=context.spec.activation_dtype, size=spec.intermediate, kind=spec.activation)
        self._gate_up, activated = context.first_projection(("gate", "up"), "gate_up", gated)
        self._activate = None if activated else context.ops.bind(gated)
        self._down, _ = context.projection(("down",), "down")

    def forward(self, x: torch.Tensor, step: StepView) -> torch.Tensor:
        inner = x if self._gate_up is None else self._gate_up(x)
        return self._down(inner if self._activate is None else self._activate(inner))


class PlainFeedForward:
    """One product, the activation, and the product down."""

    def __init__(self, spec: PlainMlp, context: PartContext) -> None:
        self._up, _ = context.first_projection(("up",), "other")
        self._activate = context.ops.bind(
            ActivationSpec(dtype=context.spec.activation_dtype, size=spec.intermediate, kind=spec.activation)
        )
        self._down, _ = context.projection(("down",), "down")

    def forward(self, x: torch.Tensor, step: StepView) -> torch.Tensor:
        return self._down(self._activate(x if self._up is None else self._up(x)))


register(GatedMlp, GatedFeedForward)
register(PlainMlp, PlainFeedForward)
