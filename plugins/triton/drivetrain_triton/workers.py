"""Processes that compile beside this one.

A part of each kernel's compilation is Python: threads of one process do that part one after another. Workers are forked
from this process, so that they have all modules and all that a job needs; they touch no device. What they compile they
leave in Triton's cache on disk. A job that fails in a worker, or is lost with one, is no error here: it is told as not
done, and done again by who gave it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

FEWEST = 6  # jobs that are worth the forks
PATIENCE = 120.0  # seconds without any answer
DONE, FAILED = b"\1", b"\0"


def worth_it(jobs: int, count: int) -> bool:
    """Whether so many jobs on so many cores are given to processes."""
    return sys.platform == "linux" and jobs >= FEWEST and count > 1


def run_all(jobs: Sequence[Callable[[], object]], count: int, *, patience: float = PATIENCE) -> Iterator[int]:
    """Run jobs in ``count`` processes, in order of their places; yield the place of each that succeeded, once it has.

    Those that failed, that were lost, or from which nothing was heard for ``patience`` seconds, are never yielded.
    There are fewer processes, or none, where the system allows no more.
    """
    waiting, queue = os.pipe()
    os.write(queue, b"".join(place.to_bytes(2, "little") for place in range(len(jobs))))
    os.close(queue)
    answers, told = os.pipe()
    workers: list[int] = []
    try:
        with suppress(OSError):
            for _ in range(min(count, len(jobs))):
                workers.append(fork(jobs, waiting, told))
        os.close(told)
        told = -1
        heard = select.poll()
        heard.register(answers, select.POLLIN)
        while heard.poll(patience * 1000) and (answer := os.read(answers, 3)):
            if answer[2:] == DONE:
                yield int.from_bytes(answer[:2], "little")
    finally:
        for one in (waiting, answers, told):
            if one >= 0:
                os.close(one)
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def fork(jobs: Sequence[Callable[[], object]], waiting: int, told: int) -> int:
    """Start a worker; returns its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads here hold no lock that a worker takes
        pid = os.fork()
    if pid:
        return pid
    try:
        gc.disable()
        work(jobs, waiting, told)
    finally:
        os._exit(0)  # nothing that this process would do at its end is the worker's


def work(jobs: Sequence[Callable[[], object]], waiting: int, told: int) -> None:
    """Take jobs until none is left. Two bytes are a job's place, a third says how it ended; pipes keep them whole."""
    while place := os.read(waiting, 2):
        try:
            jobs[int.from_bytes(place, "little")]()
        except Exception:
            os.write(told, place + FAILED)
        else:
            os.write(told, place + DONE)
