"""SIGTERM and SIGHUP end a command as an exception does, so that what it began is ended and removed on the way out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGHUP)


class Ending:
    """Which signal ended the command. ``status``: the exit status that says so, 0 while there was none."""

    def __init__(self) -> None:
        self.status = 0

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.status:  # a manager may send both: the second one must not end the clean-up
            return
        self.status = 128 + number
        raise SystemExit(self.status)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Raise SystemExit at a signal within the block. One that is ignored, as under nohup, stays so; one that a
        program handles itself is left to it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ours = [one for one in NUMBERS if signal.getsignal(one) is signal.SIG_DFL]
        try:
            for one in ours:
                signal.signal(one, self._end)
            yield
        finally:
            for one in ours:
                signal.signal(one, signal.SIG_DFL)
