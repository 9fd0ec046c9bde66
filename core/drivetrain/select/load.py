"""Loading exactly one backend's entry point and calling its hooks through pluggy."""

from __future__ import annotations

from typing import Any

import pluggy

from drivetrain.errors import DeviceError
from drivetrain.select.entrypoints import BackendEntry
from drivetrain_api.v1.hooks import BackendHooks, BackendInfo

HOOKS = ("backend_info", "environment", "probe", "create")


class LoadedBackend:
    """One backend's entry point, imported and checked; ``hook`` calls it."""

    def __init__(self, entry: BackendEntry) -> None:
        self.entry = entry
        try:
            plugin = entry.point.load()
        except Exception as error:
            raise DeviceError(
                f"--device {entry.name}: {entry.title} does not import: {type(error).__name__}: {error}",
                fix=f"repair or reinstall it: pip install --force-reinstall {entry.wheel}",
            ) from error
        manager = pluggy.PluginManager("drivetrain")
        manager.add_hookspecs(BackendHooks)
        try:
            manager.register(plugin, entry.name)
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise self._broken(f"its hooks do not match the contract: {error}") from error
        missing = [name for name in HOOKS if not getattr(manager.hook, name).get_hookimpls()]
        if missing:
            raise self._broken(f"it implements no {', '.join(missing)} (marked with hookimpl)")
        self.hook: Any = manager.hook
        info = self.call("backend_info")
        if not isinstance(info, BackendInfo):
            raise self._broken(f"backend_info returned {type(info).__name__}, not BackendInfo")
        self.info: BackendInfo = info

    def call(self, name: str, **arguments: Any) -> Any:
        """Call one hook. DeviceError naming the wheel when it raises."""
        try:
            return getattr(self.hook, name)(**arguments)
        except DeviceError:
            raise
        except Exception as error:
            raise self._broken(f"{name} raised {type(error).__name__}: {error}") from error

    def _broken(self, what: str) -> DeviceError:
        return DeviceError(
            f"--device {self.entry.name}: {self.entry.title}: {what}", fix="report this to the wheel's vendor"
        )
