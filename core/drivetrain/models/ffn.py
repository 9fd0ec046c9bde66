"""Feed-forwards: the part of a layer that looks at one token. Looked up by the type of their spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from drivetrain.models.parameters import PartContext
from drivetrain.models.spec import GatedMlp, PartSpec
from drivetrain.models.step import StepView
from drivetrain_api.v1 import GatedActivationSpec


class FeedForward(Protocol):
    """One layer's feed-forward, built."""

    def forward(self, x: torch.Tensor, step: StepView) -> torch.Tensor:
        """x [T, hidden], normed -> the branch's output [T, hidden]."""


FeedForwardFactory = Callable[[Any, PartContext], FeedForward]
_FACTORIES: dict[type, FeedForwardFactory] = {}


def register(spec_type: type, factory: FeedForwardFactory) -> None:
    """Make ``factory(spec, context)`` build feed-forwards of that spec type. ValueError when it has one already."""
    if spec_type in _FACTORIES:
        raise ValueError(f"{spec_type.__name__} already has a feed-forward: {_FACTORIES[spec_type]!r}")
    _FACTORIES[spec_type] = factory


def make_ffn(spec: PartSpec, context: PartContext) -> FeedForward:
    """Build a layer's feed-forward. LookupError for a spec type that nobody registered."""
    factory = _FACTORIES.get(type(spec))
    if factory is None:
        known = ", ".join(sorted(kind.__name__ for kind in _FACTORIES))
        raise LookupError(f"{context.path}: no feed-forward is registered for {type(spec).__name__}; known: {known}")
    return factory(spec, context)


class GatedFeedForward:
    """One fused gate/up product, the gated activation, the down product."""

    def __init__(self, spec: GatedMlp, context: PartContext) -> None:
        self._gate_up = context.projection(("gate", "up"), "gate_up")
        self._activate = context.ops.bind(
            GatedActivationSpec(dtype=context.spec.dtype, size=spec.intermediate, kind=spec.activation)
        )
        self._down = context.projection(("down",), "down")

    def forward(self, x: torch.Tensor, step: StepView) -> torch.Tensor:
        return self._down(self._activate(self._gate_up(x)))


register(GatedMlp, GatedFeedForward)
