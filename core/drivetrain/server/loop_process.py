"""The process of one loop: ``python -m drivetrain.server.loop_process URL PARENT [MODULE...]``. Modules load while
the front end, the process PARENT, finds out for which device. Then one thread: messages, steps, messages.

With work the socket is looked at between steps and never waited for; without, the process sleeps on it.
A request that fails ends alone. An exception out of a step ends the process, whose front end starts another.
"""

from __future__ import annotations

import gc
import importlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from drivetrain.ahead import load
from drivetrain.config import note_environment
from drivetrain.errors import DrivetrainError, RequestError
from drivetrain.launch import nothing_collected
from drivetrain.moments import passed
from drivetrain.params import GenerateRequest, StepOutputs
from drivetrain.server.channel import Channel, connect
from drivetrain.server.messages import (
    PROTOCOL,
    Abort,
    Accepted,
    FromLoop,
    Hello,
    Launch,
    LoopError,
    Ready,
    Refused,
    Stats,
    Stop,
    Submit,
    ToLoop,
    pack_outputs,
    request_of,
)

LAUNCH_SECONDS = 3600.0
LOOK_SECONDS = 1.0  # how often a process that is not told anything looks whether its front end is there
NAP_SECONDS = 0.001
LULL_SECONDS = 0.002  # without work the figures are not told before: who has just got an answer may ask again
log = logging.getLogger("drivetrain.loop")


class StepLoop(Protocol):
    """What is driven here; ``drivetrain.loop.Loop`` is one."""

    def submit(self, request: GenerateRequest) -> None: ...
    def abort(self, request_id: int) -> None: ...
    def step(self) -> tuple[StepOutputs, ...]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> Any: ...
    def close(self) -> None: ...


class Opened(Protocol):
    """What a factory returns; it may have ``figures`` too, seconds and bytes of the start by name."""

    @property
    def loop(self) -> StepLoop: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def dtype(self) -> str: ...


class Driver:
    """Runs a loop between its messages until told to stop, or until the front end is gone."""

    def __init__(self, loop: StepLoop, channel: Channel[FromLoop, ToLoop], beat_seconds: float, parent: int) -> None:
        self._loop = loop
        self._channel = channel
        self._beat_seconds = beat_seconds
        self._parent = parent
        self._accepted: list[int] = []
        self._next_beat = 0.0
        self._was_busy = False
        self._stopped = False
        self._rest: Callable[[], float] = getattr(loop, "rest", lambda: math.inf)
        self._fill: Callable[[], None] = getattr(loop, "fill", lambda: None)
        self._settle: Callable[[], None] = getattr(loop, "settle", lambda: None)

    def run(self) -> None:
        """Serve. Returns when told to stop; an exception out of a step passes through."""
        while not self._stopped:
            busy = self._loop.has_work()
            if self._was_busy and not busy:
                self._take_messages(LULL_SECONDS)
                busy = self._loop.has_work()
            self._beat(busy)
            self._take_messages(0.0 if busy else min(self._rest(), self._beat_seconds))
            if self._loop.has_work():
                self._step()

    def _beat(self, busy: bool) -> None:
        """Send the figures when they are due, and at once when the loop falls idle: gauges go back to 0."""
        now = time.monotonic()
        if now < self._next_beat and not (self._was_busy and not busy):
            self._was_busy = busy
            return
        self._was_busy = busy
        self._next_beat = now + self._beat_seconds
        if os.getppid() != self._parent:
            self._stopped = True
            return
        self._channel.send(stats_of(self._loop))

    def _take_messages(self, timeout: float) -> None:
        message = self._channel.receive(timeout)
        while message is not None and not self._stopped:
            self._handle(message)
            message = self._channel.receive(0.0)
        if self._accepted:
            self._fill()  # the device works while this is told
            self._channel.send(Accepted(tuple(self._accepted)))
            self._accepted.clear()
            passed("told")

    def _handle(self, message: ToLoop) -> None:
        if isinstance(message, Submit):
            passed("received")
            self._submit(message)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self._loop.abort(request_id)
        elif isinstance(message, Stop):
            self._stopped = True

    def _submit(self, message: Submit) -> None:
        try:
            self._loop.submit(request_of(message))
        except RequestError as error:
            refusal = Refused(
                request_id=message.request_id,
                message=str(error),
                client_fault=True,
                param=error.param,
                code=error.code,
            )
        except Exception as error:
            log.exception("request %d could not be taken", message.request_id)
            refusal = Refused(
                request_id=message.request_id, message=f"{type(error).__name__}: {error}", client_fault=False
            )
        else:
            self._accepted.append(message.request_id)
            return
        self._channel.send(refusal)

    def _step(self) -> None:
        told = False
        for outputs in self._loop.step():
            told = True
            if len(outputs.request_ids) or outputs.started or outputs.finished:
                self._channel.send(pack_outputs(outputs))
                passed("sent")
        self._settle()
        if not told and not getattr(self._loop, "in_flight", 0):
            time.sleep(NAP_SECONDS)  # all requests wait for something remote


