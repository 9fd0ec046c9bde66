"""The runner against a model whose tokens depend on every slot, length and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drivetrain_api.v1 import (
    Capabilities,
    ComposedBackend,
    ShapePolicy,
    generic_profiler,
    torch_runtime,
    torch_storage,
)

from drivetrain.dist.executors import InlineExecutor
from drivetrain.ops import Ops
from drivetrain.runner.drafter import RandomDrafter
from drivetrain.runner.runner import Runner
from tests.unit.runner.fakes import (
    FakeDecoder,
    Job,
    MiniScheduler,
    drive,
    expected_greedy,
    expected_hidden,
    expected_logits,
    runner_config,
)

VOCABULARY, WINDOW, BLOCKS = 97, 20, 120
STATIC = ShapePolicy(tokens=(4, 8, 16, 64), rows=(4, 8), blocks_per_row=(2, 4, 16), pad_token=0)


def backend_of(shapes: ShapePolicy = ShapePolicy(), slot_dtype: str = "int64") -> ComposedBackend:
    runtime = torch_runtime("cpu")
    return ComposedBackend(
        capabilities=Capabilities(),
        device=runtime,
        storage=torch_storage(runtime, slot_dtype=slot_dtype),
        memory=generic_profiler(runtime),
        shapes=shapes,
    )


def make(backend=None, *, drafter=None, **config):
    backend = backend or backend_of()
    decoder = FakeDecoder(backend, vocabulary=VOCABULARY, window=WINDOW)
    caches = tuple(backend.storage.allocate(g.layout, BLOCKS) for g in decoder.groups)
    runner = Runner(backend, decoder, caches, runner_config(**config), Ops(backend, block_tokens=16), drafter)
    return runner, decoder


def jobs(count: int = 9, seed: int = 3, **start) -> list[Job]:
    rng = np.random.default_rng(seed)
    return [
        Job(
            prompt=rng.integers(0, VOCABULARY, int(rng.integers(1, 70))).tolist(),
            max_new=int(rng.integers(1, 30)),
            arrive=int(rng.integers(0, 12)),
            start=dict(start),
        )
        for _ in range(count)
    ]


def run(executor, todo: list[Job], *, depth=1, budget=48, rows=6, **more) -> MiniScheduler:
    sched_keys = {k: more.pop(k) for k in ("max_drafts", "seed") if k in more}
    sched = MiniScheduler(rows=rows, budget=budget, block_tokens=16, num_blocks=BLOCKS, **sched_keys)
    for job in todo:
        sched.add(job)
    drive(executor, sched, depth=depth, **more)
    return sched


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("slot_dtype", ["int64", "int32"])
@pytest.mark.parametrize("shapes", [ShapePolicy(), STATIC], ids=["dynamic", "static"])
def test_mixed_batches_give_the_models_own_tokens(depth: int, slot_dtype: str, shapes: ShapePolicy) -> None:
    runner, _ = make(backend_of(shapes, slot_dtype), depth=depth)
    todo = jobs()
    run(InlineExecutor(runner), todo, depth=depth)
    for job in todo:
        assert job.out == expected_greedy(job.prompt, job.max_new, VOCABULARY, WINDOW)
