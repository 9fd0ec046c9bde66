"""Memory after ready: the largest step's stays held, a capture begins only where it fits, out of memory is survived.

Nothing else of this process allocates on the device once it serves. With the largest step's bytes held by the
allocator, what the device has left over is for captures alone: the planned bytes of the graphs, and the slack.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from drivetrain_api.v1 import ErrorClass, torch_dtype

if TYPE_CHECKING:
    from drivetrain.runner.giving import GiveBack
    from drivetrain_api.v1 import Backend

MIB = 1 << 20
MARGIN = 32 * MIB  # stays free whatever is captured: what the allocator rounds up
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class Reserve:
    """What is planned for graphs and for the largest step of one runner, in bytes, and what captures took.

    ``planned``: of all graphs. ``taken``: what the device had less after the captures than before them. ``retried``:
    pieces of steps that ran out of memory and were done again. ``least_free``: of the device, of all times when it was
    looked at (around captures and when memory ran out); -1 before the first. ``giving``: gives blocks of the cache
    back for captures that do not fit; None where it can't.
    """

    def __init__(self, backend: Backend) -> None:
        self._runtime, self._memory = backend.device, backend.memory
        self._host = backend.capabilities.shared_host_memory
        self._step = self._open = 0  # of the largest step; the part of it that the allocator does not hold
        self._most = 0  # the most that one capture took, beside the first one, which fills the pool that all share
        self._short = 0  # what the next one may take after one ran out of memory; 0 once one was captured
        self._captures = 0
        self.planned = self.taken = self.retried = 0
        self.least_free = -1
        self.giving: GiveBack | None = None

    def plan(self, graphs: int, step: int) -> None:
        """Take over what the memory plan says. ``step`` 0: nothing is held ahead."""
        self.planned, self._step = graphs, 0 if self._host else step
        self._open = self._step

    def hold(self) -> None:
        """Let the allocator keep the largest step's bytes: they are taken in one piece and given back to it. Said when
        they are not there; the engine goes on."""
        if not self._step:
            return
        self._open = self._step
        try:
            piece = self._runtime.empty((self._step,), torch_dtype("uint8"))
            without = self.free()
            del piece
            self._open = max(0, self.free() - without)
        except Exception as error:
            if not self.ran_out(error):
                raise
            logger.error(
                "memory: the largest step's %d MiB are not there, %d MiB are free: large steps may fail; "
                "lower --memory-utilization",
                self._step // MIB,
                self.free() // MIB,
            )

    def free(self) -> int:
        """Bytes that the device has left."""
        free = self._runtime.memory().free
        self.least_free = free if self.least_free < 0 else min(self.least_free, free)
        return free

    def expected(self, tokens: int) -> int:
        """Return the bytes that the next capture may take: as measured on earlier ones, else as planned; after one
        that ran out of memory more than there was then."""
        own = int(self._memory.graph_estimate(2, tokens).get("bytes", 0))
        return max(own, self._most, self._short, 0 if self._captures > 1 else self.planned - self.taken)

    def lacking(self, tokens: int) -> int:
        """Return the bytes that the next capture lacks, the largest step's own and a margin left alone; 0: it fits."""
        if not self.planned:
            return 0
        return max(0, self.expected(tokens) + self._open + MARGIN - self.free())

    def given_back(self, tokens: int) -> bool:
        """Whether the cache gives back what the next capture lacks: it is to be looked at again later."""
        if self.giving is None:
            return False
        lacking = self.lacking(tokens)
        return lacking > 0 and self.giving.ask(lacking)

    def fell_short(self) -> None:
        """A capture that was thought to fit ran out of memory: it needs more than there is."""
        self._short = max(self._short, self.free() - self._open + MARGIN)

    def fits(self, tokens: int) -> bool:
        """Whether the next capture leaves the largest step what is its own. Says so where it does not."""
        if not self.lacking(tokens):
            return True
        free, expected = self.free(), self.expected(tokens)
        logger.warning(
            "memory: a graph of %d tokens may take %d MiB, %d MiB are free of which the largest step may take %d: no "
            "more graphs are captured, such steps run eagerly (%d captures took %d MiB of %d planned)",
            tokens,
            expected // MIB,
            free // MIB,
            self._open // MIB,
            self._captures,
            self.taken // MIB,
            self.planned // MIB,
        )
        return False

    def measured(self, capture: Callable[[], None]) -> None:
        """Run a capture and count what it takes."""
        before = self.free()
        capture()
        took = max(0, before - self.free())
        if self._captures:
            self._most = max(self._most, took)
        self._captures += 1
        self._short = 0
        self.taken += took

    def tell(self, graphs: int) -> None:
        """Log what all captures took, where something was planned for them."""
        if self.planned:
            logger.info(
                "memory: all %d steps are captured, in %d MiB of %d planned; %d MiB are free",
                graphs,
                self.taken // MIB,
                self.planned // MIB,
                self.free() // MIB,
            )

    def once_more(self, run: Callable[[], Result], possible: Callable[[], bool] = lambda: True) -> Result:
        """Run a piece of a step. Where it goes out of memory and that is possible, once more with all that the
        allocator kept given back."""
        try:
            return run()
        except Exception as error:
            if not self.ran_out(error) or not possible():
                raise
            text = str(error)
        self.clear()  # out of the handler: what the failed run held went with its error
        self.retried += 1
        logger.warning("memory: a step ran out of it and is done again, %d MiB are free: %s", self.free() // MIB, text)
        return run()

    def clear(self) -> None:
        """Give back what the allocator keeps. Waits for the device."""
        self._runtime.synchronize()
        self._runtime.trim()
        self._open = self._step

    def renew(self) -> None:
        """Give back what the allocator keeps, and let it hold the largest step's bytes anew."""
        self.clear()
        self.hold()

    def ran_out(self, error: BaseException) -> bool:
        """Whether an error says that memory ran out."""
        return self._runtime.classify_error(error) is ErrorClass.OUT_OF_MEMORY
