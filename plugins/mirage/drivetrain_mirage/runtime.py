"""``DeviceRuntime`` of a mirage device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from drivetrain_api.v1 import Counters, ErrorClass, Event, Health, HostCopy, MemoryInfo, Stream

from .device import RUNTIME_DTYPES, MirageDevice
from .ledger import MirageOutOfMemory
from .registration import torch_device
from .rules import DeviceLost, RuleError
from .streams import Marker, WorkQueue
from .tensors import MirageTensor, new_dense, on_device


class _Counts:
    """Waits of the host, and copies either way."""

    def __init__(self) -> None:
        self.waits = 0
        self.to_host = 0
        self.to_device = 0


class MirageEvent:
    """A marker in a queue, seen from the host."""

    def __init__(self, marker: Marker, counts: _Counts) -> None:
        self.marker = marker
        self._counts = counts

    def done(self) -> bool:
        return self.marker.passed.is_set()

    def wait(self) -> None:
        """Block; raises the fault of earlier work if nobody has heard of it yet."""
        if not self.marker.passed.is_set():
            self._counts.waits += 1
            self.marker.passed.wait()
        self.marker.report()


class MirageHostCopy:
    """Values on their way. Nothing but ``get`` gives them out."""

    def __init__(self, marker: Marker, counts: _Counts) -> None:
        self._event = MirageEvent(marker, counts)

    def ready(self) -> bool:
        return self._event.done()

    def get(self) -> tuple[np.ndarray, ...]:
        """Wait if need be; raises the fault of earlier work if nobody has heard of it yet."""
        self._event.wait()
        return self._event.marker.arrays


class MirageStream:
    """A queue, seen from the host."""

    def __init__(self, work: WorkQueue, device: MirageDevice, counts: _Counts) -> None:
        self.work = work
        self._device = device
        self._counts = counts

    def record(self) -> Event:
        if self.work.record is not None:
            raise RuleError("no-waits-in-capture", "an event was recorded inside a capture", "record it outside")
        return MirageEvent(self.work.mark(), self._counts)

    def wait_event(self, event: Event) -> None:
        """Later work of this stream waits on the device; the host goes on."""
        if not isinstance(event, MirageEvent):
            raise RuleError("one-device", f"a {type(event).__name__} of another backend", "record it on this device")
        self.work.call(event.marker.passed.wait)


class MirageRuntime:
    """Everything is queued; only ``get``, ``wait`` and ``synchronize`` wait."""

    asynchronous = True

    def __init__(self, owner: MirageDevice) -> None:
        self.owner = owner
        self.device = torch_device()
        self._counts = _Counts()

    def activate(self) -> AbstractContextManager[None]:
        return nullcontext()

    # -- tensors ---------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._new(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = self._new(shape, dtype)
        self.owner.launch(torch.Tensor.zero_, (tensor.raw,), None)
        return tensor

    def from_host(self, value: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Copy at once into new memory: the source is free when this returns, and never held twice."""
        self.owner.refuse_in_capture("from_host")
        source = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
        if source.device.type != "cpu":
            raise RuleError("one-device", f"from_host of a {source.device} tensor", "give a host value")
        self._counts.to_device += 1
        tensor = self._new(source.shape, source.dtype)
        tensor.raw.copy_(source)
        return tensor

    def upload(self, source: np.ndarray, target: torch.Tensor) -> None:
        self.owner.refuse_in_capture("upload")
        device_target = on_device(target, "the target of an upload")
        expected = torch.from_numpy(source).dtype
        if tuple(source.shape) != tuple(target.shape) or expected != target.dtype:
            raise ValueError(
                f"upload of {source.dtype} {source.shape} over {target.dtype} {tuple(target.shape)}: "
                "shapes and dtypes must be equal"
            )
        self._counts.to_device += 1
        self.owner.check()
        self.owner.current.upload(source, device_target.raw)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        self.owner.refuse_in_capture("to_host")
        raws = tuple(on_device(t, "a tensor given to to_host").raw for t in tensors)
        for raw in raws:
            if raw.dtype == torch.bfloat16:
                raise RuleError(
                    "declared-dtypes", "to_host of bfloat16, which numpy has not", "convert to float32 first"
                )
        self._counts.to_host += 1
        self.owner.check()
        return MirageHostCopy(self.owner.current.mark(raws), self._counts)

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> MirageTensor:
        if dtype not in RUNTIME_DTYPES:
            raise RuleError(
                "declared-dtypes",
                f"a tensor of {dtype} was asked for",
                "use float32, bfloat16, int32, int64, uint8, bool",
            )
        return new_dense(self.owner, tuple(int(n) for n in shape), dtype)

    # -- streams ---------------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        return MirageStream(self.owner.current, self.owner, self._counts)

    def new_stream(self) -> Stream:
        return MirageStream(self.owner.new_queue(), self.owner, self._counts)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        if not isinstance(stream, MirageStream):
            raise RuleError(
                "one-device", f"a {type(stream).__name__} of another backend", "use a stream of this device"
            )
        with self.owner.using(stream.work):
            yield

    def synchronize(self) -> None:
        self.owner.refuse_in_capture("synchronize")
        self._counts.waits += 1
        markers = []
        for stream in self.owner.streams:
            markers.append(stream.mark())
            stream.call(stream.settle)
        for marker in markers:
            marker.passed.wait()
        for marker in markers:
            marker.report()

    # -- figures ---------------------------------------------------------------------------------------------

    def memory(self) -> MemoryInfo:
        ledger = self.owner.ledger
        return MemoryInfo(
            free=ledger.total - ledger.allocated, total=ledger.total, allocated=ledger.allocated, peak=ledger.peak
        )

    def reset_peak(self) -> None:
        self.owner.ledger.reset_peak()

    def trim(self) -> None:
        """Nothing is cached."""

    def host_buffer(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        return np.zeros(tuple(shape), dtype)

    def classify_error(self, error: BaseException) -> ErrorClass:
        if isinstance(error, MirageOutOfMemory | MemoryError):
            return ErrorClass.OUT_OF_MEMORY
        return ErrorClass.DEVICE_LOST if isinstance(error, DeviceLost) else ErrorClass.UNKNOWN

    def health(self) -> Health:
        return Health(ok=not self.owner.lost, detail=self.owner.lost)

    def counters(self) -> Counters:
        counts = self._counts
        return Counters(waits=counts.waits, copies_to_host=counts.to_host, copies_to_device=counts.to_device)

    def affinity(self) -> frozenset[int]:
        return frozenset()

    def profile(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()
