"""Streams: a stream is a thread that runs queued work in order, now and then after a random pause."""

from __future__ import annotations

import atexit
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .rules import RuleError

# A piece of work: function, arguments, keyword arguments, and the buffers that its results go to (None: no results).
Work = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], "torch.Tensor | tuple[torch.Tensor, ...] | None"]
PAUSE_SECONDS = (2e-4, 2e-3)
BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How slow a device pretends to be. ``share`` of all pieces of work begin with a pause of 0.2 to 2 ms."""

    share: float = 0.01
    seed: int = 0


@dataclass(slots=True)
class Fault:
    """An exception raised by queued work. It is reported once, by whoever waits first."""

    error: BaseException
    reported: bool = False


@dataclass(slots=True, eq=False)
class Marker:
    """A place in a stream's order, with the fault that was open there and, for copies, the values."""

    passed: threading.Event = field(default_factory=threading.Event)
    fault: Fault | None = None
    arrays: tuple[np.ndarray, ...] = ()

    def report(self) -> None:
        """Raise the fault if nobody has heard of it yet."""
        fault = self.fault
        if fault is not None and not fault.reported:
            fault.reported = True
            raise fault.error


@dataclass(frozen=True, slots=True, eq=False)
class PendingUpload:
    """A host array that must not change yet, and what it held when the upload was asked for."""

    source: np.ndarray
    held: np.ndarray

    def check(self) -> None:
        """Raise when the source was written to."""
        if not np.array_equal(self.source.view(np.uint8), self.held.view(np.uint8)):
            raise RuleError(
                "stable-upload",
                f"a host array of shape {self.source.shape} was changed while its upload was pending",
                "keep a ring of host buffers and write to one only when an event recorded after its upload is done",
            )


_ALL: weakref.WeakSet[WorkQueue] = weakref.WeakSet()


class WorkQueue:
    """The worker thread behind a stream. ``record``: a list takes work instead of the thread (graph capture)."""

    def __init__(self, name: str, pace: Pace) -> None:
        self.name = name
        self.record: list[Work] | None = None
        self._queue: queue.SimpleQueue[list[Work] | None] = queue.SimpleQueue()
        self._pending: list[Work] = []
        self._put_lock = threading.Lock()
        self._share = pace.share
        self._random = random.Random(f"{pace.seed}:{name}")
        self._fault: Fault | None = None
        self._uploads: list[PendingUpload] = []
        self._thread: threading.Thread | None = None
        _ALL.add(self)

    # -- the host's side -------------------------------------------------------------------------------------

    def put(self, work: Work) -> None:
        """Queue a piece of work, or record it while a graph is captured. The thread gets it in batches: a wake-up
        for each op would cost more than the op."""
        if self.record is not None:
            self.record.append(work)
            return
        with self._put_lock:
            self._pending.append(work)
            if len(self._pending) < BATCH:
                return
        self.flush()

    def flush(self) -> None:
        """Hand over what is pending. Every marker does: whoever can wait for work makes it run."""
        with self._put_lock:
            batch, self._pending = self._pending, []
            if not batch:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._queue.put(batch)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Queue a call without results."""
        self.put((function, args, {}, None))

    def mark(self, raws: tuple[torch.Tensor, ...] = ()) -> Marker:
        """Queue a marker that takes copies of ``raws`` along."""
        marker = Marker()
        self.call(self._pass, marker, raws)
        self.flush()
        return marker

    def upload(self, source: np.ndarray, target: torch.Tensor) -> None:
        """Queue a copy of a host array, read when the queue comes to it."""
        self.call(self._upload, PendingUpload(source, source.copy()), target)

    def stop(self) -> None:
        """Finish what is queued and end the thread. Later work starts it again."""
        self.flush()
        with self._put_lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    # -- the thread's side -----------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode():
            while (batch := self._queue.get()) is not None:
                batch.reverse()
                while batch:
                    self._run_one(batch.pop())

    def _run_one(self, work: Work) -> None:
        if self._random.random() < self._share:
            time.sleep(self._random.uniform(*PAUSE_SECONDS))
        try:
            run_work(work)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Keep the first fault until a copy to the host or a synchronisation takes it along."""
        if self._fault is None:
            self._fault = Fault(error)

    def _pass(self, marker: Marker, raws: tuple[torch.Tensor, ...]) -> None:
        try:
            for upload in self._uploads:
                upload.check()
        except RuleError as error:
            self.fail(error)
        self._uploads.clear()
        try:
            marker.arrays = tuple(raw.numpy().copy() for raw in raws)
        except BaseException as error:
            self.fail(error)
        marker.fault = self._fault
        if raws:
            self._fault = None
        marker.passed.set()

    def settle(self) -> None:
        """On the thread: forget the open fault; the marker before it has it."""
        self._fault = None

    def _upload(self, upload: PendingUpload, target: torch.Tensor) -> None:
        upload.check()
        self._uploads.append(upload)
        target.copy_(torch.from_numpy(upload.source))


def run_work(work: Work) -> None:
    """Run one piece of work on the calling thread."""
    function, args, kwargs, out = work
    result = function(*args, **kwargs)
    if out is None:
        return
    if isinstance(out, tuple):
        for buffer, value in zip(out, result, strict=True):
            buffer.copy_(value)
    else:
        out.copy_(result)


def run_all(works: list[Work]) -> None:
    """Run recorded work in order, on the calling thread."""
    for work in works:
        run_work(work)


@atexit.register
def _stop_all() -> None:
    for work_queue in tuple(_ALL):
        work_queue.stop()
