"""Drafters propose the next tokens on the device, right after a row's tokens were drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from drivetrain.ops.reference.philox import philox, seed_key
from drivetrain_api.v1.sampling import STREAM_DRAFT

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """B rows that have just drawn, all on the device. ``position``: the index of ``last_token`` in its
    sequence."""

    rows: torch.Tensor  # [B] row of the tables; the padding row for padded entries
    last_token: torch.Tensor  # [B] int32
    position: torch.Tensor  # [B] int32
    seed: torch.Tensor  # [B] int64
    sample: torch.Tensor  # [B] int32


class Drafter(Protocol):
    """Proposes k tokens a row. Runs on the device without waiting; its quality changes speed, never
    tokens."""

    def propose(self, context: DraftContext) -> torch.Tensor:
        """Return the drafts [B, k] int32 that follow ``last_token``."""


class RandomDrafter:
    """Draws drafts uniformly from the vocabulary: almost always wrong, which is what tests of verification
    need."""

    def __init__(self, vocabulary: int, max_drafts: int) -> None:
        if not 1 <= max_drafts:
            raise ValueError(f"max_drafts is {max_drafts}; a drafter proposes at least one token")
        self._vocabulary = vocabulary
        self._max_drafts = max_drafts

    def propose(self, context: DraftContext) -> torch.Tensor:
        """Return floor(x * vocabulary / 2^32), x from stream 1 at each draft's position."""
        columns: Sequence[torch.Tensor] = [self._column(context, i) for i in range(self._max_drafts)]
        return torch.stack(tuple(columns), dim=1)

    def _column(self, context: DraftContext, i: int) -> torch.Tensor:
        position = context.position.to(torch.int64) + 1 + i
        zero = torch.zeros_like(position)
        counter = (zero, position, context.sample.to(torch.int64), zero + STREAM_DRAFT)
        word = philox(counter, seed_key(context.seed))[0]
        return ((word * self._vocabulary) >> 32).to(torch.int32)
