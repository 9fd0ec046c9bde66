"""Feed-forwards: the part of a layer that looks at one token. Looked up by the type of their spec."""

from __future__ import annotations

from typing import Protocol

import torch

from drivetrain.models.parameters import PartContext
from drivetrain.models.registry import Registry
from drivetrain.models.spec import GatedMlp
from drivetrain.models.step import StepView
from drivetrain_api.v1 import GatedActivationSpec


class FeedForward(Protocol):
    """One layer's feed-forward, built."""

    def forward(self, x: torch.Tensor, step: StepView) -> torch.Tensor:
        """x [T, hidden], normed -> the branch's output [T, hidden]."""


_parts = Registry[FeedForward]("feed-forward")
register, make_ffn = _parts.register, _parts.make


class GatedFeedForward:
    """One fused gate/up product, the gated activation, the down product."""

    def __init__(self, spec: GatedMlp, context: PartContext) -> None:
        self._gate_up = context.projection(("gate", "up"), "gate_up")
        self._activate = context.ops.bind(
            GatedActivationSpec(dtype=context.spec.activation_dtype, size=spec.intermediate, kind=spec.activation)
        )
        self._down = context.projection(("down",), "down")

    def forward(self, x: torch.Tensor, step: StepView) -> torch.Tensor:
        return self._down(self._activate(self._gate_up(x)))


register(GatedMlp, GatedFeedForward)
