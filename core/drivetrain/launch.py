"""From a configuration to a running loop: device first, then model, then memory, then weights.

``resolve_device`` is torch-free and runs once, in the process that the user started; children get its ``Choice``.
Everything after it runs in the process that owns the device.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from drivetrain.config import EngineConfig
from drivetrain.errors import ConfigError, DeviceError
from drivetrain.select.choose import Choice, choose, open_backend
from drivetrain.select.probe import Told
from drivetrain_api.v1.hooks import ConfigView

if TYPE_CHECKING:
    from drivetrain.cache.connector import Connector
    from drivetrain.dist.executor import Executor
    from drivetrain.loop import Loop
    from drivetrain.models.decoder import Decoder
    from drivetrain.models.source import ModelSource
    from drivetrain.models.spec import ModelSpec
    from drivetrain.ops import Ops
    from drivetrain.runner.drafter import Drafter
    from drivetrain.runner.memory import MemoryPlan
    from drivetrain.runner.runner import Runner
    from drivetrain.runner.warmup import Ahead
    from drivetrain_api.v1 import Backend, PlanSummary, Problem

FIXED_CHUNK = 256
REPORT = "report this to the wheel's vendor"
WARM_UP_TOKENS = 16


def resolve_device(config: EngineConfig, told: Told | None = None) -> Choice:
    """Probe and choose. DeviceError with one message when the device asked for can't be had.

    ``told``: gets, while a device that is named is still being probed, the variables that its backend wants of the
    process which will run the loop, where these can be known.
    """
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"--tensor-parallel-size is {config.tensor_parallel_size}: this version runs a model on one device",
            fix="give 1",
        )
    view = None if told is None else view_of(config)
    return choose(config.device, config.backend_options, config.probe_timeout, view=view, told=told)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Described:
    """A model on an open backend, bound but not loaded; ``explain`` and ``plan`` need no more."""

    backend: Backend
    source: ModelSource
    spec: ModelSpec
    ops: Ops
    decoder: Decoder
    dtype: str
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a program may plug in that no flag names: a drafter and its width, a connector."""

    drafter: Drafter | None = None
    max_drafts: int = 0
    connector: Connector | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opened:
    """A loop that is ready. ``ahead``: what was compiled for it; ``figures``: seconds and bytes of the start, by
    name."""

    loop: Loop
    runner: Runner
    memory: MemoryPlan
    vocabulary: int
    max_model_len: int
    dtype: str
    ahead: Ahead | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


def view_of(config: EngineConfig, choice: Choice | None = None) -> ConfigView:
    """Return the part of the configuration that the backend sees; without a choice no options."""
    return ConfigView(
        dtype=config.dtype,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        deterministic=config.deterministic,
        num_threads=config.num_threads,
        options={} if choice is None else choice.options,
    )


def describe(config: EngineConfig, choice: Choice) -> Described:
    """Open the backend, find the model, bind its ops. Nothing is loaded."""
    backend = open_backend(choice, view_of(config, choice))
    from drivetrain.models.build import build
    from drivetrain.models.families import read_spec
    from drivetrain.models.source import resolve
    from drivetrain.ops import Ops

    source = resolve(config.model, config.revision)
    dtype = _dtype(config, backend, source)
    spec = replace(read_spec(source.config, dtype), activations=_activations(backend, dtype))
    sizes = backend.storage.block_tokens
    block_tokens = config.block_size or sizes[0]
    if block_tokens not in sizes:
        raise ConfigError(f"--block-size is {block_tokens}", fix=f"{choice.name} has {', '.join(map(str, sizes))}")
    longest = int(source.config.get("max_position_embeddings", 0)) or config.max_model_len or 4096
    most = max(longest, spec.stretched_positions)
    if config.max_model_len > most:
        raise ConfigError(
            f"--max-model-len is {config.max_model_len}, the model was made for {most}",
            fix=f"give {most} or less",
        )
    _validate(config, choice, backend, dtype, block_tokens)
    spec = replace(spec, reach=config.max_model_len or longest)
    ops = Ops(backend, block_tokens=block_tokens, strict=config.strict, deterministic=config.deterministic)
    return Described(
        backend=backend,
        source=source,
        spec=spec,
        ops=ops,
        decoder=build(spec, ops),
        dtype=dtype,
        max_model_len=config.max_model_len or longest,
    )


def _dtype(config: EngineConfig, backend: Backend, source: ModelSource) -> str:
    able = backend.capabilities.model_dtypes
    own = str(source.config.get("dtype") or source.config.get("torch_dtype") or "float32")
    if config.dtype == "auto":
        return own if own in able else able[0]
    if config.dtype not in able:
        raise DeviceError(f"--dtype {config.dtype}: this backend runs {', '.join(able)}", fix=f"--dtype {able[0]}")
    return config.dtype


