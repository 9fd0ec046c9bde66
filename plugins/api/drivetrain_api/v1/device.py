"""Device runtime: everything the core does to a device that is not a model op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch


class ErrorClass(Enum):
    """What an exception raised by device work means for the engine."""

    OUT_OF_MEMORY = "out_of_memory"
    DEVICE_LOST = "device_lost"
    REQUEST = "request"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """Bytes on one device. ``allocated`` and ``peak`` are what this process holds through the runtime."""

    free: int
    total: int
    allocated: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the device still answers. ``detail`` is shown to the operator."""

    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counted since the runtime was made. ``waits``: times the host waited for the device."""

    waits: int
    copies_to_host: int
    copies_to_device: int


class Event(Protocol):
    """A point in a stream's order."""

    def done(self) -> bool:
        """Return whether all work before the event has finished. Never waits."""

    def wait(self) -> None:
        """Block the host until it has. Counts as one wait unless already done."""


class HostCopy(Protocol):
    """A copy to the host under way; the only way device values reach the host."""

    def ready(self) -> bool:
        """Return whether the copy has finished. Never waits."""

    def get(self) -> tuple[np.ndarray, ...]:
        """Return the values, waiting if need be (one wait for the whole copy)."""


class Stream(Protocol):
    """An ordered queue of device work."""

    def record(self) -> Event:
        """Mark the present end of the queue."""

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for an event, without waiting on the host."""


class DeviceRuntime(Protocol):
    """One device. All tensors of the engine are made here; nothing else allocates on it.

    Calls queue work on the current stream and return at once unless they say that they wait.
    """

    @property
    def device(self) -> torch.device:
        """The device that tensors made here live on."""

    @property
    def asynchronous(self) -> bool:
        """False where every call has finished when it returns; decides the loop's default depth (1 or 2)."""

    def activate(self) -> AbstractContextManager[None]:
        """Make this the current device of the calling thread for the time of the context."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Make an uninitialised tensor."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor of zeros."""

    def from_host(self, value: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Copy a host value to a new device tensor. The source may be reused when the call returns."""

    def upload(self, source: np.ndarray, target: torch.Tensor) -> None:
        """Copy a host array over an existing device tensor of the same shape, ordered on the stream.

        The source must not change until an event recorded afterwards is done (the runner keeps a ring for that).
        """

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """Begin copying device tensors to the host."""

    def stream(self) -> Stream:
        """Return the current stream."""

    def new_stream(self) -> Stream:
        """Make another stream."""

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue work on that stream for the time of the context."""

    def synchronize(self) -> None:
        """Wait until all queued work is done. Counts as one wait."""

    def memory(self) -> MemoryInfo:
        """Return the present memory figures."""

    def reset_peak(self) -> None:
        """Begin a new peak measurement."""

    def trim(self) -> None:
        """Return unused cached memory to the system, where there is such a cache."""

    def host_buffer(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        """Make a host array from which ``upload`` is fastest (page-locked or mapped where that exists).

        Called from any thread, inside ``activate``, also while another thread uploads.
        """

    def classify_error(self, error: BaseException) -> ErrorClass:
        """Say what an exception from device work means."""

    def health(self) -> Health:
        """Ask whether the device still answers."""

    def counters(self) -> Counters:
        """Return the counts of waits and copies."""

    def affinity(self) -> frozenset[int]:
        """Return the host cores nearest the device; empty where it does not matter."""

    def profile(self, name: str) -> AbstractContextManager[Any]:
        """Mark a range for the vendor's profiler; a null context where there is none."""


class ShrinkableBuffer(Protocol):
    """Bytes on the device whose end can go back to it; what stays keeps its address. The memory lives as long as the
    tensor, its views, or this object."""

    @property
    def data(self) -> torch.Tensor:
        """All its bytes as they were made, uint8 [n]: what went back is not to be touched."""

    @property
    def piece_bytes(self) -> int:
        """What goes back ends at multiples of this, at least within the last 32nd."""

    def shrink(self, nbytes: int) -> int:
        """Return to the device every piece that lies wholly behind the first ``nbytes``; returns the bytes of these
        pieces. All work that touches them is done, and none comes any more."""


@runtime_checkable
class ShrinkableMemory(Protocol):
    """Optional, beside ``DeviceRuntime``: memory that can go back to the device before its tensor is freed. It need not
    be counted in ``MemoryInfo.allocated``."""

    def shrinkable(self, num_bytes: int) -> ShrinkableBuffer | None:
        """Make an uninitialised buffer; None where this device has none, so that ``empty`` is to be used."""


class Measured(Protocol):
    """A callable measured by the memory profiler."""

    def __call__(self) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that a callable used. ``persistent``: still held after; ``peak``: highest above the start;
    ``outside``: taken outside the allocator; ``transient``: peak less persistent."""

    persistent: int
    peak: int
    outside: int

    @property
    def transient(self) -> int:
        """Bytes that were held only while the callable ran."""
        return max(0, self.peak - self.persistent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Bytes in use before the engine allocates: this process's context, and all other processes."""

    context: int
    others: int
    total: int


class MemoryProfiler(Protocol):
    """Measures memory. A generic one over ``DeviceRuntime.memory`` is ``drivetrain_api.v1.generic_profiler``."""

    def baseline(self) -> Baseline:
        """Measure what is in use before anything is loaded."""

    def measure(self, run: Callable[[], Any]) -> MemoryUse:
        """Run a callable to its end on the device and measure it. Waits."""

    def graph_estimate(self, num_graphs: int, largest_tokens: int) -> Mapping[str, int]:
        """Estimate what capture will take: ``bytes`` and other limited resources by name (streams, handles)."""


class PeakReport(Protocol):
    """Optional, beside ``MemoryProfiler``, where the device counts more than the runtime's allocator sees."""

    def peak_in_use(self) -> int:
        """Return the most bytes in use since the last peak measurement began, the context and loaded code included:
        what a memory plan's peak is held against. Waits."""
