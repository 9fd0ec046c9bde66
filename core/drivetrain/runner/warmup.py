"""Warm-up: every shape that may come is run once before ``Backend.ready``, and the largest step is
measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from drivetrain.errors import DeviceError
from drivetrain.params import MAX_LOGPROBS
from drivetrain.runner.batch import StepLimits
from drivetrain.runner.dummies import capture_plan, decode_plan, dummy_plan, few_layers, prefill_plan
from drivetrain.runner.graphs import CHUNK_TOKENS, EACH_UP_TO
from drivetrain.runner.rows import ADJUSTED, DELTA, DRAFTS, LOGPROBS, MIN_P, NON_GREEDY, POOLING, TOP_K, TOP_P
from drivetrain.sched.plan import BlockCopy, EmbedRun, LateInput, PositionRun, RowStart, StateExport, StepPlan

if TYPE_CHECKING:
    from drivetrain.runner.runner import Runner
    from drivetrain_api.v1 import Compiler, CompileReport, MemoryUse, ShapePolicy

EVERY_FILTER = NON_GREEDY | TOP_K | TOP_P | MIN_P


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """What warming up did. ``largest``: memory of the largest step; ``steps``: dummy steps run; ``graphs``:
    captured; ``ahead``: what was compiled before."""

    largest: MemoryUse
    steps: int
    graphs: int
    ahead: Ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What ``compile_ahead`` did: dummy ``steps`` and ``seconds``; ``report``: the compiler's, None without one."""

    steps: int = 0
    seconds: float = 0.0
    report: CompileReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way in which steps of one shape differ in the work they need. ``flags``: facts of the dummy's
    rows."""

    flags: int = 0
    late: bool = False
    embeds: bool = False
    grid: bool = False


def warm_up(runner: Runner, limits: StepLimits, *, largest_tokens: int | None = None) -> WarmUp:
    """Have compiled what can be ahead, measure the largest step, run every shape of a policy of fixed shapes, capture
    graphs (of dynamic shapes the small buckets and the largest one; others are captured later), declare readiness.

    ``largest_tokens``: measure with a step of this many query tokens where the limit's own would take too
    long (dynamic shapes only). DeviceError when a dummy step fails: the engine could not serve that shape.
    Waits.
    """
    backend, tables = runner.backend, runner.tables
    measured = limits
    if backend.shapes.dynamic and largest_tokens is not None:
        measured = replace(limits, tokens=min(limits.tokens, largest_tokens))
    steps = 0
    try:
        ahead = compile_ahead(runner, limits)
        largest = backend.memory.measure(lambda: run_largest(runner, measured))
        runner.reserve.hold()
        for plan in () if backend.shapes.dynamic else fixed_plans(runner, limits):
            for variant in variants(runner):
                run_dummy(runner, plan, variant)
                steps += 1
        dynamic = backend.shapes.dynamic
        buckets = runner.graphs.buckets
        first = [b for b in buckets if b <= EACH_UP_TO or b == buckets[-1] or not dynamic]
        for rows in reversed(first):  # the largest first: the others' memory then lies in what it has freed
            shape = runner.graphs.capture_shape(rows)
            plan = capture_plan(runner, shape)
            runner.capture(plan, shape)
            run_dummy(runner, plan, Variant())
    finally:
        tables.mark(tables.padding_row, 0)
        tables.logprobs[tables.padding_row] = -1
        tables.pooling.pop(tables.padding_row, None)
    runner.runtime.synchronize()
    backend.ready()
    return WarmUp(largest=largest, steps=steps + 2, graphs=runner.graphs.count, ahead=ahead)


def compile_ahead(runner: Runner, limits: StepLimits) -> Ahead:
    """Where first calls of ops compile: let a few layers of all steps that will be run or captured say what they need,
    so that it is compiled side by side. The steps' memory is given back."""
    compiler: Compiler | None = getattr(runner.backend, "compiler", None)
    if compiler is None:
        return Ahead()
    begin, steps = time.perf_counter(), 0
    with few_layers(runner.decoder), compiler.compiling() as report:
        for plan, variant in steps_ahead(runner, limits):
            run_dummy(runner, plan, variant)
            steps += 1
        for shape in runner.graphs.shapes():
            runner.rehearse(capture_plan(runner, shape), shape)
            steps += 1
    runner.runtime.synchronize()
    runner.runtime.trim()
    return Ahead(steps=steps, seconds=time.perf_counter() - begin, report=report)


