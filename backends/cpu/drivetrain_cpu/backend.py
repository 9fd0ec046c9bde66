"""The backend itself: composed from the contract's torch helpers and this wheel's ops."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from drivetrain_api.v1 import (
    Backend,
    Capabilities,
    ComposedBackend,
    ConfigView,
    PlanSummary,
    Problem,
    generic_profiler,
    torch_runtime,
    torch_storage,
)

from .ops import DTYPES, Providers
from .threads import Threads, usable_cores

BLOCK_TOKENS = (16, 32, 64, 128)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 256 << 20
HEAP_BYTES = 32 << 20
MOST_THREADS = 1024  # far more than any host has cores: the thread library ends the process when it runs out


def open_backend(view: ConfigView) -> Backend:
    """Set this process's threads and heap, then compose the backend."""
    asked = view.num_threads or int(view.options.get("num_threads") or 0)
    threads = Threads(asked if 0 < asked <= MOST_THREADS else usable_cores())
    keep_heap()
    runtime = torch_runtime("cpu", during=threads.working)
    providers = Providers(
        deterministic=view.deterministic, linear=str(view.options.get("linear") or "auto"), threads=threads
    )
    return ComposedBackend(
        capabilities=Capabilities(
            model_dtypes=("bfloat16", "float32"),
            cache_dtypes=DTYPES,
            activation_dtypes={"bfloat16": "float32"},  # all sums are float32 here: rounding each costs time and digits
            default_depth=1,
            deterministic=True,
            shared_host_memory=True,
        ),
        device=runtime,
        storage=torch_storage(runtime, BLOCK_TOKENS),
        memory=generic_profiler(runtime),
        provide=providers.provide,
        validate=validator(asked),
    )


def keep_heap() -> None:
    """Keep freed activations in the heap: given back to the system, each step would fault every page in again.

    ``DeviceRuntime.trim`` still returns what is free. Nothing where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, HEAP_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def validator(threads: int) -> Callable[[PlanSummary], Sequence[Problem]]:
    """Return what says what can't run: dtypes that no op here has, and a number of threads that can't be."""

    def validate(plan: PlanSummary) -> Sequence[Problem]:
        problems = []
        if not 0 <= threads <= MOST_THREADS:
            reason = f"num_threads={threads} is not in 0 to {MOST_THREADS}"
            problems.append(Problem(setting="backend-option", reason=reason, proposed=f"num_threads={usable_cores()}"))
        if plan.dtype not in DTYPES:
            problems.append(Problem(setting="dtype", reason=f"no {plan.dtype} on this device", proposed="bfloat16"))
        if plan.cache_dtype not in DTYPES:
            problems.append(Problem(setting="cache_dtype", reason=f"no {plan.cache_dtype} caches", proposed="bfloat16"))
        if plan.tensor_parallel > 1:
            problems.append(Problem(setting="tensor_parallel_size", reason="one process a host", proposed="1"))
        return problems

    return validate
