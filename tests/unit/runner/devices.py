"""The devices that runner tests run on."""

from __future__ import annotations

from drivetrain_api.v1 import (
    Capabilities,
    ComposedBackend,
    ConfigView,
    ShapePolicy,
    generic_profiler,
    torch_runtime,
    torch_storage,
)
from drivetrain_mirage.backend import open_backend

DYNAMIC = ShapePolicy()
STATIC = ShapePolicy(tokens=(4, 8, 16, 64), rows=(4, 8), blocks_per_row=(2, 4, 16), pad_token=0)
DEVICES = ("cpu", "cpu-static", "mirage", "mirage-static")


def host(shapes: ShapePolicy = DYNAMIC, slot_dtype: str = "int64") -> ComposedBackend:
    """The host's memory with torch's own kernels, under any shape policy."""
    runtime = torch_runtime("cpu")
    return ComposedBackend(
        capabilities=Capabilities(),
        device=runtime,
        storage=torch_storage(runtime, slot_dtype=slot_dtype),
        memory=generic_profiler(runtime),
        shapes=shapes,
    )


def device(name: str, **options):
    """A backend for ``runner_config``'s sizes: 6 rows, 48 tokens a step, 200 tokens a sequence."""
    if name.startswith("cpu"):
        return host(STATIC if name == "cpu-static" else DYNAMIC)
    view = ConfigView(
        dtype="float32",
        max_num_seqs=6,
        max_num_batched_tokens=48,
        max_model_len=200,
        options={"delay": 0.01, **options},
    )
    return open_backend((0,), view, static=name == "mirage-static")


def block_tokens(backend) -> int:
    return backend.storage.block_tokens[0]
