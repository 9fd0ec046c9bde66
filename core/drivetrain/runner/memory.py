"""Memory is planned, not guessed: every byte that serving will hold, before anything is loaded.

    cache = limit - context - weights - rows and staging - graphs - slack - largest step

A step's phases never hold their memory together: the layers (activations of all query tokens, attention's
workspace), and then sampling (hidden states and logits of the rows that sample, the draw). The same figures size the
cache, are printed by ``plan``, and are compared with what was measured after warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from drivetrain.cache.sizing import CachePlan, GroupNeed, plan_cache
from drivetrain.errors import ConfigError
from drivetrain.runner.activations import StepSizes, layer_bytes, sampling_bytes
from drivetrain.runner.graphs import buckets_of
from drivetrain.runner.sizes import RunnerConfig, staging_capacity, table_bytes, table_shape
from drivetrain_api.v1 import dtype_bytes

if TYPE_CHECKING:
    from drivetrain.models.decoder import Decoder
    from drivetrain.ops import Ops
    from drivetrain_api.v1 import Backend, Baseline

MIB = 1 << 20
DEFAULT_UTILIZATION = 0.9
HOST_CACHE_BYTES = 1 << 30
HOST_SLACK, DEVICE_SLACK = 40 * MIB, 192 * MIB
HOLES = 6  # on a device one part in so many of the layers may lie in holes between tensors of other sizes
HOST_KEPT = 256 * MIB
SHORTEST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """What a plan is made from. ``weight_bytes`` and ``load_peak_bytes``: as the loader plans them, exact.

    ``cache_bytes`` 0: what the limit leaves, or on a device that shares the host's memory a cache that its requests
    can use. ``utilization`` 0: the default. ``may_shorten``: the longest sequence may be cut to what fits, since
    nobody asked for it. ``runner.max_model_len`` is the length wished for.
    """

    backend: Backend
    decoder: Decoder
    ops: Ops
    runner: RunnerConfig
    baseline: Baseline
    weight_bytes: int
    load_peak_bytes: int = 0
    cache_bytes: int = 0
    utilization: float = 0.0
    may_shorten: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerm:
    """One line of the plan: bytes on the device, and what they are for."""

    name: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose, and the cache that follows from them.

    ``context``: held by this process before loading. ``others``: held by other processes. ``layers`` and
    ``sampling``: the two phases of the largest step. ``kept``: what the allocator keeps of a phase's memory when the
    next one needs blocks of other sizes. ``load_peak``: the most that loading holds beside ``context``; checked apart.
    """

    total: int
    limit: int
    context: int
    others: int
    weights: int
    rows: int
    staging: int
    layers: int
    sampling: int
    kept: int
    graphs: int
    slack: int
    load_peak: int
    cache: CachePlan
    max_model_len: int

    @property
    def step(self) -> int:
        """The most that a step holds beside what stays: its larger phase."""
        return max(self.layers, self.kept + self.sampling)

    @property
    def resident(self) -> int:
        """Held all the time while serving."""
        held = self.weights + self.rows + self.staging + self.graphs + self.cache.total_bytes
        return self.context + held + self.slack

    @property
    def peak(self) -> int:
        """The most held while serving."""
        return self.resident + self.step

    def terms(self) -> tuple[MemoryTerm, ...]:
        """Every term, in the order of the formula."""
        groups = ", ".join(f"{g.kind} {g.num_blocks} x {g.block_tokens} tokens" for g in self.cache.groups)
        padding = f", {self.cache.padding:.1%} padding" if self.cache.padding else ""
        return (
            MemoryTerm(
                name="limit", nbytes=self.limit, note=f"of {_mib(self.total)}; {_mib(self.others)} held by others"
            ),
            MemoryTerm(name="context", nbytes=self.context, note="this process before loading, measured"),
            MemoryTerm(name="weights", nbytes=self.weights, note="parameters as packed, exact"),
            MemoryTerm(name="rows", nbytes=self.rows, note="block tables and sampling state, exact"),
            MemoryTerm(name="staging", nbytes=self.staging, note="upload buffers, exact"),
            MemoryTerm(name="cache", nbytes=self.cache.total_bytes, note=f"exact: {groups}{padding}"),
            MemoryTerm(name="graphs", nbytes=self.graphs, note="captured steps, estimated"),
            MemoryTerm(name="layers", nbytes=self.layers, note="largest step: activations and attention, estimated"),
            MemoryTerm(name="sampling", nbytes=self.sampling, note="largest step: logits and draws, estimated"),
            MemoryTerm(name="kept", nbytes=self.kept, note="freed activations that the allocator keeps, estimated"),
            MemoryTerm(name="slack", nbytes=self.slack, note="code and allocator, estimated"),
            MemoryTerm(name="peak", nbytes=self.peak, note="the most while serving"),
            MemoryTerm(name="load_peak", nbytes=self.context + self.load_peak, note="the most while loading"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheck:
    """A plan against what was measured: bytes, and the error as a part of the measured peak (above 0: over-planned)."""

    planned: int
    measured: int

    @property
    def error(self) -> float:
        """(planned - measured) / measured."""
        return (self.planned - self.measured) / self.measured


def plan_memory(request: MemoryRequest) -> MemoryPlan:
    """Plan everything. ConfigError naming all terms when not even one sequence fits in the cache that is left."""
    length = request.runner.max_model_len
    while True:
        try:
            return _plan(replace(request, runner=replace(request.runner, max_model_len=length)))
        except ConfigError:
            if not request.may_shorten or length <= SHORTEST:
                raise
            length = max(SHORTEST, length // 2)


def compare(plan: MemoryPlan, measured_peak: int) -> MemoryCheck:
    """Compare the planned peak with the highest bytes measured since loading (warm-up begins a new measurement)."""
    return MemoryCheck(planned=plan.peak, measured=measured_peak)


def _plan(request: MemoryRequest) -> MemoryPlan:
    backend, config, base = request.backend, request.runner, request.baseline
    shape = table_shape(backend, request.decoder, config)
    host = backend.capabilities.shared_host_memory
    sizes = replace(StepSizes.of(request.decoder, request.ops, config), filters=not host)
    free = base.total - base.others - base.context
    layers = layer_bytes(request.decoder.spec, sizes)
    staging = staging_capacity(shape, config) * 4 * (config.depth + 1) * (2 if host else 1)
    plan = MemoryPlan(
        total=base.total,
        limit=base.context + int(free * (request.utilization or DEFAULT_UTILIZATION)),
        context=base.context,
        others=base.others,
        weights=request.weight_bytes,
        rows=table_bytes(shape),
        staging=staging,
        layers=layers,
        sampling=sampling_bytes(request.decoder.spec, sizes),
        kept=min(layers, HOST_KEPT) if host else 0,
        graphs=_graph_bytes(request, sizes),
        slack=HOST_SLACK if host else DEVICE_SLACK + layers // HOLES,
        load_peak=request.load_peak_bytes,
        cache=CachePlan(shared=True, num_slabs=0, slab_bytes=0, groups=(), padding=0.0),
        max_model_len=config.max_model_len,
    )
    if plan.context + plan.load_peak > plan.limit:
        raise _too_large(plan, plan.context + plan.load_peak - plan.limit, "loading takes more than the limit")
    left = plan.limit - plan.peak
    if left <= 0:
        raise _too_large(plan, -left, "the weights and one step alone are larger than the limit")
    budget = request.cache_bytes or (min(left, _wanted(request)) if host and not request.utilization else left)
    if budget > left:
        raise _too_large(plan, budget - left, f"a cache of {budget / MIB:.0f} MiB does not fit")
    return replace(plan, cache=size_cache(request, budget))


def size_cache(request: MemoryRequest, budget: int) -> CachePlan:
    """Cut the budget into the decoder's groups. ConfigError when it holds not even one sequence."""
    return plan_cache(
        group_needs(request.decoder),
        budget,
        shared=all(group.layout.strided for group in request.decoder.groups),
        max_tokens=request.runner.max_model_len,
        chunk=request.runner.max_num_batched_tokens,
    )


def group_needs(decoder: Decoder) -> Sequence[GroupNeed]:
    """Return what each of the decoder's cache groups asks for."""
    return [
        GroupNeed(
            kind=group.spec.kind,
            layer_bytes=group.layout.bytes_per_block,
            num_layers=len(group.layers),
            block_tokens=group.layout.block_tokens,
            alignment=group.layout.alignment,
            window=group.spec.window,
            checkpoint_alignment=group.spec.checkpoint_alignment,
        )
        for group in decoder.groups
    ]


def _wanted(request: MemoryRequest) -> int:
    """Bytes that all rows could use at the longest length, or the default for a host where that is less; never less
    than what one longest sequence needs twice over."""
    config = request.runner
    one = 0
    for need in group_needs(request.decoder):
        one += need.blocks_for(config.max_model_len, config.max_num_batched_tokens) * need.block_bytes
    return max(min((config.max_num_seqs + 1) * one, HOST_CACHE_BYTES), 2 * one)


def _graph_bytes(request: MemoryRequest, sizes: StepSizes) -> int:
    """What captured steps keep: the backend's estimate, and the activations of the largest bucket's two phases, which
    all buckets share; they draw greedily, and those that need no logits for that hold none."""
    backend, config, spec = request.backend, request.runner, request.decoder.spec
    if backend.graphs is None:
        return 0
    buckets = buckets_of(backend, request.decoder, config)
    own = int(backend.memory.graph_estimate(buckets.graphs, buckets.most_tokens).get("bytes", 0))
    if not own:
        return 0
    greedy = request.decoder.greedy
    rows = [rows for rows in buckets.drawn if greedy is None or not greedy.takes(rows)]
    hidden = 3 * buckets.most_rows * spec.hidden * dtype_bytes(spec.activation_dtype)
    largest = replace(sizes, tokens=buckets.most_tokens, logits=max(rows, default=0), filters=False, adjusts=0)
    return own + layer_bytes(spec, largest) + max(sampling_bytes(spec, largest), hidden)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"


def _too_large(plan: MemoryPlan, missing: int, what: str) -> ConfigError:
    terms = ", ".join(f"{term.name} {term.nbytes / MIB:.0f}" for term in plan.terms() if term.nbytes)
    return ConfigError(
        f"{what}: {missing / MIB:.0f} MiB are missing (MiB: {terms})",
        fix="lower --max-num-batched-tokens, --max-num-seqs or --cache-bytes, or raise --memory-utilization",
    )
