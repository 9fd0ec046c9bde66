"""Variables that a backend needs before torch loads. The user's own value is never overwritten."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping

from drivetrain.config import environment, set_environment, was_given
from drivetrain.errors import DeviceError


def check_environment(
    wanted: Mapping[str, str], wheel: str, current: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return what is still to be set. DeviceError naming both values where another one is set: by the user, or earlier
    for a backend, whose answer then was another."""
    present = environment() if current is None else current
    for name, value in wanted.items():
        if name not in present or present[name] == value:
            continue
        if was_given(name):
            raise DeviceError(
                f"{wheel} asks for {name}={value}, but {name}={present[name]} was set as a backend asked before",
                fix="report it to the wheel's vendor: environment() must answer the same for the same devices; "
                "other devices need a process of their own",
            )
        raise DeviceError(
            f"{wheel} needs {name}={value}, but the environment sets {name}={present[name]}",
            fix=f"unset {name} or set it to {value}",
        )
    return {name: value for name, value in wanted.items() if name not in present}


def apply_environment(wanted: Mapping[str, str], wheel: str) -> None:
    """Set what a backend needs in this process; warn where torch is loaded already and may have read the old state."""
    missing = check_environment(wanted, wheel)
    if missing and "torch" in sys.modules:
        names = ", ".join(f"{name}={value}" for name, value in missing.items())
        warnings.warn(
            f"{wheel} wants {names} set before torch loads, but torch is loaded already in this process",
            stacklevel=2,
        )
    set_environment(missing)
