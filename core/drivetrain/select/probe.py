"""Asking a backend for its devices in a short child process, so that a hang or a crash there harms nothing here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, Literal

import msgspec

from drivetrain.config import environment
from drivetrain.select.entrypoints import BackendEntry, find_backend, list_backends
from drivetrain_api.v1.hooks import BackendInfo, DeviceRecord, Unavailable

Outcome = Literal["usable", "unavailable", "import_failed", "raised", "hung", "crashed"]
DEFAULT_TIMEOUT = 30.0
MAX_ERRORS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What came of a probe. ``reason`` and ``fix`` say why there are no devices; empty when usable."""

    outcome: Outcome
    info: BackendInfo | None = None
    devices: tuple[DeviceRecord, ...] = ()
    reason: str = ""
    fix: str = ""


def probe(entry: BackendEntry, timeout: float = DEFAULT_TIMEOUT) -> Probe:
    """Run one backend's probe in a spawned child of at most ``timeout`` seconds.

    Only the child's own end is waited for: what it leaves behind may hold its files open, and is killed with it.
    """
    with tempfile.TemporaryFile() as answer_file, tempfile.TemporaryFile() as error_file:
        child = subprocess.Popen(
            [sys.executable, "-m", "drivetrain.select.probe", entry.name, str(answer_file.fileno())],
            pass_fds=(answer_file.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=error_file,
            env={**environment(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            start_new_session=True,
        )
        try:
            status: int | None = child.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
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


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child's session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _answer(name: str) -> Probe:
    from drivetrain.errors import DeviceError
    from drivetrain.select.load import LoadedBackend

    entry = find_backend(name, list_backends())
    try:
        loaded = LoadedBackend(entry)
    except DeviceError as error:
        return Probe(outcome="import_failed", reason=entry.bare(error.message), fix=error.fix)
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


def _write(name: str, target: int) -> None:
    """Answer in one piece. A child that the probe forked and that comes back here has nothing to say."""
    asked = os.getpid()
    answer = msgspec.json.encode(_answer(name))
    if os.getpid() == asked:
        with open(target, "wb") as file:
            file.write(answer)


if __name__ == "__main__":
    _write(sys.argv[1], int(sys.argv[2]))