def steps_ahead(runner: Runner, limits: StepLimits) -> Iterator[tuple[StepPlan, Variant]]:
    """Yield a dummy step of each kind that a first request may run eagerly: of fixed shapes all; else prompts of small
    and of all tokens, behind decode rows too, decode rows, draws by each filter; each short and at the longest."""
    if not runner.backend.shapes.dynamic:
        yield from product(fixed_plans(runner, limits), variants(runner))
        return
    config = runner.config
    longest, rows = config.max_model_len, min(config.max_num_seqs, config.max_num_batched_tokens)
    most = min(config.max_num_batched_tokens, longest)
    for bound in (1, longest):
        for tokens in sorted({tokens for tokens in (1, *CHUNK_TOKENS) if tokens < most} | {most}):
            yield prefill_plan(runner, 1, tokens, bound), Variant()
        if rows > 1:
            counts = np.array((1, min(most, CHUNK_TOKENS[0]) - 1), np.int32).clip(1)
            yield dummy_plan(runner, counts, np.maximum(counts, bound), 1), Variant()
            yield decode_plan(runner, rows, bound), Variant()
    for flags in (0, TOP_K, TOP_P, TOP_K | TOP_P):
        yield decode_plan(runner, 1, 1), Variant(flags=NON_GREEDY | flags)
    if runner.tables.adjusting is not None:
        yield decode_plan(runner, 1, 1), Variant(flags=ADJUSTED)


def run_largest(runner: Runner, limits: StepLimits) -> None:
    """Run the steps that need the most memory: prompts of all tokens, as few and long as the context allows, then a
    full batch that samples."""
    prompts = min(limits.rows, fewest_rows(limits.tokens, runner.config.max_model_len))
    tokens = min(limits.tokens, prompts * runner.config.max_model_len)
    run_dummy(runner, prefill_plan(runner, prompts, tokens, 1), Variant())
    rows = min(limits.rows, limits.tokens)
    run_dummy(runner, decode_plan(runner, rows, 1), Variant(flags=EVERY_FILTER | adjusts(runner)))


def variants(runner: Runner) -> tuple[Variant, ...]:
    """Return what steps of one shape may need beside each other, each op of it in at least one variant."""
    drafts = (DRAFTS if runner.config.max_drafts else 0) | adjusts(runner)
    found = [
        Variant(),
        Variant(flags=EVERY_FILTER | LOGPROBS | DELTA | drafts),
        Variant(flags=EVERY_FILTER | LOGPROBS | drafts, late=True),
        Variant(late=True),
        Variant(flags=POOLING),
        Variant(embeds=True),
    ]
    if any(rope.sections for rope in getattr(runner.decoder.spec, "ropes", ())):
        found.append(Variant(flags=DELTA, grid=True))
    return tuple(found)


def adjusts(runner: Runner) -> int:
    """Return the facts of rows whose logits are changed, where there can be any."""
    return ADJUSTED if runner.tables.adjusting is not None else 0


def run_dummy(runner: Runner, plan: StepPlan, variant: Variant) -> None:
    """Run one plan to its end. Its rows are the padding row: tokens go to the null block."""
    tables, row = runner.tables, runner.tables.padding_row
    plan = varied(runner, plan, variant)
    tables.mark(row, variant.flags)
    tables.logprobs[row] = MAX_LOGPROBS if variant.flags & LOGPROBS else -1
    tables.pooling = {row: "mean"} if variant.flags & POOLING else {}
    carry = None if runner.config.first else runner.passes.embed(plan, runner.runtime.from_host(plan.prompt_ids))
    runner.forward(plan, carry)
    if runner.config.last:
        runner.sample(plan.plan_id, None)
        if plan.late_rows:
            runner.sample(plan.plan_id, all_allowed(plan, runner.decoder.spec.vocabulary))
    result = runner.poll(True)
    assert result is not None
    if result.failure:
        what = f"{plan.num_rows} rows and {plan.num_tokens} tokens"
        raise DeviceError(f"warm-up with {what} failed ({result.failure_class}): {result.failure}")


