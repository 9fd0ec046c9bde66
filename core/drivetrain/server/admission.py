"""The door: how many requests are held, and after how many seconds a refused one should come back."""

from __future__ import annotations

import math
import time

from drivetrain.errors import OverloadedError

SHARE = 0.1  # of the newest interval in the running mean
LONGEST_WAIT = 60


class UnavailableError(OverloadedError):
    """There is no loop to take the request: it starts, restarts, or was lost with the request."""


class Admission:
    """Counts requests from their headers to their last byte. Used by one thread."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._held = 0
        self._interval: float | None = None  # mean seconds between two departures of a loaded server
        self._left_at: float | None = None

    @property
    def held(self) -> int:
        """Requests inside."""
        return self._held

    def enter(self) -> None:
        """Take a place. OverloadedError when there is none."""
        if self._held >= self._max_requests:
            wait = self.expected_wait()
            raise OverloadedError(
                f"the server holds {self._held} requests, as many as it takes",
                retry_after=wait,
                fix=f"try again in {wait} s",
            )
        self._held += 1

    def leave(self) -> None:
        """Give the place back."""
        self._held -= 1
        now = time.monotonic()
        if self._left_at is not None and self._held > 0:
            gap = now - self._left_at
            self._interval = gap if self._interval is None else (1 - SHARE) * self._interval + SHARE * gap
        self._left_at = now

    def expected_wait(self) -> int:
        """Seconds, from 1 to 60, until a place is free as departures have gone lately."""
        return max(1, min(LONGEST_WAIT, math.ceil(self._interval or 1.0)))
