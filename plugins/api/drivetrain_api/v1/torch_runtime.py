"""A ``DeviceRuntime`` composed over torch for one device type. Torch is imported when it is made, not before."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from .device import (
    Counters,
    DeviceRuntime,
    ErrorClass,
    Event,
    Health,
    HostCopy,
    MemoryInfo,
    ShrinkableBuffer,
    Stream,
)
from .host_memory import host_memory, peak_resident_bytes, reset_peak_resident, resident_bytes, trim_host_heap

if TYPE_CHECKING:
    import numpy as np
    import torch


Context = Callable[[], AbstractContextManager[None]]


MakeHost = Callable[["tuple[int, ...]", "torch.dtype"], "torch.Tensor"]


FreeHost = Callable[[], None]


MakeShrinkable = Callable[[int], "ShrinkableBuffer | None"]


def torch_runtime(
    device_type: str,
    index: int | None = None,
    *,
    during: Context = nullcontext,
    host: MakeHost | None = None,
    free_host: FreeHost | None = None,
    shrinkable: MakeShrinkable | None = None,
) -> DeviceRuntime:
    """Compose a runtime of ``torch.<device_type>``'s device module; the host's own memory for a synchronous one.

    ``during``: makes a context that ``activate`` enters too, for what holds while the engine works only. ``host``:
    makes an uninitialised host tensor for copies, page-locked where plain memory would make them wait. ``free_host``:
    returns to the system what lies unused of such memory; ``trim`` calls it. ``shrinkable``: see
    ``ShrinkableMemory``; without it the runtime has no such ability.
    Raises RuntimeError when this torch has no such device type.
    """
    import torch

    device = torch.device(device_type) if index is None else torch.device(device_type, index)
    module = torch.get_device_module(device)
    if hasattr(module, "Stream") and device_type != "cpu":
        made: _Runtime = _AsynchronousRuntime(device, module, during, host or _plain_host, free_host)
    else:
        made = _SynchronousRuntime(device, during)
    if shrinkable is not None:
        made.shrinkable = shrinkable
    return made


class _Tensors:
    """Making tensors and copying them in, the same for every torch device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waits = 0
        self.to_host_count = 0
        self.to_device_count = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def from_host(self, value: np.ndarray | torch.Tensor) -> torch.Tensor:
        import torch

        self.to_device_count += 1
        source = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
        return source.to(self.device, copy=True)

    def upload(self, source: np.ndarray, target: torch.Tensor) -> None:
        import torch

        self.to_device_count += 1
        target.copy_(torch.from_numpy(source), non_blocking=True)

    def counters(self) -> Counters:
        return Counters(waits=self.waits, copies_to_host=self.to_host_count, copies_to_device=self.to_device_count)


class _Done:
    """The event and the finished copy of a device whose calls have finished when they return."""

    def __init__(self, arrays: tuple[np.ndarray, ...] = ()) -> None:
        self._arrays = arrays

    def done(self) -> bool:
        return True

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def get(self) -> tuple[np.ndarray, ...]:
        return self._arrays


class _OneStream:
    """The only stream of a synchronous device."""

    def record(self) -> Event:
        return _Done()

    def wait_event(self, event: Event) -> None:
        event.wait()


