"""Loading exactly one backend's entry point and calling its hooks through pluggy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from drivetrain.errors import DeviceError
from drivetrain.select.checks import (
    BadAnswer,
    check_backend,
    check_devices,
    check_environment_answer,
    check_info,
    check_refusal,
    shown,
)
from drivetrain.select.entrypoints import BackendEntry, list_backends
from drivetrain_api.v1.hooks import BackendHooks, BackendInfo, ConfigView, DeviceRecord, Unavailable

if TYPE_CHECKING:
    from drivetrain_api.v1.backend import Backend

T = TypeVar("T")
HOOKS = ("backend_info", "environment", "probe", "create")


class LoadedBackend:
    """One backend's entry point, imported and checked. Its methods call the hooks and check what comes back:
    DeviceError, naming the wheel and the hook, for a hook that raises or returns what the contract does not allow."""

    def __init__(self, entry: BackendEntry) -> None:
        self.entry = entry
        try:
            plugin = entry.point.load()
        except (Exception, SystemExit) as error:
            raise DeviceError(
                f"{entry.prefix}: it does not import: {type(error).__name__}: {error}",
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
        self.info: BackendInfo = self._checked(check_info, self._call("backend_info"))
        self._compare()

    def environment(self, devices: Sequence[int], view: ConfigView) -> dict[str, str]:
        """Return the variables that must be set before torch loads."""
        return self._checked(check_environment_answer, self._call("environment", devices=devices, view=view))

    def probe(self) -> tuple[DeviceRecord, ...] | Unavailable:
        """Return the devices here, or why there are none."""
        return self._checked(check_devices, self._call("probe"))

    def create(self, devices: Sequence[int], view: ConfigView) -> Backend:
        """Open the devices. DeviceError with the backend's own words where it says that it can't."""
        made: Backend | Unavailable = self._call("create", devices=devices, view=view)
        if isinstance(made, Unavailable):
            refusal = self._checked(check_refusal, made)
            raise DeviceError(f"{self.entry.prefix}: {refusal.reason}", fix=refusal.fix)
        self._checked(check_backend, made)
        return made

    def _compare(self) -> None:
        """Refuse a backend that says to be another than the one which the installed wheel announces."""
        from packaging.requirements import Requirement
        from packaging.specifiers import InvalidSpecifier, SpecifierSet
        from packaging.utils import canonicalize_name

        entry, info = self.entry, self.info
        names = [e.name for e in list_backends() if (e.wheel, e.target) == (entry.wheel, entry.target)] or [entry.name]
        if info.name not in names:
            expected = f"the entry point's {' or '.join(names)}"
            raise self._broken(f"backend_info says its name is {shown(info.name)}, expected {expected}")
        own = (info.wheel.split() or [""])[0]  # a version may follow
        if canonicalize_name(own) != canonicalize_name(entry.wheel):
            raise self._broken(f"backend_info says its wheel is {shown(info.wheel)}, expected {entry.wheel}")
        if entry.requirement is None:
            return
        required = Requirement(entry.requirement).specifier
        try:
            same = SpecifierSet(info.api) == required
        except InvalidSpecifier:
            same = False
        if not same:
            raise self._broken(
                f"backend_info says it was built for drivetrain-api {shown(info.api)}, expected {required}, "
                "which its wheel requires"
            )

    def _call(self, name: str, **arguments: Any) -> Any:
        try:
            return getattr(self.hook, name)(**arguments)
        except DeviceError:
            raise
        except (Exception, SystemExit) as error:
            raise self._broken(f"{name} raised {type(error).__name__}: {error}") from error

    def _checked(self, check: Callable[[Any], T], value: Any) -> T:
        """Run a check. It may read the vendor's own properties, so that anything may come out of it."""
        try:
            return check(value)
        except BadAnswer as error:
            raise self._broken(str(error)) from None
        except Exception as error:
            raise self._broken(f"what a hook returned raised {type(error).__name__}: {error}") from error

    def _broken(self, what: str) -> DeviceError:
        return DeviceError(f"{self.entry.prefix}: {what}", fix="report this to the wheel's vendor")
