"""The buffers of one layer's cache, of which the last blocks can be given back."""

from __future__ import annotations

import torch

from .device import POISON
from .rules import RuleError


class Arenas(tuple[torch.Tensor, ...]):
    """One buffer [block, ...] a part. Of all blocks the first ``kept`` are there."""

    kept: int

    def __new__(cls, buffers: tuple[torch.Tensor, ...], num_blocks: int) -> Arenas:
        made = super().__new__(cls, buffers)
        made.kept = num_blocks
        return made

    def leave(self, kept: int) -> None:
        """Give back all but the first blocks, at once: work that is still queued does not find them any more."""
        self.kept = kept
        for arena in self:
            arena[kept:] = POISON[arena.dtype]

    def there(self, blocks: torch.Tensor) -> None:
        """RuleError when any of these block ids was given back."""
        if len(self) and self.kept < len(self[0]) and blocks.numel() and int(blocks.max()) >= self.kept:
            raise RuleError(
                "given-back",
                f"block {int(blocks.max())} was touched, {self.kept} are left",
                "give back when nothing queued uses a block any more, and forget every table entry that leads there",
            )