class _SynchronousRuntime:
    """Host memory and torch's own kernels; nothing is ever pending."""

    asynchronous = False
    shrinkable: MakeShrinkable  # only where one was given

    def __init__(self, device: torch.device, during: Context) -> None:
        self._tensors = _Tensors(device)
        self.device = device
        self.activate = during
        self.empty = self._tensors.empty
        self.zeros = self._tensors.zeros
        self.from_host = self._tensors.from_host
        self.counters = self._tensors.counters
        self._floor = resident_bytes()
        self._stream = _OneStream()

    def upload(self, source: np.ndarray, target: torch.Tensor) -> None:
        self._tensors.to_device_count += 1
        target.numpy()[...] = source

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        self._tensors.to_host_count += 1
        return _Done(tuple([t.numpy(force=True).copy() for t in tensors]))

    def stream(self) -> Stream:
        return self._stream

    def new_stream(self) -> Stream:
        return _OneStream()

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None:
        return None

    def memory(self) -> MemoryInfo:
        free, total = host_memory()
        now = resident_bytes()
        return MemoryInfo(free=free, total=total, allocated=now, peak=max(now, peak_resident_bytes()))

    def reset_peak(self) -> None:
        reset_peak_resident()

    def trim(self) -> None:
        trim_host_heap()

    def host_buffer(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        import numpy as np

        return np.zeros(tuple(shape), dtype)

    def classify_error(self, error: BaseException) -> ErrorClass:
        return classify_torch_error(error)

    def health(self) -> Health:
        return Health(ok=True)

    def affinity(self) -> frozenset[int]:
        return frozenset()

    def profile(self, name: str) -> AbstractContextManager[Any]:
        import torch

        return torch.profiler.record_function(name)


class _DeviceCopy:
    """Host copies that become valid when their event is done."""

    def __init__(self, owner: _AsynchronousRuntime, tensors: tuple[torch.Tensor, ...], event: Any) -> None:
        self._owner, self._tensors, self._event = owner, tensors, event

    def ready(self) -> bool:
        return bool(self._event.query())

    def get(self) -> tuple[np.ndarray, ...]:
        if not self._event.query():
            self._owner.count_wait()
            self._event.synchronize()
        return tuple(t.numpy() for t in self._tensors)


class _DeviceEvent:
    def __init__(self, owner: _AsynchronousRuntime, event: Any) -> None:
        self._owner, self.raw = owner, event

    def done(self) -> bool:
        return bool(self.raw.query())

    def wait(self) -> None:
        if not self.raw.query():
            self._owner.count_wait()
            self.raw.synchronize()


class _DeviceStream:
    def __init__(self, owner: _AsynchronousRuntime, raw: Any) -> None:
        self._owner, self.raw = owner, raw

    def record(self) -> Event:
        return _DeviceEvent(self._owner, self.raw.record_event())

    def wait_event(self, event: Event) -> None:
        if isinstance(event, _DeviceEvent):
            self.raw.wait_event(event.raw)
        else:
            event.wait()


def _plain_host(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.empty(shape, dtype=dtype)


class _AsynchronousRuntime:
    """A torch device module with streams and events. Page-locked host memory where torch offers it."""

    asynchronous = True
    shrinkable: MakeShrinkable  # only where one was given

    def __init__(
        self, device: torch.device, module: Any, during: Context, host: MakeHost, free_host: FreeHost | None
    ) -> None:
        self._tensors, self._module, self._during = _Tensors(device), module, during
        self._host, self._free_host = host, free_host
        self.device = device
        self.empty = self._tensors.empty
        self.zeros = self._tensors.zeros
        self.from_host = self._tensors.from_host
        self.upload = self._tensors.upload
        self.counters = self._tensors.counters

    def count_wait(self) -> None:
        """Add one to the waits."""
        self._tensors.waits += 1

    @contextmanager
    def activate(self) -> Iterator[None]:
        with self._module.device(self.device), self._during():
            yield

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        self._tensors.to_host_count += 1
        copies = []
        for tensor in tensors:
            copy = self._host(tuple(tensor.shape), tensor.dtype)
            copies.append(copy.copy_(tensor.detach(), non_blocking=True))
        return _DeviceCopy(self, tuple(copies), self._module.current_stream(self.device).record_event())

    def stream(self) -> Stream:
        return _DeviceStream(self, self._module.current_stream(self.device))

    def new_stream(self) -> Stream:
        return _DeviceStream(self, self._module.Stream(device=self.device))

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        with self._module.stream(getattr(stream, "raw", stream)):
            yield

    def synchronize(self) -> None:
        self.count_wait()
        self._module.synchronize(self.device)

    def memory(self) -> MemoryInfo:
        free, total = self._module.mem_get_info(self.device)
        return MemoryInfo(
            free=free,
            total=total,
            allocated=self._module.memory_allocated(self.device),
            peak=self._module.max_memory_allocated(self.device),
        )

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self.device)

    def trim(self) -> None:
        self._module.empty_cache()
        if self._free_host is not None:
            self._free_host()

    def host_buffer(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        import torch

        buffer: np.ndarray = self._host(tuple(shape), getattr(torch, dtype)).numpy()
        buffer.fill(0)  # numpy's: torch's would start threads of its own below each that calls this
        return buffer

    def classify_error(self, error: BaseException) -> ErrorClass:
        return classify_torch_error(error)

    def health(self) -> Health:
        try:
            self._module.synchronize(self.device)
        except RuntimeError as error:
            return Health(ok=False, detail=str(error))
        return Health(ok=True)

    def affinity(self) -> frozenset[int]:
        return frozenset()

    def profile(self, name: str) -> AbstractContextManager[Any]:
        import torch

        return torch.profiler.record_function(name)


_Runtime = _SynchronousRuntime | _AsynchronousRuntime


def classify_torch_error(error: BaseException) -> ErrorClass:
    """Classify by torch's exception types, then by what allocators say."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return ErrorClass.OUT_OF_MEMORY
    text = str(error).lower()
    if "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text:
        return ErrorClass.OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno == errno.ENODEV:
        return ErrorClass.DEVICE_LOST
    return ErrorClass.UNKNOWN
