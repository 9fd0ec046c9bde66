"""``engine env``: what a report of a fault needs. Reads versions from metadata; nothing is imported for it."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from drivetrain.cli.flags import add_json, write_json
from drivetrain.config import environment
from drivetrain.select.entrypoints import list_backends

PACKAGES = (
    "drivetrain",
    "drivetrain-api",
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "gguf",
    "pyzmq",
)
PREFIXES = ("OMP_", "KMP_", "GOMP_", "TORCH_", "DRIVETRAIN_", "HF_")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print versions, backends, cores, memory and the variables that change behaviour (no secrets)."""
    data = collect()
    if arguments.json:
        write_json(arguments.json, data)
        return 0
    for section, values in data.items():
        print(f"{section}:")
        for name, value in values.items():
            print(f"  {name}: {value}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Gather everything, as plain data."""
    import psutil

    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {
        "versions": {"python": sys.version.split()[0], **found},
        "backends": {e.name: f"{e.title} (contract {e.requirement or 'not stated'})" for e in list_backends()},
        "machine": {
            "system": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory GiB": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "environment": {
            name: value
            for name, value in sorted(environment().items())
            if name.startswith(PREFIXES) and "TOKEN" not in name and "KEY" not in name
        },
    }
