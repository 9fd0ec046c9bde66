"""How many threads this process may use. No torch."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the cores that the scheduler and the control group's quota leave to this process, at least one."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
    quota = quota_cores()
    return max(1, cores if quota is None else min(cores, int(quota)))


def quota_cores(root: Path = CGROUP) -> float | None:
    """Return the control group's limit in cores (version 2, else version 1), or None where there is none."""
    try:
        limit, period = (root / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            limit = (root / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    if not limit.isdigit():  # "max", or -1
        return None
    return int(limit) / int(period)
