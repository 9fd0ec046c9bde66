"""Keeps a loop's process alive: starts it, listens to it, notices its death or silence, starts the next one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from drivetrain.errors import DrivetrainError
from drivetrain.server.child import LoopChild, LoopSpec
from drivetrain.server.messages import Abort, FromLoop, LoopError, Ready, Submit

log = logging.getLogger("drivetrain.server")
State = Literal["starting", "ready", "restarting", "stopped"]
DRAIN_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How patient a supervisor is, in seconds.

    ``silent``: after so long without an answer the loop does not count as ready; after ``hang`` it is replaced.
    ``backoff_first`` doubles up to ``backoff_max`` as long as loops die before they have been ``stable``.
    """

    start: float = 1800.0
    silent: float = 15.0
    hang: float = 120.0
    backoff_first: float = 0.5
    backoff_max: float = 30.0
    stable: float = 60.0
    stop: float = 5.0
    tick: float = 0.1


class Supervisor:
    """One loop at a time. All methods are called on the event loop's thread.

    ``on_message`` gets what a ready loop says, in order; ``on_lost`` gets the reason when it is gone.
    """

    def __init__(
        self,
        spec: LoopSpec,
        watch: Watch,
        *,
        on_message: Callable[[FromLoop], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._watch = watch
        self._on_message = on_message
        self._on_lost = on_lost
        self._child: LoopChild | None = None
        self._failure: DrivetrainError | None = None
        self._task: asyncio.Task[None] | None = None
        self._heard = 0.0
        self.state: State = "starting"
        self.why = "the loop is starting"
        self.ready: Ready | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Id of the present process."""
        return self._child.pid if self._child else None

    @property
    def silent_seconds(self) -> float:
        """Seconds since a ready loop was heard, where that is suspiciously long; else 0."""
        since = time.monotonic() - self._heard
        return since if self.state == "ready" and since > self._watch.silent else 0.0

    def spawn(self) -> None:
        """Start the first process; it builds its loop while this one does other things."""
        self._child = LoopChild(self._spec)
        self._heard = time.monotonic()

    async def start(self) -> Ready:
        """Wait for the first loop, then supervise. Raises what the loop's process says when it can't be built."""
        if self._child is None:
            self.spawn()
        try:
            ready = await self._become_ready()
        except BaseException:
            self._discard()
            self.state = "stopped"
            raise
        self._task = asyncio.create_task(self._supervise())
        return ready

    def send(self, message: Submit | Abort) -> None:
        """Send to the present loop; without a ready one the message has no addressee and is dropped."""
        if self._child is None or self.state != "ready":
            return
        self._child.channel.send(message)
        if self._child.channel.pending():  # the edge of a message that came meanwhile is spent
            asyncio.get_running_loop().call_soon(self._drain)

    async def stop(self) -> None:
        """End the process and the supervision."""
        self.state, self.why = "stopped", "the server is stopping"
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._unwatch()
        if self._child is not None:
            await asyncio.to_thread(self._child.stop, self._watch.stop)
            self._child = None

    def kill(self) -> None:
        """End the process at once; for a program that is on its way out."""
        self._discard()

    async def _supervise(self) -> None:
        wait = self._watch.backoff_first
        while True:
            begin = time.monotonic()
            why = await self._until_lost()
            self._discard()
            self.state, self.why = "restarting", f"the loop is being restarted: {why}"
            log.error("%s; starting another", why)
            self._on_lost(why)
            if time.monotonic() - begin > self._watch.stable:
                wait = self._watch.backoff_first
            wait = await self._restart(wait)

    async def _restart(self, wait: float) -> float:
        """Start processes until one is ready. Returns how long to wait if that one dies young."""
        while True:
            await asyncio.sleep(wait)
            wait = min(2 * wait, self._watch.backoff_max)
            self.restarts += 1
            try:
                self.spawn()
                await self._become_ready()
                return wait
            except (DrivetrainError, OSError) as error:
                self._discard()
                self.why = f"the loop can't be restarted: {error}"
                log.error("%s", self.why)

    async def _become_ready(self) -> Ready:
        assert self._child is not None
        child, deadline = self._child, self._heard + self._watch.start
        while True:
            ended = child.ended()  # asked first: what it said before it ended is still read below
            while (message := child.channel.receive(0.0)) is not None:
                ready = child.greet(message)
                if ready is not None:
                    self._attend(ready)
                    return ready
            if ended:
                raise DrivetrainError(ended + " before it was ready", fix="see what it printed above")
            if time.monotonic() > deadline:
                raise DrivetrainError(f"the loop was not ready after {self._watch.start:g} s")
            await asyncio.sleep(min(self._watch.tick, 0.02))

    def _attend(self, ready: Ready) -> None:
        assert self._child is not None
        self.ready, self._failure = ready, None
        self._heard = time.monotonic()
        self.state, self.why = "ready", ""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._child.channel.fileno(), self._drain)
        loop.call_soon(self._drain)

    async def _until_lost(self) -> str:
        """Return why the present loop is lost."""
        assert self._child is not None
        child = self._child
        while True:
            await asyncio.sleep(self._watch.tick)
            ended = child.ended()
            while self._drain():
                pass
            if self._failure is not None:
                return str(self._failure)
            if ended:
                return ended
            if time.monotonic() - self._heard > self._watch.hang:
                return f"the loop has not answered for {self._watch.hang:g} s"

    def _drain(self) -> bool:
        """Handle what waits, a bounded number at once; returns whether more may wait."""
        child = self._child
        if child is None or self.state != "ready":
            return False
        for _ in range(DRAIN_AT_ONCE):
            try:
                message = child.channel.receive(0.0)
            except DrivetrainError as error:
                self._failure = error
                return False
            if message is None:
                return False
            self._heard = time.monotonic()
            if isinstance(message, LoopError):
                self._failure = DrivetrainError(message.message, fix=message.fix)
                return False
            self._on_message(message)
        asyncio.get_running_loop().call_soon(self._drain)
        return True

    def _unwatch(self) -> None:
        if self._child is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._child.channel.fileno())

    def _discard(self) -> None:
        if self._child is not None:
            self._unwatch()
            self._child.kill()
            self._child = None
