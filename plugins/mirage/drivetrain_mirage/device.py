"""One mirage device: its memory, its streams, and the way work gets onto them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .ledger import Ledger, Slab
from .rules import DeviceLost, RuleError
from .streams import Pace, WorkQueue

POISON: dict[torch.dtype, float | int | bool] = {
    torch.float32: float("nan"),
    torch.float64: float("nan"),
    torch.bfloat16: float("nan"),
    torch.int32: -0x5A5A5A5B,
    torch.int64: -0x5A5A5A5A5A5A5A5B,
    torch.uint8: 0xA5,
    torch.bool: True,
}
RUNTIME_DTYPES = frozenset(POISON) - {torch.float64}


SMALL = 8_192  # elements: smaller buffers are cut from a sheet that is poisoned as a whole, which is faster
SHEET = 32 * SMALL
ALIGNMENT = 64  # elements between the beginnings of two cuts are a multiple of this


class _Sheet:
    """Poisoned memory from which each element is given out once."""

    __slots__ = ("_data", "_next", "left")

    def __init__(self, dtype: torch.dtype) -> None:
        self._data = torch.full((SHEET,), POISON[dtype], dtype=dtype)
        self._next = 0
        self.left = SHEET

    def cut(self, shape: tuple[int, ...], stride: tuple[int, ...], extent: int) -> torch.Tensor:
        """Return the next ``extent`` elements as a tensor."""
        raw = self._data.as_strided(shape, stride, self._next)
        step = -(-extent // ALIGNMENT) * ALIGNMENT
        self._next += step
        self.left -= step
        return raw


class Watch(Protocol):
    """Sees every op's signature before it is queued (static shapes)."""

    def __call__(self, signature: tuple[Any, ...]) -> None:
        """Raise RuleError for a signature that may not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """``memory``: bytes. ``poison_freed``: fill freed blocks with garbage where the engine announces them."""

    memory: int = 2 << 30
    pace: Pace = field(default_factory=Pace)
    poison_freed: bool = True


class _Local(threading.local):
    stream: WorkQueue | None = None


class MirageDevice:
    """What tensors belong to. ``stream`` names are unique; the first stream is the default one."""

    def __init__(self, options: DeviceOptions) -> None:
        self.options = options
        self.ledger = Ledger(options.memory)
        self.watch: Watch | None = None
        self.captured: list[Slab] | None = None
        self.lost = ""
        self.streams: list[WorkQueue] = []
        self.default = self.new_queue()
        self._local = _Local()
        self._sheets: dict[torch.dtype, _Sheet] = {}

    # -- streams ---------------------------------------------------------------------------------------------

    def new_queue(self) -> WorkQueue:
        """Make another worker."""
        self.streams.append(WorkQueue(f"mirage-stream-{len(self.streams)}", self.options.pace))
        return self.streams[-1]

    @property
    def current(self) -> WorkQueue:
        """The calling thread's current stream."""
        return self._local.stream or self.default

    @contextmanager
    def using(self, stream: WorkQueue) -> Iterator[None]:
        """Make a stream current for the calling thread."""
        before, self._local.stream = self._local.stream, stream
        try:
            yield
        finally:
            self._local.stream = before

    def refuse_in_capture(self, what: str) -> None:
        """Raise while the current stream records a graph."""
        if self.current.record is not None:
            raise RuleError("no-waits-in-capture", f"{what} was called inside a capture", "do it before the capture")

    def check(self) -> None:
        """Raise when the device is lost."""
        if self.lost:
            raise DeviceLost(f"mirage device lost: {self.lost}. Fix: restart the engine")

    # -- memory and work -------------------------------------------------------------------------------------

    def allocate(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, extent: int
    ) -> tuple[torch.Tensor, Slab]:
        """Return a poisoned buffer of ``extent`` elements on the device's memory, and what holds its bytes."""
        if self.lost:
            self.check()
        slab = self.ledger.take(extent * dtype.itemsize)
        if self.captured is not None:
            self.captured.append(slab)
        if extent <= SMALL:
            sheet = self._sheets.get(dtype)
            if sheet is None or sheet.left < extent:
                sheet = self._sheets[dtype] = _Sheet(dtype)
            return sheet.cut(shape, stride, extent), slab
        return torch.empty_strided(shape, stride, dtype=dtype).fill_(POISON[dtype]), slab

    def launch(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        out: torch.Tensor | tuple[torch.Tensor, ...] | None,
    ) -> None:
        """Queue a kernel over raw buffers on the current stream."""
        self.check()
        self.current.put((function, args, {}, out))

    def lose(self, reason: str) -> None:
        """Planted fault: from now on all work is refused."""
        self.lost = reason

    def close(self) -> None:
        """Finish all streams and end their threads."""
        for stream in self.streams:
            stream.stop()
