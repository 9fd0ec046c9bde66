"""The host's memory as its kernel counts it: of the machine or its control group, and of this process."""

from __future__ import annotations


def host_memory() -> tuple[int, int]:
    """Return (available, total) bytes of host memory, within the control group's limit where there is one."""
    fields: dict[str, int] = {}
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
    available, total = fields["MemAvailable"], fields["MemTotal"]
    limit, used = _group_value("memory.max"), _group_value("memory.current")
    if limit is not None and used is not None and limit < total:
        available, total = min(available, max(0, limit - used)), limit
    return available, total


def _group_value(name: str) -> int | None:
    try:
        with open(f"/sys/fs/cgroup/{name}", encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _status_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def resident_bytes() -> int:
    """Return this process's resident bytes."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the highest resident bytes since the process began or the peak was reset."""
    return _status_bytes("VmHWM")


def reset_peak_resident() -> None:
    """Begin a new measurement of the peak. OSError where the kernel does not allow it."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def trim_host_heap() -> None:
    """Ask the C library to return free heap pages to the system; nothing where it has no such call."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
