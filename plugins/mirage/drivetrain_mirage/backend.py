"""The two profiles, put together. Importing this imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain_api.v1 import (
    Backend,
    Capabilities,
    ComposedBackend,
    ConfigView,
    PlanSummary,
    Problem,
    ShapePolicy,
    generic_profiler,
)

from .device import DeviceOptions, MirageDevice
from .graphs import MirageGraphs
from .providers import Free, Guard, Providers
from .runtime import MirageRuntime
from .static import ShapeGuard, shape_policy
from .storage import BLOCK_TOKENS, MirageStorage
from .streams import Pace

DTYPES = ("float32", "bfloat16")


def validate(plan: PlanSummary) -> Sequence[Problem]:
    """Return what the device can't run with."""
    problems = []
    if plan.block_tokens != BLOCK_TOKENS:
        problems.append(
            Problem(
                setting="block-size",
                reason=f"a block holds {BLOCK_TOKENS} tokens, not {plan.block_tokens}",
                proposed=str(BLOCK_TOKENS),
            )
        )
    for setting, dtype in (("dtype", plan.dtype), ("cache-dtype", plan.cache_dtype)):
        if dtype not in DTYPES:
            problems.append(Problem(setting=setting, reason=f"there is no {dtype} here", proposed=DTYPES[0]))
    if plan.tensor_parallel != 1:
        problems.append(
            Problem(setting="tensor-parallel-size", reason="one device has no others to talk to", proposed="1")
        )
    return problems


def open_backend(devices: Sequence[int], view: ConfigView, *, static: bool) -> Backend:
    """Open the one device. ValueError for another index."""
    if tuple(devices) not in ((), (0,)):
        raise ValueError(f"mirage has device 0 only, not {', '.join(map(str, devices))}")
    options = view.options
    owner = MirageDevice(
        DeviceOptions(
            memory=int(options.get("memory") or DeviceOptions().memory),
            pace=Pace(share=_number(options.get("delay"), Pace().share), seed=int(options.get("seed") or 0)),
            poison_freed=bool(options.get("poison_freed", True)),
        )
    )
    guard = ShapeGuard(shape_policy(view), bool(options.get("strict_shapes", True))) if static else None
    if guard is not None:
        owner.watch = guard.watch
    native = bool(options.get("native"))
    free: Guard = Free()
    providers = Providers(owner=owner, guard=guard or free, hot=static or native, norm=native, alone=view.deterministic)
    runtime = MirageRuntime(owner)
    return ComposedBackend(
        capabilities=Capabilities(model_dtypes=DTYPES, cache_dtypes=DTYPES, default_depth=2, deterministic=True),
        device=runtime,
        storage=MirageStorage(owner),
        memory=generic_profiler(runtime),
        shapes=guard.policy if guard is not None else ShapePolicy(),
        graphs=MirageGraphs(owner, guard.capture) if guard is not None else MirageGraphs(owner),
        provide=providers.provide,
        validate=validate,
        ready=guard.ready if guard is not None else _nothing,
        close=owner.close,
    )


def _nothing() -> None:
    """The dynamic profile compiles nothing."""


def _number(value: str | int | float | bool | None, default: float) -> float:
    return default if value is None else float(value)
