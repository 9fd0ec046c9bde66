"""From a configuration to a running loop: device first, then model, then memory, then weights.

``resolve_device`` is torch-free and runs once, in the process that the user started; children get its ``Choice``.
"""

from __future__ import annotations

from drivetrain.config import EngineConfig
from drivetrain.select.choose import Choice, choose


def resolve_device(config: EngineConfig) -> Choice:
    """Probe and choose. DeviceError with one message when the device asked for can't be had."""
    return choose(config.device, config.backend_options, config.probe_timeout)
