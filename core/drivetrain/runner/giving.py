"""Blocks at the cache's end go back to the device where captured steps need more memory than was planned for them.

Asked for between steps, in three parts, none of which waits: the cache manager hands out these blocks no more; once no
row holds one, the device's tables forget them; once the device has done all that was queued by then, their memory goes
back. A small part of the cache at most, and never what one request of the longest length needs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from drivetrain.cache.sizing import bytes_of, cut, holds_longest

if TYPE_CHECKING:
    from drivetrain.cache.manager import CacheManager
    from drivetrain.runner.caches import CacheMemory
    from drivetrain.runner.runner import Runner
    from drivetrain_api.v1 import Event

MIB = 1 << 20
SHARE = 0.02  # of the cache, at most
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
        self._before = cache.num_blocks
        self._over = False
        self.given = 0

    @property
    def possible(self) -> bool:
        """Whether it makes sense to ask: False once less was left than had been asked for."""
        return not self._over

    def ask(self, nbytes: int) -> bool:
        """Begin to give back so many bytes or a little more; False where that is more than may go."""
        if self._limits is not None:
            return True
        piece = self._memory.piece_bytes
        end = max(0, self._end - nbytes) // piece * piece
        limits, config = cut(self._plan, end), self._runner.config
        longest = holds_longest(self._plan, limits, config.max_model_len, config.max_num_batched_tokens)
        if self._over or not longest or bytes_of(self._plan, limits) < self._least:
            self._over = True
            return False
        self._before = self._cache.num_blocks
        self._cache.retire(limits)
        self._limits, self._end = limits, end
        if not self._cache.retired():
            logger.info("memory: blocks at the cache's end are in use; captured steps wait until they are free")
        return True

    def settled(self) -> bool:
        """Go on with what was asked for. Returns whether nothing is left to be done for it; never waits."""
        if self._limits is None:
            return True
        if self._forgotten is None:
            if not self._cache.retired():
                return False
            self._forgotten = self._forget(self._limits)
        if not self._forgotten.done():
            return False
        limits, self._limits, self._forgotten = self._limits, None, None
        self._return(limits)
        return True

    def _forget(self, limits: tuple[int, ...]) -> Event:
        """Queue behind all steps that no table leads to these blocks, not even in rows and places that nobody uses."""
        runner = self._runner
        with runner.runtime.activate(), torch.no_grad():
            for table, place in zip(runner.tables.tables, runner.passes.places, strict=True):
                table.masked_fill_(table >= limits[place.plan_group], 0)
            return runner.runtime.stream().record()

    def _return(self, limits: tuple[int, ...]) -> None:
        try:
            with self._runner.runtime.activate():
                given = self._memory.shrink(self._plan, limits, self._runner.passes.places)
        except Exception as error:
            logger.error("memory: blocks of the cache could not be given back", exc_info=error)
            self._over = True
            return
        self.given += given
        blocks = self._before - self._cache.num_blocks
        logger.info("memory: %d blocks (%d MiB) given back for captured steps", blocks, given // MIB)
