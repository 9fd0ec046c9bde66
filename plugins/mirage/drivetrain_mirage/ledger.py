"""Bytes on the device: what is held by living tensors, the peak, and the limit."""

from __future__ import annotations

import threading

import torch


class MirageOutOfMemory(torch.OutOfMemoryError):
    """An allocation went over the device's memory. The message gives all figures, in bytes."""


class Ledger:
    """Counts allocations. ``total``: the device's memory in bytes."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.allocated = 0
        self.peak = 0
        self._lock = threading.RLock()  # re-entrant: a collection may free a slab while another is being taken

    def take(self, nbytes: int) -> Slab:
        """Count an allocation. MirageOutOfMemory when it does not fit."""
        with self._lock:
            after = self.allocated + nbytes
            if after > self.total:
                raise MirageOutOfMemory(
                    f"mirage out of memory: {nbytes} bytes asked for, {self.total - self.allocated} free of "
                    f"{self.total}. Fix: give --backend-option memory=BYTES, or a smaller cache, batch or model"
                )
            self.allocated = after
            self.peak = max(self.peak, after)
        return Slab(self, nbytes)

    def give(self, nbytes: int) -> None:
        """Count a release."""
        with self._lock:
            self.allocated -= nbytes

    def reset_peak(self) -> None:
        """Begin a new peak."""
        with self._lock:
            self.peak = self.allocated


class Slab:
    """The bytes of one storage, given back when the last tensor over it is gone."""

    __slots__ = ("_ledger", "nbytes")

    def __init__(self, ledger: Ledger, nbytes: int) -> None:
        self._ledger = ledger
        self.nbytes = nbytes

    def leave(self, nbytes: int) -> None:
        """Give back all but so many bytes."""
        self._ledger.give(self.nbytes - nbytes)
        self.nbytes = nbytes

    def __del__(self) -> None:
        self._ledger.give(self.nbytes)
