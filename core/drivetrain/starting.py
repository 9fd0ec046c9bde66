"""Starting: memory planned, weights loaded, caches allocated, every shape warmed up; then ready."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.cache.sizing import CachePlan, GroupNeed, plan_cache
from drivetrain.config import EngineConfig
from drivetrain.dist.executors import InlineExecutor
from drivetrain.errors import ConfigError
from drivetrain.launch import WARM_UP_TOKENS, Described, Opened, Parts, make_loop
from drivetrain.models.build import load
from drivetrain.models.families import naming_of
from drivetrain.models.naming import expected_tensors
from drivetrain.models.weights.checkpoint import DummyCheckpoint
from drivetrain.runner.batch import step_limits
from drivetrain.runner.caches import allocate_caches
from drivetrain.runner.runner import Runner
from drivetrain.runner.sizes import RunnerConfig
from drivetrain.runner.warmup import warm_up

if TYPE_CHECKING:
    from drivetrain.models.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Sized:
    cache: CachePlan
    max_model_len: int


def needs_of(described: Described) -> list[GroupNeed]:
    """Return what each cache group asks for."""
    return [
        GroupNeed(
            kind=group.spec.kind,
            layer_bytes=group.layout.bytes_per_block,
            num_layers=len(group.layers),
            block_tokens=group.layout.block_tokens,
            alignment=group.layout.alignment,
            window=group.spec.window,
        )
        for group in described.decoder.groups
    ]


def size_cache(config: EngineConfig, described: Described, budget: int) -> Sized:
    shared = all(group.layout.strided for group in described.decoder.groups)
    longest = described.max_model_len
    chunk = config.max_num_batched_tokens
    while True:
        try:
            return Sized(
                plan_cache(needs_of(described), budget, shared=shared, max_tokens=longest, chunk=chunk), longest
            )
        except ConfigError:
            if config.max_model_len or longest <= 64:
                raise
            longest //= 2


def checkpoint_of(config: EngineConfig, described: Described) -> Checkpoint:
    """Open the weights that ``--load-format`` names. ConfigError when the model has no such format."""
    if config.load_format == "dummy":
        return DummyCheckpoint(expected_tensors(described.spec, naming_of(described.spec)), described.dtype)
    if config.load_format not in ("auto", described.source.kind):
        raise ConfigError(
            f"--load-format {config.load_format}: {described.source.path} holds {described.source.kind}",
            fix="leave it out, or name the other file",
        )
    return described.source.open_checkpoint()


def start(config: EngineConfig, described: Described, parts: Parts) -> Opened:
    """Do all that comes before the first request."""
    begin = time.perf_counter()
    backend, decoder = described.backend, described.decoder
    memory = size_cache(config, described, config.cache_bytes or 1 << 30)
    checkpoint = checkpoint_of(config, described)
    loaded = load(decoder, checkpoint, backend.device)
    checkpoint.close()
    caches = allocate_caches(backend, decoder, memory.cache)
    limits = step_limits(backend.shapes, config.max_num_seqs, config.max_num_batched_tokens)
    runner = Runner(
        backend,
        decoder,
        caches,
        RunnerConfig(
            max_num_seqs=limits.rows,
            max_num_batched_tokens=limits.tokens,
            max_model_len=memory.max_model_len,
            max_drafts=parts.max_drafts,
            depth=config.depth or backend.capabilities.default_depth,
        ),
        described.ops,
        parts.drafter,
    )
    warm = time.perf_counter()
    warm_up(runner, limits, largest_tokens=WARM_UP_TOKENS)
    executor = InlineExecutor(runner)
    end = time.perf_counter()
    return Opened(
        loop=make_loop(config, described, executor, memory, parts),
        runner=runner,
        memory=memory,
        vocabulary=described.spec.vocabulary,
        max_model_len=memory.max_model_len,
        dtype=described.dtype,
        figures={"load_seconds": loaded.seconds, "warm_up_seconds": end - warm, "start_seconds": end - begin},
    )
