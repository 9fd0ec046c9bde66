"""Blocks at the cache's end go back to the device where captured steps need more memory than was planned for them.

Asked for between steps, in three parts, none of which waits: the cache manager hands out these blocks no more; once no
row holds one, the device's tables forget them; once the device has done all that was queued by then, their memory goes
back. A small part of the cache at most, and never what one request of the longest length needs. What goes wrong on the
way ends the giving, not the engine.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from drivetrain.cache.sizing import bytes_of, cut, holds_longest
from drivetrain.ops.provided import raised, wheel_of

if TYPE_CHECKING:
    from drivetrain.cache.manager import CacheManager
    from drivetrain.runner.caches import CacheMemory
    from drivetrain.runner.runner import Runner
    from drivetrain_api.v1 import Event

MIB = 1 << 20
SHARE = 0.02  # of the cache, at most
MASKED = 1 << 18  # of a table's places at once: a mask of 256 KiB at most, little where memory is short
logger = logging.getLogger(__name__)


class GiveBack:
    """What of one runner's cache goes back. ``given``: bytes so far. One thread asks, the one that makes plans."""

    def __init__(self, runner: Runner, memory: CacheMemory, cache: CacheManager) -> None:
        self._runner, self._memory, self._cache = runner, memory, cache
        self._plan = cache.plan
        self._least = self._plan.total_bytes - int(self._plan.total_bytes * SHARE)
        self._end = self._plan.total_bytes  # where what is left of the memory ends
        self._limits: tuple[int, ...] | None = None  # blocks of each group that are to be left; None: nothing is asked
        self._forgotten: Event | None = None  # passed once nothing on the device leads to the blocks behind
        self._left = tuple(group.num_blocks for group in self._plan.groups)  # of each group, after what went so far
        self._before = cache.num_blocks
        self._over = False
        self.given = 0

    @property
    def possible(self) -> bool:
        """Whether it makes sense to ask: False once less was left than had been asked for, or something went wrong."""
        return not self._over

    def ask(self, nbytes: int) -> bool:
        """Begin to give back so many bytes or a little more; False where that is more than may go, or fails."""
        if self._limits is not None:
            return True
        if self._over:
            return False
        self._before = self._cache.num_blocks
        try:
            return self._begin(nbytes)
        except Exception as error:
            self._end_for(error)
            return False

    def _begin(self, nbytes: int) -> bool:
        piece = self._memory.piece_bytes
        end = max(0, self._end - nbytes) // piece * piece
        limits, config = cut(self._plan, end), self._runner.config
        longest = holds_longest(self._plan, limits, config.max_model_len, config.max_num_batched_tokens)
        if not longest or bytes_of(self._plan, limits) < self._least:
            self._over = True
            return False
        self._cache.retire(limits)
        self._limits, self._end = limits, end
        if not self._cache.retired():
            logger.info("memory: blocks at the cache's end are in use; captured steps wait until they are free")
        return True

    def settled(self) -> bool:
        """Go on with what was asked for. Returns whether nothing is left to be done for it; never waits."""
        if self._limits is None:
            return True
        try:
            if self._forgotten is None:
                if not self._cache.retired():
                    return False
                self._forgotten = self._forget(self._limits)
            if not self._forgotten.done():
                return False
            self._return(self._limits)
        except Exception as error:
            self._end_for(error)
        self._limits = self._forgotten = None
        return True

    def _forget(self, limits: tuple[int, ...]) -> Event:
        """Queue behind all steps that no table leads to these blocks, not even in rows and places that nobody uses."""
        runner = self._runner
        with runner.runtime.activate(), torch.no_grad():
            for table, place in zip(runner.tables.tables, runner.passes.places, strict=True):
                rows = max(1, MASKED // table.shape[1])
                for begin in range(0, table.shape[0], rows):
                    part = table[begin : begin + rows]
                    part.masked_fill_(part >= limits[place.plan_group], 0)
            return runner.runtime.stream().record()

    def _return(self, limits: tuple[int, ...]) -> None:
        with self._runner.runtime.activate():
            given = self._memory.shrink(self._plan, self._left, limits, self._runner.passes.places)
        self._left = limits
        self.given += given
        blocks = self._before - self._cache.num_blocks
        logger.info("memory: %d blocks (%d MiB) given back for captured steps", blocks, given // MIB)

    def _end_for(self, error: Exception) -> None:
        """Give back nothing any more, and say why. Blocks that were retired stay so: nobody comes to hold them,
        whatever became of their memory."""
        self._over = True
        self._limits = self._forgotten = None
        blocks = self._before - self._cache.num_blocks
        logger.warning(
            "memory: %s: blocks of the cache could not be given back: %s; %s, and no more are asked for",
            wheel_of(self._runner.backend),
            raised(error),
            f"{blocks} of them stay out of use" if blocks else "none is lost",
        )
