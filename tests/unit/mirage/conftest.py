"""A mirage device for each test, closed afterwards. No random pauses unless a test asks for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from drivetrain_api.v1 import Backend, ConfigView
from drivetrain_mirage.device import DeviceOptions, MirageDevice
from drivetrain_mirage.plugin import plugin, static_plugin
from drivetrain_mirage.runtime import MirageRuntime
from drivetrain_mirage.streams import Pace


@pytest.fixture
def runtime() -> Iterator[MirageRuntime]:
    made = MirageRuntime(MirageDevice(DeviceOptions(memory=64 << 20, pace=Pace(share=0.0))))
    yield made
    made.owner.close()


@pytest.fixture
def open_backend() -> Iterator[Callable[..., Backend]]:
    """``open_backend(static=False, **view)``; option keys go to ``options={...}``."""
    opened: list[Backend] = []

    def make(*, static: bool = False, **fields) -> Backend:
        options = {"delay": 0.0, **fields.pop("options", {})}
        backend = (static_plugin if static else plugin).create((0,), ConfigView(options=options, **fields))
        opened.append(backend)
        return backend

    yield make
    for backend in opened:
        backend.close()


@pytest.fixture
def stall(runtime: MirageRuntime) -> Callable[[float], None]:
    """Make the current stream busy for some seconds, so that what is queued after it is surely pending."""

    def busy(seconds: float = 0.2) -> None:
        runtime.owner.current.call(time.sleep, seconds)

    return busy
