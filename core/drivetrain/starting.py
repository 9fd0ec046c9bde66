"""Starting: memory planned, weights loaded, caches allocated, every shape warmed up; then ready."""

from __future__ import annotations

import time
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from drivetrain.config import EngineConfig
from drivetrain.dist.executors import InlineExecutor
from drivetrain.errors import ConfigError
from drivetrain.launch import WARM_UP_TOKENS, Described, Opened, Parts, make_loop
from drivetrain.models.build import build, load
from drivetrain.models.families import naming_of
from drivetrain.models.naming import expected_tensors
from drivetrain.models.weights.checkpoint import DummyCheckpoint
from drivetrain.runner.batch import step_limits
from drivetrain.runner.blame import warm_up_or_name
from drivetrain.runner.caches import allocate_memory
from drivetrain.runner.giving import GiveBack
from drivetrain.runner.memory import MemoryPlan, MemoryRequest, compare, plan_memory
from drivetrain.runner.runner import Runner
from drivetrain.runner.sizes import RunnerConfig
from drivetrain_api.v1 import dtype_bytes

if TYPE_CHECKING:
    from drivetrain.models.decoder import Decoder
    from drivetrain.models.weights.checkpoint import Checkpoint
    from drivetrain_api.v1 import Backend


def runner_sizes(config: EngineConfig, described: Described, max_model_len: int, max_drafts: int) -> RunnerConfig:
    """Return the sizes of the runner's tables and buffers."""
    limits = step_limits(described.backend.shapes, config.max_num_seqs, config.max_num_batched_tokens)
    return RunnerConfig(
        max_num_seqs=limits.rows,
        max_num_batched_tokens=limits.tokens,
        max_model_len=max_model_len,
        max_drafts=max_drafts,
        depth=config.depth or described.backend.capabilities.default_depth,
        max_adjusted=config.max_adjusted_seqs,
    )


def memory_of(config: EngineConfig, described: Described, max_drafts: int = 0) -> MemoryPlan:
    """Plan the memory of a described model. Nothing is loaded; the baseline is what this process holds now."""
    backend, decoder = described.backend, described.decoder
    weights = sum(holder.planned_bytes() for holder in decoder.holders)
    return plan_memory(
        MemoryRequest(
            backend=backend,
            decoder=decoder,
            ops=described.ops,
            runner=runner_sizes(config, described, described.max_model_len, max_drafts),
            baseline=backend.memory.baseline(),
            weight_bytes=weights,
            load_peak_bytes=load_peak(decoder, host=backend.capabilities.shared_host_memory),
            cache_bytes=config.cache_bytes,
            utilization=config.memory_utilization,
            may_shorten=not config.max_model_len,
        )
    )


def load_peak(decoder: Decoder, *, host: bool) -> int:
    """Return the most bytes that loading holds: what is loaded, the tensor being read (twice where the device is the
    host: as read, and as the device's), and its packed form."""
    shapes, size = decoder.spec.parameters(), dtype_bytes(decoder.spec.dtype)
    resident = peak = 0
    for holder in decoder.holders:
        source = sum(prod(shapes[path]) for paths in holder.sources for path in paths) * size
        packed = holder.planned_bytes()
        peak = max(peak, resident + source * (2 if host else 1) + (packed if packed != source else 0))
        resident += packed
    return max(peak, resident)


def peak_in_use(backend: Backend) -> int:
    """Return the most bytes held since the last peak measurement began: the device's own count, or the allocator's."""
    counted = getattr(backend.memory, "peak_in_use", None)
    return int(counted()) if counted is not None else backend.device.memory().peak


def checkpoint_of(config: EngineConfig, described: Described) -> Checkpoint:
    """Open the weights that ``--load-format`` names. ConfigError when the model has no such format."""
    check_format(config, described)
    if config.load_format == "dummy":
        return DummyCheckpoint(expected_tensors(described.spec, naming_of(described.spec)), described.dtype)
    return described.source.open_checkpoint()


def check_format(config: EngineConfig, described: Described) -> None:
    """Raise ConfigError when the model has no weights of the format that ``--load-format`` names."""
    if config.load_format not in ("auto", "dummy", described.source.kind):
        raise ConfigError(
            f"--load-format {config.load_format}: {described.source.path} holds {described.source.kind}",
            fix="leave it out, or name the other file",
        )


def start(config: EngineConfig, described: Described, parts: Parts, *, measure: bool = False) -> Opened:
    """Do all that comes before the first request.

    A backend of dynamic shapes has nothing to compile: it warms up with one short step, or with the largest step
    when that is to be measured. One of fixed shapes runs every shape.
    """
    begin = time.perf_counter()
    backend, decoder = described.backend, described.decoder
    memory = memory_of(config, described, parts.max_drafts)
    checkpoint = checkpoint_of(config, described)
    try:
        loaded = load(decoder, checkpoint, backend.device)
    finally:
        checkpoint.close()
    backend.device.trim()
    caching = time.perf_counter()
    caches = allocate_memory(backend, decoder, memory.cache)
    sizes = runner_sizes(config, described, memory.max_model_len, parts.max_drafts)
    runner = Runner(backend, decoder, caches.handles, sizes, described.ops, parts.drafter)
    runner.reserve.plan(graphs=memory.graphs, step=0 if measure else memory.step)
    warm = time.perf_counter()
    limits = step_limits(backend.shapes, config.max_num_seqs, config.max_num_batched_tokens)
    if backend.shapes.dynamic and not measure:
        limits = replace(limits, rows=1, tokens=min(limits.tokens, WARM_UP_TOKENS))
    warmed = warm_up_or_name(runner, limits, described.ops, lambda ops: build(described.spec, ops))
    end = time.perf_counter()
    check = compare(memory, peak_in_use(backend))
    loop = make_loop(config, described, InlineExecutor(runner), memory, parts)
    if caches.shrinkable:
        runner.reserve.giving = GiveBack(runner, caches, loop.scheduler.cache)
    return Opened(
        loop=loop,
        runner=runner,
        memory=memory,
        vocabulary=described.spec.vocabulary,
        max_model_len=memory.max_model_len,
        dtype=described.dtype,
        ahead=warmed.ahead,
        figures={
            "load_seconds": loaded.seconds,
            "cache_seconds": warm - caching,
            "warm_up_seconds": end - warm,
            "compile_seconds": warmed.ahead.seconds,
            "start_seconds": end - begin,
            **{f"{term.name}_bytes": term.nbytes for term in memory.terms()},
            "weights_loaded_bytes": loaded.weight_bytes,
            "measured_peak_bytes": check.measured,
            "memory_error": check.error,
            "graphs_measured_bytes": runner.reserve.taken,
        },
    )
