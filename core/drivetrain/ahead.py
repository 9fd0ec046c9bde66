"""Loading what takes long to load while the device that will be used is still being probed.

The variables that a backend wants must be set before torch loads; the probe's child tells them before it probes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

from drivetrain.config import EngineConfig, set_environment, unset_environment
from drivetrain.errors import DeviceError
from drivetrain.launch import resolve_device, view_of
from drivetrain.select.choose import FIRST, Choice, parse_device, prepare_environment
from drivetrain.select.environment import check_environment
from drivetrain_api.v1.hooks import ConfigView

if TYPE_CHECKING:
    from drivetrain.server.child import Begun, LoopSpec

MODULES = ("torch", "drivetrain.starting")
EARLY = (  # of what these load, the part that is not torch and minds no variables
    "numpy",
    "drivetrain.loop",
    "drivetrain.sched.scheduler",
    "drivetrain.cache.manager",
    "drivetrain.dist.executors",
    "drivetrain.models.families",
    "drivetrain.models.weights.checkpoint",
    "drivetrain.runner.batch",
    "drivetrain.runner.reserve",
    "drivetrain.runner.results",
    "asyncio",
    "unittest.mock",
)


def load(modules: Sequence[str] = MODULES, name: str = "load ahead") -> Thread:
    """Import modules in a thread. One that fails is left to whoever imports it next, who meets the reason."""

    def imports() -> None:
        for module in modules:
            with suppress(Exception):
                importlib.import_module(module)

    thread = Thread(target=imports, name=name)
    thread.start()
    return thread


class LoadAhead:
    """Modules that load in this process from the moment that the variables are told. Does nothing where torch is there
    already, or where a variable has another value: that is an error later, with its own message."""

    def __init__(self, device: str) -> None:
        self.told_for = parse_device(device)[1] or FIRST
        self._thread: Thread | None = None
        self._set: dict[str, str] = {}

    def begin(self, wanted: Mapping[str, str]) -> None:
        """Set the variables and begin to load."""
        if "torch" in sys.modules:
            return
        try:
            self._set = check_environment(wanted, "")
        except DeviceError:
            return
        set_environment(self._set)
        self._thread = load()

    def settle(self, choice: Choice, view: ConfigView) -> None:
        """Where a device was picked that the variables were not told for: take back those which it does not want, so
        that its own are set as ever, with the warning that torch is loaded."""
        if self._thread is None or choice.devices == self.told_for or not self._set:
            return
        self._thread.join()
        unset_environment(self._set)
        if prepare_environment(choice, view, apply=False) == self._set:
            set_environment(self._set)


def resolve_and_begin(config: EngineConfig) -> LoopSpec:
    """``resolve_device``, and what the loop's process is to be told. Of a device that is named the process starts, and
    loads torch, while that is probed. It is the caller's to ``drop`` where no loop is started."""
    begun: list[Begun] = []

    def told(wanted: Mapping[str, str]) -> None:
        from drivetrain.server.child import Begun, whole_environment

        with suppress(DeviceError):  # a clash: told by whoever meets it again
            begun.append(Begun(whole_environment(check_environment(wanted, ""))))

    try:
        choice = resolve_device(config, told)
        from drivetrain.server.child import LoopSpec
    except BaseException:
        for one in begun:
            one.drop()
        raise
    return LoopSpec(config=config, choice=choice, begun=begun[0] if begun else None)


def resolve_and_load(config: EngineConfig) -> Choice:
    """``resolve_device`` in the process that will run the loop: torch and what needs it load while a device that is
    named is probed. What may load before the variables are told does so while the probe's child starts."""
    ahead = LoadAhead(config.device)
    if "torch" not in sys.modules:
        load(EARLY, "load early")
    choice = resolve_device(config, ahead.begin)
    ahead.settle(choice, view_of(config, choice))
    return choice
