"""Starts a loop's process, greets it, tells how it ended. Used by the front end and by ``RemoteLoop`` alike."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain import errors
from drivetrain.ahead import MODULES
from drivetrain.config import EngineConfig, environment
from drivetrain.errors import DeviceError, DrivetrainError
from drivetrain.launch import view_of
from drivetrain.select.choose import Choice, prepare_environment
from drivetrain.server.channel import Channel, Meeting
from drivetrain.server.messages import PROTOCOL, FromLoop, Hello, Launch, LoopError, Ready, Stop, ToLoop

FACTORY = "drivetrain.launch:open_loop"
STDERR = 2
IGNORED = (signal.SIGINT, signal.SIGTERM)  # by a loop's process: they are for its front end

Parts = tuple[Meeting, Channel[ToLoop, FromLoop], subprocess.Popen[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """What a loop's process is told. ``factory``: ``module:function`` of (config, choice), imported there.

    ``extra_environment`` is set on top of this process's own and of what the backend asks for. ``begun``: a process
    that has been started already, for the first loop.
    """

    config: EngineConfig
    choice: Choice | None
    factory: str = FACTORY
    beat_seconds: float = 0.5
    extra_environment: Mapping[str, str] = field(default_factory=dict)
    begun: Begun | None = None

    def drop(self) -> None:
        """End the process that has been started, if no loop has taken it."""
        if self.begun is not None:
            self.begun.drop()


class Begun:
    """A loop's process that was started while its device was still being probed: it loads torch, then waits. It is
    taken once, by whoever would start the same; else dropped."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._environment = dict(values)
        self._meeting: Meeting | None
        self._meeting, self._channel, self._process = open_process(values, MODULES)

    def take(self, values: Mapping[str, str]) -> Parts | None:
        """Return the process where its environment is ``values`` and it still runs. No other is offered."""
        meeting = self._meeting
        if meeting is None:
            return None
        if dict(values) != self._environment or self._process.poll() is not None:
            self.drop()
            return None
        self._meeting = None
        return meeting, self._channel, self._process

    def drop(self) -> None:
        """End the process if it was not taken."""
        if self._meeting is not None:
            end_process(self._meeting, self._channel, self._process)
            self._meeting = None


def open_process(values: Mapping[str, str], modules: Sequence[str] = ()) -> Parts:
    """Make a channel and start a loop's process at its other end. DeviceError, and nothing is left, where the system
    starts none."""
    meeting = Meeting()
    try:
        channel = meeting.bind()
        try:
            return meeting, channel, start_process(meeting.url, values, modules)
        except BaseException:
            channel.close()
            raise
    except OSError as error:
        meeting.remove()
        raise not_started(error, values) from error
    except BaseException:
        meeting.remove()
        raise


def not_started(error: OSError, values: Mapping[str, str]) -> DeviceError:
    """Say why the system started no process."""
    message = f"the loop's process can't be started: {error.strerror or error}"
    if error.errno != errno.E2BIG:
        return DeviceError(message, fix="free memory, or raise the limit on processes (ulimit -u), and start again")
    name = max(values, key=lambda one: len(values[one]))
    message += f"; the longest of its {len(values)} variables is {name} with {len(values[name])} characters"
    if environment().get(name) == values[name]:
        return DeviceError(message, fix=f"unset {name} or make it shorter")
    return DeviceError(message, fix=f"report it to the vendor of the device's wheel, whose environment() wants {name}")


def start_process(url: str, values: Mapping[str, str], modules: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a loop's process that will listen at ``url``, with ``values`` as its environment; meanwhile it loads
    ``modules``. The signals that it will ignore are held back until it does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "drivetrain.server.loop_process", url, str(os.getpid()), *modules],
            env=dict(values),
            stdin=subprocess.DEVNULL,
            stdout=STDERR,  # standard output belongs to the answer of a command
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_process(meeting: Meeting, channel: Channel[ToLoop, FromLoop], process: subprocess.Popen[bytes]) -> None:
    """End a loop's process now and remove what it used."""
    if process.poll() is None:
        process.kill()
    process.wait()
    channel.close()
    meeting.remove()


class LoopChild:
    """One process and the channel to it. It ends when told, when killed, or when this process is gone."""

    def __init__(self, spec: LoopSpec) -> None:
        self._spec = spec
        values = child_environment(spec)
        begun = None if spec.begun is None else spec.begun.take(values)
        own = environment()
        self._given = {name: value for name, value in values.items() if own.get(name) != value}
        self._meeting, self.channel, self._process = begun or open_process(values)

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
                    given=self._given,
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
        end_process(self._meeting, self.channel, self._process)

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
    wanted: Mapping[str, str] = {}
    if spec.choice is not None:
        wanted = prepare_environment(spec.choice, view_of(spec.config, spec.choice), apply=False)
    return {**whole_environment(wanted), **spec.extra_environment}


def whole_environment(wanted: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with what a backend wants of a loop's process."""
    return {**environment(), **wanted, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
