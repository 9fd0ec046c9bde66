"""A backend for a device that torch knows: storage, memory and runtime are composed, every op is the reference."""

from collections.abc import Mapping, Sequence

from drivetrain_api.v1 import (
    Backend,
    BackendInfo,
    Capabilities,
    ComposedBackend,
    ConfigView,
    DeviceRecord,
    generic_profiler,
    hookimpl,
    torch_runtime,
    torch_storage,
)

TORCH_DEVICE = "cpu"  # what torch calls our device


class Acme:
    @hookimpl
    def backend_info(self) -> BackendInfo:
        return BackendInfo(
            name="acme",
            vendor="Acme",
            wheel="drivetrain-acme",
            api=">=0.1,<0.2",
            torch_device_type=TORCH_DEVICE,
        )

    @hookimpl
    def environment(self, devices: Sequence[int], view: ConfigView) -> Mapping[str, str]:
        return {}

    @hookimpl
    def probe(self) -> list[DeviceRecord]:
        return [DeviceRecord(index=0, name="Acme One")]

    @hookimpl
    def create(self, devices: Sequence[int], view: ConfigView) -> Backend:
        runtime = torch_runtime(TORCH_DEVICE)
        return ComposedBackend(
            capabilities=Capabilities(model_dtypes=("float32", "bfloat16"), cache_dtypes=("float32", "bfloat16")),
            device=runtime,
            storage=torch_storage(runtime),
            memory=generic_profiler(runtime),
        )


plugin = Acme()
