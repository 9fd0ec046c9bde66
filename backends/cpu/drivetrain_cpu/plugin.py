"""The four hooks. Nothing here imports torch before ``create``."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence

from drivetrain_api.v1 import (
    Backend,
    BackendInfo,
    ConfigView,
    DeviceRecord,
    OptionSpec,
    Unavailable,
    hookimpl,
)

from . import __version__

OPTIONS = (
    OptionSpec(
        key="num_threads",
        kind="int",
        help="threads of a step; 0 takes the cores that affinity and the control group leave to this process",
        default=0,
    ),
    OptionSpec(
        key="linear",
        kind="str",
        help="kernel of linear layers; auto takes the fastest that runs here",
        default="auto",
        choices=("auto", "onednn", "native", "half", "plain"),
    ),
)


class CpuPlugin:
    """This wheel's entry point."""

    @hookimpl
    def backend_info(self) -> BackendInfo:
        """Say who this is."""
        return BackendInfo(
            name="cpu",
            vendor="Drivetrain",
            wheel=f"drivetrain-cpu {__version__}",
            api=">=0.1,<0.2",
            torch_device_type="cpu",
            options=OPTIONS,
            proof="measured",
        )

    @hookimpl
    def environment(self, devices: Sequence[int], view: ConfigView) -> Mapping[str, str]:
        """Threads that wait sleep: spinning ones take the core that another thread or process needs.

        A preference, not a need: where the user has set one of these, theirs stands.
        """
        wanted = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
        return {name: value for name, value in wanted.items() if name not in os.environ}

    @hookimpl
    def probe(self) -> Sequence[DeviceRecord] | Unavailable:
        """The host is always there."""
        return (
            DeviceRecord(index=0, name=processor_name(), memory_bytes=host_bytes(), architecture=platform.machine()),
        )

    @hookimpl
    def create(self, devices: Sequence[int], view: ConfigView) -> Backend:
        """Open the host."""
        from .backend import open_backend

        return open_backend(view)


def processor_name() -> str:
    """Return what the system calls the processor, or its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith(("model name", "Hardware", "Model")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def host_bytes() -> int | None:
    """Return the host's memory in bytes, where the system says."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


plugin = CpuPlugin()