def stats_of(loop: StepLoop) -> Stats:
    """Read a loop's figures; those it does not keep are what ``Stats`` begins with."""
    figures = loop.stats()
    values = {name: int(getattr(figures, name)) for name in Stats.__struct_fields__ if hasattr(figures, name)}
    values["steps"] = int(getattr(loop, "steps", values.get("steps", 0)))
    own: Callable[[], Mapping[str, int]] = getattr(loop, "figures", dict)
    values |= own()
    return Stats(**values)


def resolve_factory(name: str) -> Callable[..., Opened]:
    """Import ``module:function``."""
    module, _, function = name.partition(":")
    factory: Callable[..., Opened] = getattr(importlib.import_module(module), function)
    return factory


def wait_for_launch(channel: Channel[FromLoop, ToLoop], parent: int) -> ToLoop | None:
    """Return the front end's first message, None when it is gone or says nothing: a device may be probed for as long
    as somebody wants, while the process that was begun for it waits."""
    deadline = time.monotonic() + LAUNCH_SECONDS  # who was gone before this process looked first is not missed
    message = channel.receive(LOOK_SECONDS)
    while message is None and os.getppid() == parent and time.monotonic() < deadline:
        message = channel.receive(LOOK_SECONDS)
    return message


def end_without(parent: int) -> threading.Event:
    """End this process when its front end is gone, whatever it does, until the event is set: from then on ``Driver``
    looks itself, and ends in order."""
    ready = threading.Event()

    def look() -> None:
        while not ready.wait(LOOK_SECONDS):
            if os.getppid() != parent:
                os._exit(1)

    threading.Thread(target=look, name="front end", daemon=True).start()
    return ready


def serve(channel: Channel[FromLoop, ToLoop], parent: int, ready: threading.Event | None = None) -> int:
    """Greet, build the loop as told, set ``ready``, run it. Returns the exit status."""
    channel.send(Hello(PROTOCOL, os.getpid()))
    with nothing_collected():  # what loads meanwhile makes no garbage
        launch = wait_for_launch(channel, parent)
        if launch is None:
            return 1
        if not isinstance(launch, Launch) or launch.protocol != PROTOCOL:
            channel.send(LoopError(kind="DrivetrainError", message="front end and loop come from different versions"))
            return 1
        note_environment(launch.given)
        begin = time.monotonic()
        try:
            opened = resolve_factory(launch.factory)(launch.config, launch.choice)
        except DrivetrainError as error:
            channel.send(LoopError(kind=type(error).__name__, message=error.message, fix=error.fix))
            return 2
    figures: Mapping[str, float] = getattr(opened, "figures", {})
    channel.send(
        Ready(
            max_model_len=opened.max_model_len,
            vocabulary=opened.vocabulary,
            dtype=opened.dtype,
            seconds=time.monotonic() - begin,
            figures={name: float(value) for name, value in figures.items()},
        )
    )
    if ready is not None:
        ready.set()
    gc.freeze()  # what a start has made stays: a collection that looked through it would hold a step up
    Driver(opened.loop, channel, launch.beat_seconds, parent).run()
    opened.loop.close()
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run until told to stop. Signals of the terminal and of service managers go to the front end, which drains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # held back by who started this
    parent = int(arguments[1])
    logging.basicConfig(level=logging.INFO, format="loop: %(levelname)s %(message)s", stream=sys.stderr)
    ready = end_without(parent)
    channel = connect(arguments[0])
    if arguments[2:]:
        load(arguments[2:])
    try:
        return serve(channel, parent, ready)
    except Exception as error:
        log.exception("the loop can't go on")
        channel.send(LoopError(kind="DrivetrainError", message=f"{type(error).__name__}: {error}"))
        return 1
    finally:
        channel.close(linger=2.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
