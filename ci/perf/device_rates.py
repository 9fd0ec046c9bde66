"""What a device does by itself: bytes read and copied a second, and bfloat16 products, with torch and nothing of ours.

    python ci/perf/device_rates.py [--device cuda] [--scale tiny]

Prints one line of JSON, with the machine and the versions. A process of its own, so that no other keeps its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

READ_BYTES, SIDE, ROUNDS, SECONDS = 8 << 30, 8192, 10, 1.5
TINY_BYTES, TINY_SIDE = 64 << 20, 512


def wait(device: torch.device) -> None:
    """Let the device finish."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def seconds_of(work: Callable[[], Any], device: torch.device, rounds: int = ROUNDS) -> float:
    """Median seconds of one call, after two that are not counted."""
    found = []
    for _ in range(rounds + 2):
        wait(device)
        begin = time.perf_counter()
        work()
        wait(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[2:])


def read_rates(device: torch.device, nbytes: int) -> dict[str, float]:
    """Bytes a second of the best reduction over one large buffer, and of a copy (bytes read and written)."""
    words = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    sums = {name: nbytes / seconds_of(getattr(words, name), device) for name in ("sum", "amax")}
    half = words[: len(words) // 2]
    other = torch.empty_like(half)
    copied = 2 * half.numel() * 4 / seconds_of(lambda: other.copy_(half), device)
    return {"read": max(sums.values()), "copy": copied}


def product_rate(device: torch.device, side: int) -> float:
    """Operations a second of a square bfloat16 product, over long enough that the clocks settle."""
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    one = seconds_of(lambda: torch.mm(a, b, out=out), device, 3)
    count = max(3, int(SECONDS / one)) if side == SIDE else 3

    def many() -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    return 2.0 * side**3 * count / seconds_of(many, device, 3)


def card() -> dict[str, str]:
    """Name, driver, memory and power limit of the first NVIDIA card, where there is one."""
    fields = "name,driver_version,memory.total,power.limit,clocks.max.sm"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return {}
    values = [one.strip() for one in done.stdout.split("\n")[0].split(",")]
    return dict(zip(fields.split(","), values, strict=False)) if done.returncode == 0 else {}


def version_of(name: str) -> str:
    """Return a package's version, empty where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def facts(device: torch.device) -> dict[str, Any]:
    """The machine and the versions."""
    names = ("torch", "triton", "numpy", "drivetrain", "drivetrain-api", "drivetrain-triton", "drivetrain-cuda")
    machine: dict[str, Any] = {"device": str(device), "cores": len(os.sched_getaffinity(0)), **card()}
    versions = {name: found for name in names if (found := version_of(name))}
    return {
        "machine": machine,
        "versions": {"python": platform.python_version(), **versions, "cuda": torch.version.cuda or ""},
    }


def commit_of(given: str) -> str:
    """Return the commit as given, or as git says; a machine without git is told it."""
    if given:
        return given
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def about(device: torch.device) -> dict[str, Any]:
    """The machine, the versions, the commit (COMMIT where git can't be asked) and the command of this run."""
    command = " ".join(("python ci/perf/" + Path(sys.argv[0]).name, *(Path(one).name for one in sys.argv[1:])))
    return facts(device) | {"commit": commit_of(os.environ.get("COMMIT", "")), "command": command}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    args = parser.parse_args()
    tiny, name = args.scale == "tiny", args.device.replace("-", ":").split(":")[0]
    device = torch.device("cpu" if name in ("cpu", "mirage") else args.device)
    found = read_rates(device, TINY_BYTES if tiny else READ_BYTES)
    found["products"] = product_rate(device, TINY_SIDE if tiny else SIDE)
    print(json.dumps({"rates": found, **facts(device)}))


if __name__ == "__main__":
    main()
