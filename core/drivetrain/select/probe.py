"""Asking a backend for its devices in a short child process, so that a hang or a crash there harms nothing here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from drivetrain.config import environment
from drivetrain.select.entrypoints import BackendEntry, find_backend, list_backends
from drivetrain_api.v1.hooks import BackendInfo, DeviceRecord, Unavailable

Outcome = Literal["usable", "unavailable", "import_failed", "raised", "hung", "crashed"]
DEFAULT_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What came of a probe. ``reason`` and ``fix`` say why there are no devices; empty when usable."""

    outcome: Outcome
    info: BackendInfo | None = None
    devices: tuple[DeviceRecord, ...] = ()
    reason: str = ""
    fix: str = ""


def probe(entry: BackendEntry, timeout: float = DEFAULT_TIMEOUT) -> Probe:
    """Run one backend's probe in a spawned child of at most ``timeout`` seconds."""
    read_end, write_end = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "drivetrain.select.probe", entry.name, str(write_end)],
            pass_fds=(write_end,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**environment(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )
    finally:
        os.close(write_end)
    with open(read_end, "rb") as pipe:
        try:
            _, errors = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            return Probe(
                outcome="hung",
                reason=f"its probe gave no answer within {timeout:g} s",
                fix="check the driver, or give it longer with --probe-timeout SECONDS",
            )
        answer = pipe.read()
    if child.returncode != 0 or not answer:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
        return Probe(
            outcome="crashed",
            reason=f"its probe process ended with {how}{': ' + last[0] if last else ''}",
            fix=f"run `engine devices` to see it again; report it to the vendor of {entry.wheel}",
        )
    return msgspec.json.decode(answer, type=Probe)


def _answer(name: str) -> Probe:
    from drivetrain.errors import DeviceError
    from drivetrain.select.load import LoadedBackend

    entry = find_backend(name, list_backends())
    try:
        loaded = LoadedBackend(entry)
    except DeviceError as error:
        return Probe(outcome="import_failed", reason=error.message, fix=error.fix)
    try:
        found: Any = loaded.call("probe")
    except DeviceError as error:
        return Probe(outcome="raised", info=loaded.info, reason=error.message, fix=error.fix)
    if isinstance(found, Unavailable):
        return Probe(outcome="unavailable", info=loaded.info, reason=found.reason, fix=found.fix)
    devices = tuple(found or ())
    if not devices:
        return Probe(
            outcome="unavailable",
            info=loaded.info,
            reason="it found no device",
            fix="check that one is installed",
        )
    return Probe(outcome="usable", info=loaded.info, devices=devices)


if __name__ == "__main__":
    with open(int(sys.argv[2]), "wb") as answer_pipe:
        answer_pipe.write(msgspec.json.encode(_answer(sys.argv[1])))