def varied(runner: Runner, plan: StepPlan, variant: Variant) -> StepPlan:
    """Return the plan with what the variant asks for."""
    if variant.late:
        plan = replace(plan, late_rows=tuple(range(plan.num_rows)))
    if variant.embeds:
        values = np.zeros((1, runner.decoder.spec.hidden), np.float32)
        plan = replace(plan, embeds=(EmbedRun(offset=0, values=values),))
    if variant.grid:
        plan = replace(plan, positions=(PositionRun(offset=0, values=np.zeros((3, 1), np.int32)),))
    return plan


def all_allowed(plan: StepPlan, vocabulary: int) -> LateInput:
    """Return late input that allows every token in every late row."""
    verify = range(plan.num_decode, plan.num_decode + plan.num_verify)
    count = sum(int(plan.num_new[i]) if i in verify else 1 for i in plan.late_rows)
    mask = np.full((count, -(-vocabulary // 32)), -1, np.int32)
    return LateInput(indices=np.array(plan.late_rows, np.int32), mask=mask)


def fixed_plans(runner: Runner, limits: StepLimits) -> Iterator[StepPlan]:
    """Yield a step for each (tokens, rows, blocks) that a plan within the limits can be padded to, and one
    with every kind of change to rows, blocks and states."""
    policy, builder = runner.backend.shapes, runner.builder
    yield changes_plan(runner)
    longest = sorted({min(b, max(builder.max_widths, default=1)) for b in policy.blocks_per_row or (1,)})
    for tokens, rows in reachable(policy, limits, runner.config.max_model_len):
        for blocks in longest:
            length = blocks * max(builder.block_tokens, default=1)
            yield prefill_plan(runner, rows, tokens, length)
            if runner.config.max_drafts and (plan := verify_plan(runner, rows, tokens, length)) is not None:
                yield plan


def fewest_rows(tokens: int, longest: int) -> int:
    """Return how many sequences of up to ``longest`` tokens a step of so many query tokens takes at least."""
    return -(-tokens // longest)


def reachable(policy: ShapePolicy, limits: StepLimits, longest: int) -> list[tuple[int, int]]:
    """Return one real (tokens, rows) for each pair of buckets that some plan within the limits is padded to;
    ``longest``: tokens of a sequence."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for rows in range(1, limits.rows + 1):
        for tokens in sorted({rows, limits.tokens, *policy.tokens, *(size - 1 for size in policy.tokens)}):
            if not rows <= tokens <= min(limits.tokens, rows * longest):
                continue
            padded_tokens = next((t for t in policy.tokens if t >= tokens), tokens)
            needed = rows + (1 if padded_tokens > tokens else 0)
            padded_rows = next((r for r in policy.rows if r >= needed), None if policy.rows else needed)
            if padded_rows is not None:
                found[padded_tokens, padded_rows] = (tokens, rows)
    return list(found.values())


def changes_plan(runner: Runner) -> StepPlan:
    """Return a step of one token with a start, a block change, in all groups a freed block, a zeroed one and a
    copy, and for recurrent groups an export; all of them of the padding row and the null block."""
    tables, row = runner.tables, runner.tables.padding_row
    start = RowStart(
        row=row,
        request_id=-1,
        epoch=0,
        computed=0,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        sample_index=0,
        adjust=None if tables.adjusting is None else tables.adjusting.dummy(),
    )
    groups = [place.plan_group for place in runner.passes.places]
    states = [place.plan_group for place in runner.passes.places if place.paged is None]
    return replace(
        decode_plan(runner, 1, 1),
        starts=(start,),
        blocks=np.array([(row, group, 0, 0) for group in groups[:1]], np.int32).reshape(-1, 4),
        freed=tuple((group, np.zeros(1, np.int32)) for group in groups),
        zeroed=tuple((group, 0) for group in groups),
        copies=tuple(BlockCopy(group=group, source=0, target=0) for group in groups),
        exports=tuple(StateExport(group=group, index=0, offset=0, block=0) for group in states),
    )


def verify_plan(runner: Runner, rows: int, tokens: int, longest: int) -> StepPlan | None:
    """Return a dummy plan whose first row verifies drafts, None where that shape can't have one."""
    if rows == 1:
        plan = prefill_plan(runner, 1, tokens, longest)
        return replace(plan, num_verify=1) if tokens <= runner.config.max_drafts + 1 else None
    rest = prefill_plan(runner, rows - 1, tokens - 1, longest)
    counts = np.concatenate((np.ones(1, np.int32), rest.num_new))
    return replace(dummy_plan(runner, counts, np.maximum(counts, longest), 0), num_verify=1)
