"""Starts a loop's process, greets it, tells how it ended. Used by the front end and by ``RemoteLoop`` alike."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from drivetrain import errors
from drivetrain.config import EngineConfig, environment
from drivetrain.errors import DrivetrainError
from drivetrain.launch import view_of
from drivetrain.select.choose import Choice, prepare_environment
from drivetrain.server.channel import Channel, Meeting
from drivetrain.server.messages import PROTOCOL, FromLoop, Hello, Launch, LoopError, Ready, Stop, ToLoop

FACTORY = "drivetrain.launch:open_loop"
STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """What a loop's process is told. ``factory``: ``module:function`` of (config, choice), imported there.

    ``extra_environment`` is set on top of this process's own and of what the backend asks for.
    """

    config: EngineConfig
    choice: Choice | None
    factory: str = FACTORY
    beat_seconds: float = 0.5
    extra_environment: Mapping[str, str] = field(default_factory=dict)


class LoopChild:
    """One process and the channel to it. It ends when told, when killed, or when this process is gone."""

    def __init__(self, spec: LoopSpec) -> None:
        self._spec = spec
        self._meeting = Meeting()
        self.channel: Channel[ToLoop, FromLoop] = self._meeting.bind()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "drivetrain.server.loop_process", self._meeting.url],
            env=child_environment(spec),
            stdin=subprocess.DEVNULL,
            stdout=STDERR,  # standard output belongs to the answer of a command
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def greet(self, message: FromLoop) -> Ready | None:
        """Handle one message of the start: answers ``Hello``, returns ``Ready``. Raises what a ``LoopError`` says."""
        if isinstance(message, Hello):
            if message.protocol != PROTOCOL:
                raise DrivetrainError(
                    f"the loop's process speaks version {message.protocol} of the messages, this one {PROTOCOL}",
                    fix="install one version of drivetrain and start again",
                )
            spec = self._spec
            self.channel.send(
                Launch(
                    protocol=PROTOCOL,
                    factory=spec.factory,
                    config=spec.config,
                    choice=spec.choice,
                    beat_seconds=spec.beat_seconds,
                )
            )
        elif isinstance(message, LoopError):
            raise error_of(message)
        return message if isinstance(message, Ready) else None

    def ended(self) -> str:
        """Return how the process ended, in words; empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        if code >= 0:
            return f"the loop's process ended with status {code}"
        with contextlib.suppress(ValueError):
            return f"the loop's process was killed by {signal.Signals(-code).name}"
        return f"the loop's process was killed by signal {-code}"

    def kill(self) -> None:
        """End the process now and remove what it used. Safe to call again."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self.channel.close()
        self._meeting.remove()

    def stop(self, seconds: float) -> None:
        """Ask the process to end, kill it after ``seconds``."""
        if self._process.poll() is None:
            self.channel.send(Stop())
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        self.kill()

    def wait_ready(self, seconds: float) -> Ready:
        """Block until the loop takes requests. Raises its own error, or DrivetrainError when it dies or is late."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            message = self.channel.receive(0.1)
            if message is not None:
                ready = self.greet(message)
                if ready is not None:
                    return ready
            elif ended := self.ended():
                raise DrivetrainError(ended + " before it was ready", fix="see what it printed above")
        raise DrivetrainError(f"the loop was not ready after {seconds:g} s", fix="see what it printed above")


def error_of(message: LoopError) -> DrivetrainError:
    """Make the exception that a loop's process met, of the same class."""
    kind = getattr(errors, message.kind, DrivetrainError)
    if not (isinstance(kind, type) and issubclass(kind, DrivetrainError)) or kind is errors.OverloadedError:
        kind = DrivetrainError
    return kind(message.message, fix=message.fix)


def child_environment(spec: LoopSpec) -> dict[str, str]:
    """Return the whole environment of the loop's process: resolved here, never guessed there."""
    values = environment()
    if spec.choice is not None:
        values |= prepare_environment(spec.choice, view_of(spec.config, spec.choice), apply=False)
    values["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return {**values, **spec.extra_environment}
