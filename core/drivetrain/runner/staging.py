"""Staging: everything a step tells the device travels in one packed int32 upload from a ring of host
buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from drivetrain_api.v1 import DeviceRuntime, Event


@dataclass(slots=True)
class StagingSlot:
    """One host buffer, the device buffer it is uploaded to, and the event after which the host may reuse
    it."""

    host: np.ndarray
    device: torch.Tensor
    event: Event | None = None
    last: tuple[np.ndarray, torch.Tensor] | None = None  # what ``first`` returned: steady steps ask the same again

    def first(self, size: int) -> tuple[np.ndarray, torch.Tensor]:
        """Return the first ``size`` elements of both buffers."""
        if self.last is None or len(self.last[0]) != size:
            self.last = self.host[:size], self.device[:size]
        return self.last


class StagingRing:
    """``num_slots`` buffers of at least ``capacity`` int32 each, used in turn. A slot too small for a request
    grows.

    With depth + 1 slots and at most depth steps in flight, ``acquire`` never finds a pending event; where it
    does (a caller that ignores the depth) it waits, and the runtime counts the wait.
    """

    def __init__(self, runtime: DeviceRuntime, num_slots: int, capacity: int) -> None:
        self._runtime = runtime
        self._slots = [self._make(capacity) for _ in range(num_slots)]
        self._next = 0

    def _make(self, capacity: int) -> StagingSlot:
        return StagingSlot(
            host=self._runtime.host_buffer((capacity,), "int32"),
            device=self._runtime.zeros((capacity,), torch.int32),
        )

    @property
    def nbytes(self) -> int:
        """Device bytes of all slots; the host holds as many again."""
        return sum(4 * len(slot.host) for slot in self._slots)

    def acquire(self, size: int) -> StagingSlot:
        """Return the next slot, with room for ``size`` int32, once the device no longer reads its host
        buffer."""
        slot = self._slots[self._next]
        if slot.event is not None:
            slot.event.wait()
        if len(slot.host) < size:
            slot = self._make(max(size, 2 * len(slot.host)))
            self._slots[self._next] = slot
        self._next = (self._next + 1) % len(self._slots)
        return slot


@dataclass(slots=True)
class Pack:
    """Named int32 arrays gathered for one upload. Order of adding = order in the buffer."""

    names: list[str] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)

    def add(self, name: str, array: np.ndarray) -> None:
        """Add an int32 array of any shape; on the device it has that shape again."""
        self.names.append(name)
        self.arrays.append(array)

    @property
    def size(self) -> int:
        """int32 elements in all."""
        return sum(a.size for a in self.arrays)

    def upload(self, ring: StagingRing, runtime: DeviceRuntime) -> dict[str, torch.Tensor]:
        """Copy all arrays to the device in one upload and return them as int32 views by name."""
        if not self.arrays:
            return {}
        sizes = [a.size for a in self.arrays]
        total = sum(sizes)
        slot = ring.acquire(total)
        source, target = slot.first(total)
        at = 0
        for array, size in zip(self.arrays, sizes, strict=True):
            source[at : at + size] = array.ravel()
            at += size
        runtime.upload(source, target)
        slot.event = runtime.stream().record()
        parts = target.split_with_sizes(sizes) if len(sizes) > 1 else (target,)
        return {
            name: part if array.ndim == 1 else part.view(array.shape)
            for name, array, part in zip(self.names, self.arrays, parts, strict=True)
        }
