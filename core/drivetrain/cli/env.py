"""``engine env``: what a report of a fault needs. Reads versions from metadata; nothing is imported for it."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
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
PREFIXES = ("OMP_", "KMP_", "GOMP_", "TORCH_", "PYTORCH_", "DRIVETRAIN_", "HF_")
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


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

    backends, packages = list_backends(), packages_of_note()
    prefixes = (*PREFIXES, *(f"{name.upper().replace('-', '_')}_" for name in (*(e.name for e in backends), *packages)))
    return {
        "versions": {"python": sys.version.split()[0], **{name: version_of(name) for name in packages}},
        "backends": {e.name: f"{e.title} (contract {e.requirement or 'not stated'})" for e in backends},
        "machine": {
            "system": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory GiB": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "environment": {
            name: value
            for name, value in sorted(environment().items())
            if name.startswith(prefixes) and not any(word in name for word in SECRETS)
        },
    }


def packages_of_note() -> list[str]:
    """Return the core's packages, then the wheels of this project and what these ask for."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    names = list(PACKAGES)
    for wheel in sorted(distributions(), key=lambda one: canonicalize_name(one.name or "")):
        name = canonicalize_name(wheel.name or "")
        if name.startswith("drivetrain-"):
            names += [name, *(canonicalize_name(Requirement(text).name) for text in wheel.requires or ())]
    return list(dict.fromkeys(names))


def version_of(name: str) -> str:
    """Return the version of an installed package, or that there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
