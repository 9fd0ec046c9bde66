"""A device over the host's memory whose copies are made late, in order, by a thread of its own."""

from __future__ import annotations

import queue
import random
import threading
import time
from contextlib import contextmanager

import numpy as np
import torch

from drivetrain_api.v1 import torch_runtime

POISON = 0xA5


class LateEvent:
    """``source``: the host array whose copy it follows."""

    def __init__(self, source: np.ndarray) -> None:
        self.passed = threading.Event()
        self.source = source

    def done(self) -> bool:
        return self.passed.is_set()

    def wait(self) -> None:
        assert self.passed.wait(30)


class LateRuntime:
    """Reads a host array when its turn comes, after a random pause: one that was written to meanwhile shows up.

    ``buffers``: host arrays that it made, which begin poisoned. ``uploads``: bytes of each copy. ``fail_at``: the
    upload that raises.
    """

    asynchronous = True

    def __init__(self, seed: int = 0, pause: float = 1e-3) -> None:
        self._inner = torch_runtime("cpu")
        self.device, self.synchronized = self._inner.device, 0
        self.from_host, self.zeros, self.to_host = self._inner.from_host, self._inner.zeros, self._inner.to_host
        self.buffers: list[np.ndarray] = []
        self.uploads: list[int] = []
        self.fail_at = -1
        self.active = threading.local()
        self._random, self._pause = random.Random(seed), pause
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        self._last: LateEvent | None = None
        threading.Thread(target=self._run, daemon=True).start()

    @contextmanager
    def activate(self):
        before, self.active.now = getattr(self.active, "now", False), True
        yield
        self.active.now = before

    def empty(self, shape, dtype):
        made = self._inner.empty(shape, dtype)
        made.view(-1).view(torch.uint8).fill_(POISON)
        return made

    def host_buffer(self, shape, dtype):
        assert self.active.now, "made on a thread whose device is another"
        self.buffers.append(np.full(shape, POISON, dtype))
        return self.buffers[-1]

    def upload(self, source, target):
        assert source.shape == tuple(target.shape) and torch.from_numpy(source).dtype == target.dtype
        assert any(np.shares_memory(source, buffer) for buffer in self.buffers), "from memory that is not the device's"
        if len(self.uploads) == self.fail_at:
            raise RuntimeError("planted: the copy failed")
        self.uploads.append(source.nbytes)
        self._last = LateEvent(source)
        self._work.put((source, target, self._last))

    def stream(self):
        return self

    def record(self):
        assert self._last is not None
        return self._last

    def synchronize(self):
        self.synchronized += 1
        if self._last is not None:
            self._last.wait()

    def busy(self) -> bool:
        """Whether a copy is still to be made."""
        return self._last is not None and not self._last.done()

    def _run(self) -> None:
        while True:
            source, target, event = self._work.get()
            time.sleep(self._random.uniform(0, self._pause))
            target.numpy()[...] = source
            event.passed.set()
