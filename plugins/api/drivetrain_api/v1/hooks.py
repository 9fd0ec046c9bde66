"""The four hooks of a backend wheel, and the values they exchange.

Nothing here, and nothing a hook does before ``create``, may import torch.
Order of calls in the process that runs the engine: ``backend_info`` -> ``environment`` -> (torch loads) ->
``create``. ``probe`` runs in a short spawned child with a time limit, never in the engine's own process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import pluggy

if TYPE_CHECKING:
    from .backend import Backend

ENTRY_POINT_GROUP = "drivetrain.backends"
PLUGIN_GROUP = "drivetrain.plugins"

hookspec = pluggy.HookspecMarker("drivetrain")
hookimpl = pluggy.HookimplMarker("drivetrain")

ProofRung = Literal["none", "reference", "emulated", "compiled", "conformed", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """One ``--backend-option key=value`` that a backend understands."""

    key: str
    kind: Literal["str", "int", "float", "bool"]
    help: str
    default: str | int | float | bool | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """Who a backend is, known without torch and without touching a device.

    ``torch_device_type`` is what ``torch.device(...).type`` says for its tensors.
    ``api`` is the range of contract versions it was built for, as in its wheel's requirement.
    ``emulated``: its devices are made of software, for tests; ``--device auto`` never takes them.
    """

    name: str
    vendor: str
    wheel: str
    api: str
    torch_device_type: str
    options: tuple[OptionSpec, ...] = ()
    proof: ProofRung = "none"
    notes: str = ""
    emulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """One device as the vendor's own tool shows it. ``memory_bytes`` is the total; None means unknown."""

    index: int
    name: str
    uuid: str = ""
    partition: str = ""
    numa_node: int | None = None
    memory_bytes: int | None = None
    architecture: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """Why a backend can't run here, and what the user can do about it. Both are shown as they are."""

    reason: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigView:
    """The read-only part of the configuration that a backend may see.

    ``options`` are already checked and typed against ``BackendInfo.options``, defaults filled in.
    """

    dtype: str = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 0
    deterministic: bool = False
    num_threads: int | None = None
    options: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


class BackendHooks:
    """Hook specifications. A wheel's entry point is an object (or module) with these four, marked ``hookimpl``."""

    @hookspec(firstresult=True)
    def backend_info(self) -> BackendInfo:
        """Return who this backend is. Torch-free, instant, no device touched."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def environment(self, devices: Sequence[int], view: ConfigView) -> Mapping[str, str]:
        """Return variables that must be set before torch loads. A clash with the user's own value is an error."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def probe(self) -> Sequence[DeviceRecord] | Unavailable:
        """Return the devices here, or why there are none. Runs in a spawned child with a time limit."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def create(self, devices: Sequence[int], view: ConfigView) -> Backend | Unavailable:
        """Open the devices and return the backend, or why what is installed here can't. The first hook that may import
        torch."""
        raise NotImplementedError
