"""The backend itself: composed from the contract's torch helpers, the shared kernels and CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from drivetrain_api.v1 import (
    Backend,
    Capabilities,
    ComposedBackend,
    ConfigView,
    PlanSummary,
    Problem,
    Unavailable,
    torch_runtime,
    torch_storage,
)
from drivetrain_triton.launch import KernelCompiler
from drivetrain_triton.target import Target

from .graphs import CudaGraphs
from .memory import CudaMemory
from .ops import DTYPES, Providers
from .virtual import shrinkable

BLOCK_TOKENS = (16, 32, 64, 128)
SLOTS = "int32"
MOST_ROWS = 65535


def open_backend(index: int, view: ConfigView) -> Backend | Unavailable:
    """Open one card. Unavailable when this torch was built without CUDA or can't use the card."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"built for CUDA {built}, which the driver here does not run" if built else "built without CUDA"
        fix = "install a CUDA build of torch that fits the driver"
        return Unavailable(reason=f"torch {torch.__version__} is {why}", fix=fix)
    torch.cuda.set_device(index)
    shrinking = None if view.options.get("give_back") == "off" else partial(shrinkable, index)
    runtime = torch_runtime("cuda", index, host=page_locked, free_host=unlock_unused, shrinkable=shrinking)
    target = target_of(runtime.device, overlap=view.options.get("overlap") != "off")
    greedy_head = view.options.get("greedy_head") != "off"
    providers = Providers(target=target, deterministic=view.deterministic, greedy_head=greedy_head)
    return ComposedBackend(
        capabilities=Capabilities(model_dtypes=DTYPES, cache_dtypes=DTYPES, default_depth=2, deterministic=True),
        device=runtime,
        storage=torch_storage(runtime, BLOCK_TOKENS, SLOTS),
        memory=CudaMemory(runtime),
        graphs=None if view.options.get("graphs") == "off" else CudaGraphs(runtime.device),
        provide=providers.provide,
        fuse=providers.fuse,
        compiler=KernelCompiler(processes=view.options.get("compile") != "threads"),
        validate=validate,
        close=torch.cuda.empty_cache,
    )


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a host tensor that the card reads and writes by itself."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def unlock_unused() -> None:
    """Return the page-locked memory that torch keeps for later; nothing where this torch can't."""
    free = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if free is not None:
        free()


def target_of(device: torch.device, *, overlap: bool) -> Target:
    """Describe a card to the kernels."""
    facts = torch.cuda.get_device_properties(device)
    arch = facts.major * 10 + facts.minor
    return Target(
        kind="cuda",
        arch=arch,
        multiprocessors=facts.multi_processor_count,
        shared_bytes=facts.shared_memory_per_block_optin,
        overlaps=overlap and arch >= 90,
    )


def validate(plan: PlanSummary) -> Sequence[Problem]:
    """Name what can't run."""
    problems = []
    if plan.dtype not in DTYPES:
        problems.append(Problem(setting="dtype", reason=f"no {plan.dtype} on this device", proposed=DTYPES[0]))
    if plan.tensor_parallel > 1:
        problems.append(Problem(setting="tensor_parallel_size", reason="one card a process so far", proposed="1"))
    if plan.max_num_seqs > MOST_ROWS:
        reason = f"{plan.max_num_seqs} rows: a launch has at most {MOST_ROWS} along that axis"
        problems.append(Problem(setting="max_num_seqs", reason=reason, proposed=str(MOST_ROWS)))
    return problems
