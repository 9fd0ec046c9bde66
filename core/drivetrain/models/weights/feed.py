"""Weights from files to a device: several threads read into a few host buffers, each copied on as soon as it is full.

What will be wanted is told in advance, in the order in which it will be asked for. Reading goes ahead by as many
buffers as there are, however large the checkpoint; memory on the device is the caller's, made when its turn comes.
Values reach the device in the dtype asked for: bytes are read into the buffer as they lie, other dtypes are converted
on the way.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch

from drivetrain.errors import WeightsError
from drivetrain.models.weights.checkpoint import Stored
from drivetrain_api.v1 import torch_dtype

if TYPE_CHECKING:
    from drivetrain_api.v1 import DeviceRuntime, Event

READERS = 8
BUFFERS = 16  # some are read into while others are copied from
BUFFER_BYTES = 8 << 20  # all of them may stay in a processor's cache, from which devices read too
CONVERT_BYTES = 1 << 20
SLICE = 1 << 15  # values converted at a time: for so few torch starts no threads of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``count`` values of a stored tensor, from value ``first`` on."""

    stored: Stored
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run, or a part of one, that fits a buffer: where its bytes begin."""

    path: Path
    offset: int
    dtype: torch.dtype
    count: int


@dataclass(slots=True)
class _Slot:
    """A buffer of the ring, made by the first reader that needs it: page-locking takes time."""

    memory: np.ndarray | None = None


class Files:
    """Files opened when they are first read, for any thread. WeightsError names the one that can't be read."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._stack = ExitStack()

    def read(self, path: Path, offset: int, into: np.ndarray) -> None:
        """Fill ``into`` (uint8) with a file's bytes from ``offset`` on."""
        left = into.data
        try:
            file = self._file(path)
            while left:
                got = os.preadv(file, [left], offset)
                if got == 0:
                    what = f"{len(left)} more bytes are needed at offset {offset}, where it ends"
                    raise WeightsError(f"{path} is damaged or cut short: {what}", fix="download it again")
                left, offset = left[got:], offset + got
        except OSError as error:
            raise WeightsError(f"{path} can't be read: {error}", fix="check the file, or download it again") from error

    def close(self) -> None:
        """Close all; nobody may be reading."""
        self._open.clear()
        self._stack.close()

    def _file(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._stack.callback(os.close, self._open[path])
            return self._open[path]


class Feed:
    """Fills device tensors from files, in the order that was planned.

    Use it in a ``with`` statement, on one thread, which is the one that talks to the device: readers only make
    buffers and fill them. A reader's fault is raised by the ``fill`` whose values it was to bring.
    """

    def __init__(self, plan: Sequence[Run], dtype: torch.dtype, runtime: DeviceRuntime) -> None:
        """``plan``: all that will be asked for, one tensor's runs after another's. ``dtype``: of all tensors."""
        self._dtype = dtype
        self._runtime = runtime
        self._pieces = _pieces(plan, dtype)
        self._files = Files()
        self._free = [_Slot() for _ in range(BUFFERS)]
        self._reading: deque[tuple[_Slot, Future[np.ndarray]]] = deque()
        self._copying: deque[tuple[_Slot, Event]] = deque()
        self._readers = ThreadPoolExecutor(_readers(), thread_name_prefix="weights")

    def __enter__(self) -> Feed:
        self._ahead()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for readers and for copies that are under way: buffers may not go before."""
        self._readers.shutdown(cancel_futures=True)
        for _, event in self._copying:
            with suppress(Exception):  # whoever synchronizes gets it; here another error may be on its way
                event.wait()
        self._files.close()

    def fill(self, target: torch.Tensor) -> None:
        """Queue the copies that fill the next planned tensor, contiguous and of the feed's dtype."""
        flat = target.view(-1).view(torch.uint8)
        at = 0
        while at < flat.shape[0]:
            self._ahead()
            slot, reading = self._reading.popleft()
            values = reading.result()
            self._runtime.upload(values, flat[at : at + len(values)])
            self._copying.append((slot, self._runtime.stream().record()))
            at += len(values)

    def _ahead(self) -> None:
        """Begin to read as many further pieces as there are buffers for; wait for one only if all are being copied."""
        while self._copying and (self._copying[0][1].done() or not (self._free or self._reading)):
            slot, event = self._copying.popleft()
            event.wait()
            self._free.append(slot)
        while self._free and (piece := next(self._pieces, None)) is not None:
            slot = self._free.pop()
            self._reading.append((slot, self._readers.submit(self._read, slot, piece)))

    def _read(self, slot: _Slot, piece: _Piece) -> np.ndarray:
        """On a reader: bring a piece into a buffer; returns the part of it that is filled."""
        if slot.memory is None:
            with self._runtime.activate():
                slot.memory = self._runtime.host_buffer((BUFFER_BYTES,), "uint8")
        into = slot.memory[: piece.count * self._dtype.itemsize]
        if piece.dtype == self._dtype:
            self._files.read(piece.path, piece.offset, into)
        else:
            self._convert(piece, torch.from_numpy(into).view(self._dtype))
        return into

    def _convert(self, piece: _Piece, into: torch.Tensor) -> None:
        """Read values of another dtype, about as many at a time as a processor's cache holds."""
        size = piece.dtype.itemsize
        most = CONVERT_BYTES // size
        raw = np.empty(min(piece.count, most) * size, np.uint8)
        values = torch.from_numpy(raw).view(piece.dtype)
        for first in range(0, piece.count, most):
            count = min(most, piece.count - first)
            self._files.read(piece.path, piece.offset + first * size, raw[: count * size])
            torch._foreach_copy_(into[first : first + count].split(SLICE), values[:count].split(SLICE))


def _readers() -> int:
    """As many as there are processors; two at least, since one may wait for a disk."""
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(READERS, able))


def _pieces(plan: Sequence[Run], dtype: torch.dtype) -> Iterator[_Piece]:
    """Cut runs into pieces that fit a buffer."""
    most = BUFFER_BYTES // dtype.itemsize
    for run in plan:
        stored = torch_dtype(run.stored.dtype)
        for first in range(run.first, run.first + run.count, most):
            count = min(most, run.first + run.count - first)
            yield _Piece(run.stored.path, run.stored.offset + first * stored.itemsize, stored, count)
