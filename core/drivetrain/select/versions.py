"""Whether a wheel was built for the contract that is installed. Checked from metadata, before any import of it."""

from __future__ import annotations

from packaging.requirements import Requirement
from packaging.version import Version

import drivetrain_api
from drivetrain.errors import DeviceError
from drivetrain.select.entrypoints import BackendEntry


def check_contract(entry: BackendEntry, installed: str = drivetrain_api.__version__) -> None:
    """Raise DeviceError naming wheel, range and fix when the wheel's range leaves the installed contract out."""
    if entry.requirement is None:
        raise DeviceError(
            f"--device {entry.name}: {entry.title} does not say which drivetrain-api it was built for",
            fix=f"its wheel must require one, such as drivetrain-api>={installed}; ask its vendor for a new build",
        )
    specifier = Requirement(entry.requirement).specifier
    if specifier.contains(installed, prereleases=True):
        return
    built_for_newer = any(
        spec.operator in (">=", ">", "~=", "==") and Version(spec.version.rstrip(".*")) > Version(installed)
        for spec in specifier
    )
    if built_for_newer:
        fix = "upgrade the engine: pip install -U drivetrain drivetrain-api"
    else:
        fix = f"upgrade the backend: pip install -U {entry.wheel}"
    raise DeviceError(
        f"--device {entry.name}: {entry.title} needs drivetrain-api{specifier}, but {installed} is installed",
        fix=fix,
    )
