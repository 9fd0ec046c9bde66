"""``--device NAME[:ids]`` and ``--device auto``: from what was asked to one backend, or one clear error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drivetrain.errors import DeviceError
from drivetrain.select.entrypoints import BackendEntry, find_backend, list_backends
from drivetrain.select.environment import apply_environment, check_environment
from drivetrain.select.load import LoadedBackend
from drivetrain.select.options import Value, resolve_options
from drivetrain.select.probe import DEFAULT_TIMEOUT, Ask, Probe, Told, probe
from drivetrain.select.versions import check_contract
from drivetrain_api.v1.hooks import BackendInfo, ConfigView, DeviceRecord

if TYPE_CHECKING:
    from drivetrain_api.v1.backend import Backend

HOST = "cpu"
FIRST = (0,)  # the device that is most likely picked where none is named


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The resolved device: what child processes get, so that nothing is probed twice."""

    name: str
    wheel: str
    version: str
    info: BackendInfo
    devices: tuple[int, ...]
    records: tuple[DeviceRecord, ...]
    options: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """One installed backend and what came of asking it; ``engine devices`` prints these."""

    entry: BackendEntry
    probe: Probe
    aliases: tuple[str, ...] = ()


def choose(
    device: str,
    options: Mapping[str, str],
    timeout: float = DEFAULT_TIMEOUT,
    *,
    view: ConfigView | None = None,
    told: Told | None = None,
) -> Choice:
    """Resolve ``--device``. DeviceError, never a fallback, when what was asked for can't be had.

    ``told``: of a device that is named it gets, while that is still being probed, the variables which the backend wants
    of a process that runs ``view``, most likely. Not called where they can't be known.
    """
    name, ids = parse_device(device)
    if name == "auto":
        entry, result = _auto(survey(timeout))
    else:
        entry = find_backend(name, list_backends())
        check_contract(entry)
        ask = None if view is None else Ask(view=view, devices=ids or FIRST, given=dict(options))
        result = probe(entry, timeout, ask, told)
        if result.outcome != "usable":
            raise DeviceError(f"{entry.prefix}: {result.reason}", fix=result.fix)
    assert result.info is not None
    return Choice(
        name=entry.name,
        wheel=entry.wheel,
        version=entry.version,
        info=result.info,
        devices=_pick(entry.name, ids, result.devices),
        records=result.devices,
        options=resolve_options(result.info, options),
    )


def parse_device(text: str) -> tuple[str, tuple[int, ...] | None]:
    """Split ``NAME[:ids]``; ids are numbers joined by commas. DeviceError when they are not."""
    name, colon, rest = text.partition(":")
    if not name:
        raise DeviceError("--device is empty", fix="give a name such as cpu; `engine devices` lists them")
    if not colon:
        return name, None
    try:
        ids = tuple(int(part) for part in rest.split(","))
    except ValueError:
        raise DeviceError(f"--device {text}: {rest!r} is not a list of numbers", fix=f"such as {name}:0,1") from None
    if len(set(ids)) != len(ids):
        raise DeviceError(f"--device {text} names a device twice", fix=f"such as {name}:0,1")
    return name, ids


def survey(timeout: float = DEFAULT_TIMEOUT) -> tuple[Survey, ...]:
    """Ask every installed backend once; entries of one wheel with one target are one backend with aliases."""
    grouped: dict[tuple[str, str], list[BackendEntry]] = {}
    for entry in list_backends():
        grouped.setdefault((entry.wheel, entry.target), []).append(entry)
    return tuple(
        Survey(entry=first, probe=_ask(first, timeout), aliases=tuple(other.name for other in rest))
        for first, *rest in grouped.values()
    )


def _ask(entry: BackendEntry, timeout: float) -> Probe:
    try:
        find_backend(entry.name, list_backends())
        check_contract(entry)
    except DeviceError as error:
        return Probe(outcome="unavailable", reason=entry.bare(error.message), fix=error.fix)
    return probe(entry, timeout)


def _auto(found: tuple[Survey, ...]) -> tuple[BackendEntry, Probe]:
    """The one usable accelerator, else the host. An emulated device is taken only by its name."""
    emulated = [one for one in found if one.probe.info is not None and one.probe.info.emulated]
    accelerators = [one for one in found if one.entry.name != HOST and one not in emulated]
    usable = [one for one in accelerators if one.probe.outcome == "usable"]
    if len(usable) == 1:
        return usable[0].entry, usable[0].probe
    if usable:
        names = ", ".join(f"{one.entry.name} ({one.entry.title})" for one in usable)
        raise DeviceError(
            f"--device auto: {len(usable)} accelerators are usable: {names}",
            fix=f"choose one, for example --device {usable[0].entry.name}",
        )
    if accelerators:
        why = "; ".join(f"{one.entry.name} ({one.entry.title}): {one.probe.reason}" for one in accelerators)
        raise DeviceError(
            f"--device auto: an accelerator's wheel is installed but unusable: {why}",
            fix=accelerators[0].probe.fix + ", or ask for --device cpu",
        )
    host = [one for one in found if one.entry.name == HOST]
    if not host and emulated:
        names = ", ".join(one.entry.name for one in emulated)
        raise DeviceError(
            f"--device auto: only emulated devices are installed: {names}",
            fix=f"pip install drivetrain-cpu, or choose one by name, for example --device {emulated[0].entry.name}",
        )
    if not host:
        raise DeviceError("--device auto: no backend wheel is installed", fix="pip install drivetrain-cpu")
    if host[0].probe.outcome != "usable":
        raise DeviceError(f"--device auto: cpu: {host[0].probe.reason}", fix=host[0].probe.fix)
    return host[0].entry, host[0].probe


def _pick(name: str, ids: tuple[int, ...] | None, records: tuple[DeviceRecord, ...]) -> tuple[int, ...]:
    have = [record.index for record in records]
    if ids is None:
        return (have[0],)
    for index in ids:
        if index not in have:
            raise DeviceError(
                f"--device {name}:{index}: there is no device {index}",
                fix=f"devices of {name}: {', '.join(map(str, have))}",
            )
    return ids


def prepare_environment(choice: Choice, view: ConfigView, *, apply: bool) -> dict[str, str]:
    """Return the variables the choice needs and, with ``apply``, set them here. DeviceError on a clash."""
    loaded = LoadedBackend(find_backend(choice.name, list_backends()))
    wanted = loaded.environment(choice.devices, view)
    if apply:
        apply_environment(wanted, f"{choice.wheel} {choice.version}")
        return wanted
    return check_environment(wanted, f"{choice.wheel} {choice.version}")


def open_backend(choice: Choice, view: ConfigView) -> Backend:
    """Set the environment, then open the devices. The first call here that may load torch."""
    loaded = LoadedBackend(find_backend(choice.name, list_backends()))
    wanted = loaded.environment(choice.devices, view)
    apply_environment(wanted, f"{choice.wheel} {choice.version}")
    return loaded.create(choice.devices, view)