def _activations(backend: Backend, dtype: str) -> str:
    """What the backend wants between ops; empty for the model's own dtype. DeviceError for a name it can't mean."""
    wanted = backend.capabilities.activation_dtypes.get(dtype, "")
    if wanted not in ("", "float32", "bfloat16", "float16"):
        raise DeviceError(
            f"this backend wants {wanted} activations in {dtype} models",
            fix="its capabilities must name float32, bfloat16 or float16",
        )
    return "" if wanted == dtype else wanted


def _validate(config: EngineConfig, choice: Choice, backend: Backend, dtype: str, block_tokens: int) -> None:
    from drivetrain_api.v1 import PlanSummary

    if config.cache_dtype not in ("auto", dtype):
        raise ConfigError(f"--cache-dtype {config.cache_dtype}: caches keep the model's {dtype}", fix="leave it out")
    if config.deterministic and not backend.capabilities.deterministic:
        raise DeviceError(
            f"--deterministic: {choice.name} does not promise results independent of the batch", fix="leave it out"
        )
    problems = _problems(
        choice,
        backend,
        PlanSummary(
            model_type="decoder",
            dtype=dtype,
            cache_dtype=dtype,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            block_tokens=block_tokens,
            deterministic=config.deterministic,
            tensor_parallel=config.tensor_parallel_size,
        ),
    )
    if problems:
        what = "; ".join(f"--{p.setting}: {p.reason}" for p in problems)
        fix = ", ".join(f"--{p.setting} {p.proposed}" for p in problems)
        raise DeviceError(f"{choice.name} can't run this: {what}", fix=fix)


def _problems(choice: Choice, backend: Backend, summary: PlanSummary) -> Sequence[Problem]:
    """What the backend can't run. DeviceError naming its wheel when it answers with anything else."""
    from drivetrain_api.v1 import Problem

    try:
        found = tuple(backend.validate(summary))
    except Exception as error:
        raise DeviceError(f"{choice.wheel}: validate failed: {type(error).__name__}: {error}", fix=REPORT) from error
    if wrong := [one for one in found if not isinstance(one, Problem)]:
        raise DeviceError(f"{choice.wheel}: validate returned {wrong[0]!r} among its problems", fix=REPORT)
    return found


def open_loop(config: EngineConfig, choice: Choice | None = None, parts: Parts = Parts()) -> Opened:
    """Open everything and warm up; what comes back serves at once. Without a choice the device is resolved here, and
    torch loads meanwhile."""
    from drivetrain.ahead import resolve_and_load

    with nothing_collected():
        described = describe(config, resolve_and_load(config) if choice is None else choice)
        from drivetrain.starting import start  # after the backend has set what torch must find when it loads

        return start(config, described, parts)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Leave cyclic garbage alone for the time of a start: it makes modules and little garbage, and each collection
    looks through them all."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def fixed_chunk(tokens: int, granule: int) -> int:
    """Return how many of a prompt's tokens a step with deterministic results takes: whole blocks that fit a step.

    ConfigError where not one does.
    """
    if granule <= tokens:
        return max(min(FIXED_CHUNK, tokens) // granule, 1) * granule
    raise ConfigError(
        f"--deterministic: steps of {tokens} tokens hold no whole block of {granule}, by which prompts are cut",
        fix=f"set --max-num-batched-tokens to {granule} or more",
    )


def make_loop(config: EngineConfig, described: Described, executor: Executor, memory: MemoryPlan, parts: Parts) -> Loop:
    """Put scheduler and executor together."""
    from drivetrain.cache.manager import CacheManager
    from drivetrain.cache.prefix import DEFAULT_UNIT
    from drivetrain.loop import Loop
    from drivetrain.runner.batch import step_limits
    from drivetrain.sched.policy import policy_of
    from drivetrain.sched.scheduler import Scheduler, SchedulerConfig

    limits = step_limits(described.backend.shapes, config.max_num_seqs, config.max_num_batched_tokens)
    sizes = {group.block_tokens for group in memory.cache.groups if group.kind != "recurrent"}
    unit = DEFAULT_UNIT if all(s % DEFAULT_UNIT == 0 or DEFAULT_UNIT % s == 0 for s in sizes) else max(sizes)
    longest = memory.max_model_len
    manager = CacheManager(
        memory.cache, max_rows=limits.rows, max_tokens=longest, unit=unit, announce_freed=executor.recycles
    )
    fixed = fixed_chunk(limits.tokens, manager.granule) if config.deterministic else 0
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=limits.rows,
            max_num_batched_tokens=limits.tokens,
            max_model_len=longest,
            model=described.source.identity,
            layout=repr([(spec, described.ops.block_tokens) for spec in described.decoder.cache_specs]),
            prefix_caching=config.enable_prefix_caching,
            max_drafts=parts.max_drafts,
            fixed_chunk=fixed,
            grid_positions=any(rope.sections for rope in described.spec.ropes),
            max_adjusted_seqs=min(config.max_adjusted_seqs, limits.rows),
            vocabulary=described.spec.vocabulary,
        ),
        manager,
        policy=policy_of(config.scheduling_policy),
        connector=parts.connector,
    )
    return Loop(scheduler, executor, depth=executor.depth)
