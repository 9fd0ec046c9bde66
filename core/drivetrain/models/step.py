"""What goes through a decoder: the carry, and one step's inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drivetrain_api.v1 import CacheHandle

# The tensors that pass from layer to layer, by name; exactly what one pipeline stage sends to the next.
# ``hidden`` [T, hidden]: the last branch's output, not yet added; ``residual`` [T, hidden]: the stream before it.
Carry = dict[str, torch.Tensor]
Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep:
    """One step of T tokens.

    ``ids`` [T]; ``positions`` [T], or [3, T]; ``token_rows`` [T], the batch row of each token; ``plans``: one for each
    of the decoder's groups, made by the group's own ``attention.plan``; ``caches``: one for each of its layers.

    For recurrent groups, and None for others, one entry a group: ``state_blocks`` [B], the block of each batch row's
    state (0 for padded rows); ``exports`` [n, 3], (batch row, offset, block): store the state after ``offset`` tokens
    of the row there (None where nothing is to be stored). Their plan is a ``drivetrain.runner.forward.StatePlan``.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    token_rows: torch.Tensor
    plans: tuple[Any, ...]
    caches: tuple[CacheHandle | None, ...]
    state_blocks: tuple[torch.Tensor | None, ...] = ()
    exports: tuple[torch.Tensor | None, ...] = ()


class StepView:
    """A ``ModelStep`` with what its layers share: ``angles``, rope index -> (cos, sin)."""

    __slots__ = ("angles", "caches", "exports", "ids", "plans", "positions", "state_blocks", "token_rows")

    def __init__(self, step: ModelStep, angles: dict[int, Angles]) -> None:
        self.ids = step.ids
        self.positions = step.positions
        self.token_rows = step.token_rows
        self.plans = step.plans
        self.caches = step.caches
        self.state_blocks = step.state_blocks
        self.exports = step.exports
        self.state_blocks = step.state_blocks
        self.exports = step.exports
        self.angles = angles
