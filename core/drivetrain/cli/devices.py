"""``engine devices``: every installed backend, its devices and proof, or why it can't be used."""

from __future__ import annotations

import argparse
from typing import Any

from drivetrain.cli.flags import add_json, write_json
from drivetrain.config import check_probe_timeout
from drivetrain.select.choose import Survey, survey
from drivetrain.select.probe import DEFAULT_TIMEOUT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("--probe-timeout", type=float, default=DEFAULT_TIMEOUT, metavar="SECONDS")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print one paragraph a backend; exit status 0 when at least one is usable."""
    check_probe_timeout(arguments.probe_timeout)
    found = survey(arguments.probe_timeout)
    if arguments.json:
        write_json(arguments.json, [_data(one) for one in found])
    else:
        for one in found:
            _show(one)
        if not found:
            print("No backend wheel is installed.\n  to fix: pip install drivetrain-cpu")
    return 0 if any(one.probe.outcome == "usable" for one in found) else 1


def _show(one: Survey) -> None:
    info = one.probe.info
    names = " or ".join((one.entry.name, *one.aliases))
    print(f"--device {names}    {one.entry.title}, contract {one.entry.requirement or 'not stated'}")
    if info is not None:
        print(f"  vendor {info.vendor}; proof: {info.proof}{'; ' + info.notes if info.notes else ''}")
        for option in info.options:
            print(f"  --backend-option {option.key}={option.default} ({option.help})")
    for device in one.probe.devices:
        memory = f", {device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else ""
        where = f", NUMA node {device.numa_node}" if device.numa_node is not None else ""
        print(f"  [{device.index}] {device.name} {device.architecture}{memory}{where} {device.uuid}".rstrip())
    if one.probe.outcome != "usable":
        print(f"  not usable ({one.probe.outcome}): {one.probe.reason}\n    to fix: {one.probe.fix}")


def _data(one: Survey) -> dict[str, Any]:
    info = one.probe.info
    return {
        "names": [one.entry.name, *one.aliases],
        "wheel": one.entry.wheel,
        "version": one.entry.version,
        "contract": one.entry.requirement,
        "vendor": info.vendor if info else None,
        "proof": info.proof if info else None,
        "options": [
            {"key": o.key, "kind": o.kind, "default": o.default, "help": o.help} for o in (info.options if info else ())
        ],
        "outcome": one.probe.outcome,
        "reason": one.probe.reason,
        "fix": one.probe.fix,
        "devices": [
            {name: getattr(d, name) for name in ("index", "name", "uuid", "memory_bytes", "architecture", "numa_node")}
            for d in one.probe.devices
        ],
    }
