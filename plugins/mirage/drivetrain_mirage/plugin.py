"""The entry points ``mirage`` and ``mirage-static``. Nothing here imports torch before ``create``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drivetrain_api.v1 import Backend, BackendInfo, ConfigView, DeviceRecord, OptionSpec, Unavailable, hookimpl

OPTIONS = (
    OptionSpec(key="memory", kind="int", help="bytes of device memory", default=2 << 30),
    OptionSpec(
        key="delay", kind="float", help="share of all queued work that begins with a pause of 0.2 to 2 ms", default=0.01
    ),
    OptionSpec(key="seed", kind="int", help="seed of the pauses", default=0),
    OptionSpec(
        key="native", kind="bool", help="provide linears, attention and RMS norms as kernels of its own", default=False
    ),
    OptionSpec(
        key="poison_freed", kind="bool", help="fill freed cache blocks with garbage when told of them", default=True
    ),
)
STATIC_OPTIONS = (
    *OPTIONS,
    OptionSpec(
        key="strict_shapes", kind="bool", help="refuse torch ops with new shapes after ready, too", default=True
    ),
)


class MiragePlugin:
    """One profile's hooks."""

    def __init__(self, *, static: bool) -> None:
        self._static = static

    @hookimpl
    def backend_info(self) -> BackendInfo:
        return BackendInfo(
            name="mirage-static" if self._static else "mirage",
            vendor="drivetrain",
            wheel="drivetrain-mirage",
            api=">=0.1,<0.2",
            torch_device_type="mirage",
            options=STATIC_OPTIONS if self._static else OPTIONS,
            proof="emulated",
            notes="an invented accelerator that checks the engine's manners; host memory behind it, never fast",
            emulated=True,
        )

    @hookimpl
    def environment(self, devices: Sequence[int], view: ConfigView) -> Mapping[str, str]:
        return {}

    @hookimpl
    def probe(self) -> Sequence[DeviceRecord] | Unavailable:
        name = "Mirage (static shapes)" if self._static else "Mirage"
        return (DeviceRecord(index=0, name=name, uuid="mirage-0", architecture="invented"),)

    @hookimpl
    def create(self, devices: Sequence[int], view: ConfigView) -> Backend:
        from .backend import open_backend

        return open_backend(devices, view, static=self._static)


plugin = MiragePlugin(static=False)
static_plugin = MiragePlugin(static=True)
