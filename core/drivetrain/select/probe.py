"""Asking a backend for its devices in a short child process, so that a hang or a crash there harms nothing here."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Literal

import msgspec

from drivetrain.config import environment
from drivetrain.errors import DeviceError
from drivetrain.select.entrypoints import BackendEntry, find_backend, list_backends
from drivetrain_api.v1.hooks import BackendInfo, ConfigView, DeviceRecord, Unavailable

if TYPE_CHECKING:
    from drivetrain.select.load import LoadedBackend

Outcome = Literal["usable", "unavailable", "import_failed", "raised", "hung", "crashed"]
DEFAULT_TIMEOUT = 30.0
MAX_ERRORS = 10_000
GLANCE = 0.02  # seconds
LOOK = 0.5  # how often the child looks whether somebody still waits for its answer
GRACE = 5.0  # how much longer than its parent waits the child lives at most

Told = Callable[[Mapping[str, str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What else the child is asked before its probe: the variables that the backend wants of a process which will run
    ``view`` on ``devices``, with ``given`` options. They are told as soon as they are known."""

    view: ConfigView
    devices: tuple[int, ...]
    given: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What came of a probe. ``reason`` and ``fix`` say why there are no devices; empty when usable."""

    outcome: Outcome
    info: BackendInfo | None = None
    devices: tuple[DeviceRecord, ...] = ()
    reason: str = ""
    fix: str = ""


def probe(
    entry: BackendEntry, timeout: float = DEFAULT_TIMEOUT, ask: Ask | None = None, told: Told | None = None
) -> Probe:
    """Run one backend's probe in a spawned child of at most ``timeout`` seconds. ``told`` gets the answer to ``ask``
    while the probe runs, if there is one.

    Only the child's own end is waited for: what it leaves behind may hold its files open, and is killed with it.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryFile() as answer_file, tempfile.TemporaryFile() as error_file:
        child, ahead = _start(entry, ask, (answer_file, error_file), timeout)
        try:
            if told is not None and (wanted := _hear(child, ahead, deadline)) is not None:
                told(wanted)
            status: int | None = child.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            os.close(ahead)
            _end(child)
        if status is None:
            return Probe(
                outcome="hung",
                reason=f"its probe gave no answer within {timeout:g} s",
                fix="check the driver, or give it longer with --probe-timeout SECONDS",
            )
        answer = _read(answer_file)
        if status == 0 and answer:
            try:
                return msgspec.json.decode(answer, type=Probe)
            except msgspec.MsgspecError:
                status = 0
        last = _read(error_file)[-MAX_ERRORS:].decode(errors="replace").strip().splitlines()[-1:]
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    return Probe(
        outcome="crashed",
        reason=f"its probe process ended with {how}{' and no answer' if status == 0 else ''}"
        f"{': ' + last[0] if last else ''}",
        fix=f"run `engine devices` to see it again; report it to the vendor of {entry.wheel}",
    )


def _start(
    entry: BackendEntry, ask: Ask | None, files: tuple[IO[bytes], IO[bytes]], timeout: float
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the child, whose answer and errors go to ``files``; returns it and the pipe on which it answers ``ask``."""
    answer_file, error_file = files
    ahead, telling = os.pipe()
    try:
        with tempfile.TemporaryFile() as ask_file:
            ask_file.write(msgspec.json.encode(ask))
            ask_file.seek(0)
            child = subprocess.Popen(
                [sys.executable, "-m", "drivetrain.select.probe", entry.name, str(os.getpid()), str(timeout + GRACE)]
                + [str(answer_file.fileno()), str(telling)],
                pass_fds=(answer_file.fileno(), telling),
                stdin=ask_file,
                stdout=subprocess.DEVNULL,
                stderr=error_file,
                env={**environment(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                start_new_session=True,
            )
    except BaseException as error:
        os.close(ahead)
        if isinstance(error, OSError):
            raise DeviceError(
                f"{entry.prefix}: the process of its probe can't be started: {error.strerror or error}",
                fix="free memory, or raise the limit on processes (ulimit -u), and start again",
            ) from error
        raise
    finally:
        os.close(telling)
    return child, ahead


def _hear(child: subprocess.Popen[bytes], ahead: int, deadline: float) -> dict[str, str] | None:
    """Wait for the line that the child writes ahead of its probe; None when it writes none."""
    line, heard = b"", select.poll()
    heard.register(ahead, select.POLLIN)
    while time.monotonic() < deadline:
        if heard.poll(GLANCE * 1000):
            piece = os.read(ahead, 1 << 16)
            line += piece
            if not piece or piece.endswith(b"\n"):
                break
        elif child.poll() is not None:
            break
    try:
        return msgspec.json.decode(line, type=dict[str, str]) if line else None
    except msgspec.MsgspecError:
        return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child's session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _tell(loaded: LoadedBackend, ask: Ask | None, telling: int) -> None:
    """Write which variables are wanted; nothing where that can't be said: whoever needs them meets the reason."""
    from drivetrain.select.options import resolve_options

    if ask is None:
        return
    with contextlib.suppress(DeviceError, OSError, ValueError):
        options = resolve_options(loaded.info, ask.given)
        wanted = loaded.environment(ask.devices, replace(ask.view, options=options))
        os.write(telling, msgspec.json.encode(wanted) + b"\n")


def _answer(name: str, ask: Ask | None, telling: int) -> Probe:
    from drivetrain.select.load import LoadedBackend

    entry = find_backend(name, list_backends())
    try:
        loaded = LoadedBackend(entry)
    except DeviceError as error:
        return Probe(outcome="import_failed", reason=entry.bare(error.message), fix=error.fix)
    _tell(loaded, ask, telling)
    os.close(telling)
    try:
        found = loaded.probe()
    except DeviceError as error:
        return Probe(outcome="raised", info=loaded.info, reason=entry.bare(error.message), fix=error.fix)
    if isinstance(found, Unavailable):
        return Probe(outcome="unavailable", info=loaded.info, reason=found.reason, fix=found.fix)
    if not found:
        return Probe(
            outcome="unavailable",
            info=loaded.info,
            reason="it found no device",
            fix="check that one is installed",
        )
    return Probe(outcome="usable", info=loaded.info, devices=found)


def _write(name: str, target: int, telling: int) -> None:
    """Answer in one piece. A child that the probe forked and that comes back here has nothing to say."""
    asked = os.getpid()
    ask = msgspec.json.decode(sys.stdin.buffer.read(), type=Ask | None)
    answer = msgspec.json.encode(_answer(name, ask, telling))
    if os.getpid() == asked:
        with open(target, "wb") as file:
            file.write(answer)
        os._exit(0)  # what a driver does at a process's end takes time and tells nothing


def _live_for(parent: int, seconds: float) -> None:
    """End this process, and what it forked, when its parent is gone. Where native code hangs and lets no other thread
    run, an alarm ends the process a little after nobody waits any more."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        os.killpg(0, signal.SIGKILL)  # a session of its own: see where it is started

    threading.Thread(target=look, name="parent", daemon=True).start()


if __name__ == "__main__":
    _live_for(int(sys.argv[2]), float(sys.argv[3]))
    _write(sys.argv[1], int(sys.argv[4]), int(sys.argv[5]))
