"""What a backend is: capabilities, a device, storage, and implementations on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .device import DeviceRuntime, MemoryProfiler
from .graphs import Graphs
from .ops import Decline, Fused, OpSpec, Provided
from .provisional import Collectives, Transfer
from .shapes import ShapePolicy
from .storage import Storage

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the engine may count on. Every default is the conservative answer.

    ``model_dtypes``: the first is taken for ``--dtype auto`` when a checkpoint's own is not in the list.
    ``default_depth``: steps in flight; 1 for a device whose calls finish before they return.
    ``activation_dtypes``: by model dtype, the dtype that activations have between ops where it is not the model's own:
    a host whose products are summed in float32 anyway loses time and digits by rounding each of them.
    ``max_batch_tokens``: upper limit of query tokens in a step, 0 for none.
    """

    model_dtypes: tuple[str, ...] = ("float32",)
    cache_dtypes: tuple[str, ...] = ("float32",)
    activation_dtypes: Mapping[str, str] = field(default_factory=dict)
    default_depth: int = 1
    deterministic: bool = False
    max_batch_tokens: int = 0
    shared_host_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """What ``Backend.validate`` is asked about, before any weight is loaded."""

    model_type: str
    dtype: str
    cache_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_tokens: int
    deterministic: bool
    tensor_parallel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A value the backend can't run with. ``proposed`` is shown to the user; nothing is changed for them."""

    setting: str
    reason: str
    proposed: str


@dataclass(slots=True, kw_only=True)
class CompileReport:
    """What ``Compiler.compiling`` did, once it is left. ``built``: kernels compiled; ``found``: those that had been
    compiled; ``place``: where they are kept, in words or as a path."""

    built: int = 0
    found: int = 0
    place: str = ""


class Compiler(Protocol):
    """Optional, as ``Backend.compiler``, where first calls of ops compile: dummy steps say what will be needed."""

    def compiling(self) -> AbstractContextManager[CompileReport]:
        """In this context ops need not run: what their calls need is compiled side by side. Results may then be
        anything that is safe to go on with, zeros best. Leaving waits for all, fills in the report and raises the
        first failure."""


class Backend(Protocol):
    """One open backend. Its parts are read once, after ``create``."""

    @property
    def capabilities(self) -> Capabilities:
        """What the engine may count on."""

    @property
    def device(self) -> DeviceRuntime:
        """The first device's runtime."""

    @property
    def shapes(self) -> ShapePolicy:
        """What shapes it runs."""

    @property
    def storage(self) -> Storage:
        """Where caches live."""

    @property
    def memory(self) -> MemoryProfiler:
        """What measures memory."""

    @property
    def graphs(self) -> Graphs | None:
        """Graph capture, or None."""

    @property
    def collectives(self) -> Collectives | None:
        """Communication between ranks, or None."""

    @property
    def transfer(self) -> Transfer | None:
        """Direct block transfer, or None."""

    def provide(self, spec: OpSpec) -> Provided | Decline:
        """Return an implementation of exactly that spec, or decline it with a reason. Unknown specs are declined."""

    def fuse(self, specs: Sequence[OpSpec]) -> Fused | None:
        """Claim a run of consecutive specs, or None."""

    def validate(self, plan: PlanSummary) -> Sequence[Problem]:
        """Return what it can't run with; empty when all is well."""

    def ready(self) -> None:
        """Called once, after warm-up: from here on nothing may be compiled."""

    def close(self) -> None:
        """Release the device."""


def decline_all(spec: OpSpec) -> Decline:
    """Provide nothing: every op is served by the reference."""
    return Decline(reason=f"no implementation of {spec.op}")


def no_problems(plan: PlanSummary) -> Sequence[Problem]:
    """Accept every plan."""
    return ()


def nothing() -> None:
    """Do nothing."""


def no_fusion(specs: Sequence[OpSpec]) -> Fused | None:
    """Claim nothing."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedBackend:
    """A ``Backend`` put together from parts, so that a vendor names only what it has. Composed, never subclassed."""

    capabilities: Capabilities
    device: DeviceRuntime
    storage: Storage
    memory: MemoryProfiler
    shapes: ShapePolicy = ShapePolicy()  # noqa: RUF009  it is frozen
    graphs: Graphs | None = None
    collectives: Collectives | None = None
    transfer: Transfer | None = None
    provide: Callable[[OpSpec], Provided | Decline] = decline_all
    fuse: Callable[[Sequence[OpSpec]], Fused | None] = no_fusion
    validate: Callable[[PlanSummary], Sequence[Problem]] = no_problems
    compiler: Compiler | None = None
    ready: Callable[[], None] = nothing
    close: Callable[[], None] = nothing


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name. ValueError for a name that torch does not have."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def dtype_bytes(name: str) -> int:
    """Return the bytes of one element of that dtype, without torch."""
    sizes = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
    sizes |= {"int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
    if name not in sizes:
        raise ValueError(f"{name!r} is not a dtype that the contract knows: {', '.join(sorted(sizes))}")
    return sizes[name]
