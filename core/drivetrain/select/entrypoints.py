"""Backends as installed wheels announce them. Listing imports nothing of theirs."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, entry_points

from drivetrain.errors import DeviceError
from drivetrain_api.v1.hooks import ENTRY_POINT_GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendEntry:
    """One name that ``--device`` takes. ``requirement``: the wheel's own requirement on the contract, as written."""

    name: str
    wheel: str
    version: str
    target: str
    requirement: str | None
    point: EntryPoint

    @property
    def title(self) -> str:
        """The wheel as messages name it."""
        return f"{self.wheel} {self.version}"

    @property
    def prefix(self) -> str:
        """How a message about this backend begins."""
        return f"--device {self.name} ({self.title})"

    def bare(self, message: str) -> str:
        """Return a message about this backend without its beginning, to be put after another one."""
        return message.removeprefix(f"{self.prefix}: ").removeprefix(f"--device {self.name}: ")


def list_backends() -> tuple[BackendEntry, ...]:
    """Return every installed backend entry, sorted by name then wheel; a wheel seen twice on the path counts once."""
    found: dict[tuple[str, str, str], BackendEntry] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        dist = point.dist
        wheel = dist.metadata["Name"] if dist is not None else "(no wheel)"
        entry = BackendEntry(
            name=point.name,
            wheel=wheel,
            version=dist.version if dist is not None else "?",
            target=point.value,
            requirement=_contract_requirement(dist),
            point=point,
        )
        found.setdefault((point.name, wheel, point.value), entry)
    return tuple(sorted(found.values(), key=lambda e: (e.name, e.wheel)))


def find_backend(name: str, entries: tuple[BackendEntry, ...]) -> BackendEntry:
    """Return the one entry of that name. DeviceError when there is none, or when two wheels claim it."""
    named = [entry for entry in entries if entry.name == name]
    if not named:
        known = sorted({entry.name for entry in entries})
        near = [other for other in known if other.lower() == name.lower()]
        near = near or difflib.get_close_matches(name.lower(), known, 1)
        have = f"installed backends: {', '.join(known)}" if known else "no backend wheel is installed"
        hint = f"did you mean --device {near[0]}?" if near else f"pip install drivetrain-{name.lower()}"
        raise DeviceError(f"--device {name}: no installed wheel provides it ({have})", fix=hint)
    if len(named) > 1:
        wheels = " and ".join(entry.title for entry in named)
        raise DeviceError(
            f"--device {name}: {len(named)} wheels claim that name: {wheels}",
            fix=f"pip uninstall one of them, for example: pip uninstall {named[-1].wheel}",
        )
    return named[0]


def _contract_requirement(dist: Distribution | None) -> str | None:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for text in (dist.requires or []) if dist is not None else []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) == "drivetrain-api":
            return text
    return None
