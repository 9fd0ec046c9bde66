"""How many threads this process may use, and how many an op should: waking one costs what it may not bring in."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
SPLIT = 32768  # elements that torch gives to one thread at least
ROUNDS = 24
BYTES_PER_SECOND = 12e9  # that one thread streams, and
OPERATIONS_PER_SECOND = 5e10  # does in float32: both only decide where a second thread pays
NARROW_TOKENS = 64
CHEAP_WAKE = 2e-5
WAKES = 3  # parallel regions that an op opens, at most


class Threads:
    """The calling thread's share of torch's pool: all of it for large work, one thread for small work.

    ``wake_seconds``: what opening and closing a parallel region costs here, measured once. Threads that sleep between
    regions cost most (up to 0.3 ms in a virtual machine), but never stall a loaded machine as spinning ones do.
    """

    def __init__(self, count: int, wake_seconds: float | None = None) -> None:
        import torch

        self._set = torch.set_num_threads
        self._set(count)
        self.count = count
        self.wake_seconds = measure_wake(count) if wake_seconds is None else wake_seconds
        self._base = count

    @contextmanager
    def working(self) -> Iterator[None]:
        """While the engine works the number is its own; others who use this thread find all threads again."""
        self._set(self._base)
        try:
            yield
        finally:
            self._set(self.count)

    def begin_step(self, tokens: int) -> None:
        """Choose for a step's ops that don't choose themselves: their work grows with its query tokens."""
        self._base = 1 if tokens <= NARROW_TOKENS and self.wake_seconds > CHEAP_WAKE else self.count
        self._set(self._base)

    def pays(self, seconds: float) -> bool:
        """Say whether work that takes one thread so long is done sooner by all."""
        return self.count > 1 and seconds * (1 - 1 / self.count) > WAKES * self.wake_seconds

    def take(self, seconds: float) -> None:
        """Take the threads that work of that length is worth; ``give_back`` ends it."""
        wanted = self.count if self.pays(seconds) else 1
        if wanted != self._base:
            self._set(wanted)

    def give_back(self) -> None:
        """Return to the step's own number."""
        self._set(self._base)


def work_seconds(nbytes: float, operations: float) -> float:
    """About how long one thread takes to read so much and compute so much."""
    return max(nbytes / BYTES_PER_SECOND, operations / OPERATIONS_PER_SECOND)


def measure_wake(count: int) -> float:
    """Return the seconds that a parallel region of ``count`` threads costs beside its work (the lower quartile)."""
    if count < 2:
        return 0.0
    import torch

    values = torch.zeros(count * SPLIT)
    alone, together = [], []
    for _ in range(ROUNDS):
        for times, threads in ((alone, 1), (together, count)):
            torch.set_num_threads(threads)
            begin = time.perf_counter()
            values.add_(1.0)
            times.append(time.perf_counter() - begin)
    torch.set_num_threads(count)
    quarter = ROUNDS // 4
    return max(0.0, sorted(together)[quarter] - sorted(alone)[quarter] / count)


def usable_cores() -> int:
    """Return the cores that the scheduler and the control group's quota leave to this process, at least one."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
    quota = quota_cores()
    return max(1, cores if quota is None else min(cores, int(quota)))


def quota_cores(root: Path = CGROUP) -> float | None:
    """Return the control group's limit in cores (version 2, else version 1), or None where there is none."""
    try:
        limit, period = (root / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            limit = (root / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    if not limit.isdigit():  # "max", or -1
        return None
    return int(limit) / int(period)
