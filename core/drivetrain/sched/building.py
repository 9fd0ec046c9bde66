"""Making one plan: decode rows first, then prompts by policy; blocks are allocated, and taken back by preemption."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drivetrain.moments import passed
from drivetrain.sched.admission import announce, eligible, load_remote, lookup, open_row
from drivetrain.sched.decoding import Decode, decode_part, worst_row
from drivetrain.sched.plan import EMPTY, EmbedRun, PositionRun, StateExport, StepPlan
from drivetrain.sched.policy import Candidate, Share
from drivetrain.sched.request import Request
from drivetrain.sched.state import SchedulerState

HINTS_A_STEP = 4


@dataclass(slots=True, eq=False)
class Prompts:
    """The prefill part of a plan under construction, in batch order.

    ``last``: rows that begin with their last token alone, which go with the decode rows; ``rewritten``: (group, block,
    request) of named blocks whose last token is written anew.
    """

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    sample: list[bool] = field(default_factory=list)
    num_tokens: int = 0
    last: list[int] = field(default_factory=list)
    rewritten: list[tuple[int, int, int]] = field(default_factory=list)


def build_plan(state: SchedulerState) -> StepPlan | None:
    """Make the next plan, or None when nothing can run now."""
    before = state.totals.preemptions
    budget = state.config.max_num_batched_tokens
    decode = decode_part(state, budget)
    admits = state.totals.preemptions == before  # who has just lost a row must not take blocks back at once
    prompts = prefill_part(state, budget - decode.num_tokens, admits)
    if len(decode.rows) or prompts.rows or prompts.last:
        return assemble(state, decode, prompts)
    return build_plan(state) if not state.in_flight and admits and unstick(state) else None


def unstick(state: SchedulerState) -> bool:
    """Make room when blocks lack and nothing is in flight that could free some; False when there is nothing to try.

    Rows in mid-prompt may hold all blocks, so that none can go on. One alone, or none, may lack blocks only because
    those of its prefix lie scattered over slabs: it then begins again without them.
    """
    if state.prefilling:
        victim = worst_row(state)
        assert victim is not None, "a row in mid-prompt is running"
        alone = len(state.prefilling) == 1
        state.preempt(victim)
        if alone:
            state.cache.pool.clear_index()
        return True
    if state.stuck and any(group.index for group in state.cache.pool.groups):
        state.stuck = False
        state.cache.pool.clear_index()
        return True
    return False


def prefill_part(state: SchedulerState, budget: int, admits: bool) -> Prompts:
    """Choose prompt chunks within the budget, by policy over rows in mid-prompt and waiting requests."""
    prompts = Prompts()
    if budget < 1 or not (state.prefilling or state.waiting):
        return prompts
    admits = admits and not state.stuck and state.table.num_free > 0
    waiting = [r for r in state.waiting if eligible(state, r)] if admits else []
    requests = [*state.prefilling.values(), *waiting]
    if not requests:
        return prompts
    if len(requests) > 1:  # with one, there is nothing that a policy could weigh
        _refresh_hints(state, waiting)
    candidates = [_candidate(state, request) for request in requests]
    tried, served = set[int](), set[int]()
    for share in state.policy(candidates, budget, state.next_plan):
        left = budget - prompts.num_tokens
        if left < 1:
            break
        if share.index in tried:  # a policy may name a request twice
            continue
        tried.add(share.index)
        if serve(state, requests[share.index], share, left, prompts):
            served.add(share.index)
    for at, request in enumerate(requests):
        request.skipped = 0 if at in served else request.skipped + 1
    return prompts


def _candidate(state: SchedulerState, request: Request) -> Candidate:
    if request.row >= 0:
        remaining = int(state.table.target[request.row] - state.table.reserved[request.row])
    else:
        remaining = len(request.tokens) - max(0, request.hint)
    return Candidate(remaining, request.order, request.asked.priority, request.skipped)


def _refresh_hints(state: SchedulerState, waiting: list[Request]) -> None:
    """Ask how much of waiting requests is cached: of all new ones, and again of a few others in turn."""
    for request in waiting:
        if request.hint < 0:
            request.hint = lookup(state, request)
    for i in range(min(HINTS_A_STEP, len(waiting))):
        request = waiting[(state.next_plan * HINTS_A_STEP + i) % len(waiting)]
        request.hint = lookup(state, request)


def serve(state: SchedulerState, request: Request, share: Share, left: int, prompts: Prompts) -> bool:
    """Give one request its turn; False when it gets none (no row, no blocks, or a fixed chunk that does not fit)."""
    most = min(left, max(share.cap, state.config.fixed_chunk)) if share.cap else left
    if request.row < 0:
        return not state.stuck and _admit(state, request, most, prompts)
    row = request.row
    begin = int(state.table.reserved[row])
    num = chunk(state, begin, int(state.table.target[row]), most)
    if not num:
        return False
    state.cache.slide(np.array([row]), np.array([begin]))
    if not state.cache.extend(row, begin + num):
        return False
    _append(state, request, begin, num, prompts)
    return True


def _admit(state: SchedulerState, request: Request, most: int, prompts: Prompts) -> bool:
    if not state.table.num_free or not state.table.has_slot(request):
        return False
    hit = request.hint = lookup(state, request)
    passed("looked up")
    if state.connector is not None and state.caches(request):
        loading = load_remote(state, request, hit, state.connector)
        if loading is not None:
            if loading:
                state.waiting.remove(request)
            return False
    num = chunk(state, hit, len(request.tokens), most)
    if not num:
        return False
    if not _headroom(state):
        state.stuck = True
        return False
    if not open_row(state, request, hit, hit + num):
        return False
    state.waiting.remove(request)
    announce(state, request, hit)
    if hit % state.cache.granule and state.caches(request):
        blocks = state.cache.last_blocks(request.chain.digests, hit + 1)
        prompts.rewritten += [(group, block, request.request_id) for group, block in blocks]
    if state.starts[-1].last_token >= 0:
        state.table.reserve(np.array([request.row]), np.array([hit + 1], np.int32))
        prompts.last.append(request.row)
        prompts.num_tokens += 1
        _decodes(state, request)
    else:
        _append(state, request, hit, num, prompts)
    return True


def _headroom(state: SchedulerState) -> bool:
    """Keep about a step's worth of blocks for rows that decode, so that admission does not cause preemption at once."""
    if not state.decoding:
        return True
    pool = state.cache.pool
    return all(
        pool.available(group.number) > len(state.decoding) // group.plan.block_tokens for group in state.cache.paged
    )


def chunk(state: SchedulerState, begin: int, target: int, most: int) -> int:
    """Return how many tokens from ``begin`` to compute: as many as fit, or a whole fixed chunk."""
    fixed = state.config.fixed_chunk
    if not fixed:
        return min(target - begin, most)
    whole = min(target, (begin // fixed + 1) * fixed) - begin
    return whole if whole <= most else 0


def _append(state: SchedulerState, request: Request, begin: int, num: int, prompts: Prompts) -> None:
    table, row = state.table, request.row
    table.reserve(np.array([row]), np.array([begin + num], np.int32))
    prompts.rows.append(row)
    prompts.starts.append(begin)
    prompts.num_new.append(num)
    prompts.num_tokens += num
    ends = begin + num == int(table.target[row])
    prompts.sample.append(ends)
    if ends:
        _decodes(state, request)


def _decodes(state: SchedulerState, request: Request) -> None:
    """All of a prompt is out: its row decodes from the next plan on."""
    del state.prefilling[request.row]
    if request.asked.pooling is None:
        state.decoding[request.row] = None
        state.decode_rows = None
    if request.asked.fanout is not None:
        state.fanouts[request.asked.fanout].written = True


def assemble(state: SchedulerState, decode: Decode, prompts: Prompts) -> StepPlan:
    """Put the parts together, count what is reserved, and publish prompt blocks for the plans that follow."""
    table, ones, num_decode = state.table, state.ones, len(decode.rows)
    plan_id = state.next_plan
    state.next_plan += 1
    state.in_flight[plan_id] = [table.at(row).request_id for row in (*prompts.rows, *prompts.last)]
    table.reserve(decode.index, decode.bounds)
    if prompts.last:
        decode, num_decode = _with_last(state, decode, prompts.last), num_decode + len(prompts.last)
    rows, index, num_new, bounds = decode.rows, decode.index, decode.num_new, decode.bounds
    start, sample = ones.minus(num_decode), ones.trues(num_decode)
    exports: tuple[StateExport, ...] = ()
    if prompts.rows:
        rows = np.concatenate([rows, np.array(prompts.rows, np.int32)])
        index = rows.astype(np.intp)
        num_new = np.concatenate([num_new, np.array(prompts.num_new, np.int32)])
        start = np.concatenate([start, np.array(prompts.starts, np.int32)])
        sample = np.concatenate([sample, np.array(prompts.sample, bool)])
        bounds = np.concatenate([bounds, table.reserved[index[num_decode:]]])
        exports, states = _exports(state, prompts, num_decode)
        state.writing.note(plan_id, _publish(state, prompts) + states + prompts.rewritten)
    elif prompts.rewritten:
        state.writing.note(plan_id, prompts.rewritten)
    changes = state.cache.take_changes()
    starts, state.starts = tuple(state.starts), []
    ends, state.ends = tuple(state.ends), []
    return StepPlan(
        plan_id=plan_id,
        rows=rows,
        epochs=table.epoch[index],
        num_new=num_new,
        start=start,
        bounds=bounds,
        sample=sample,
        num_decode=num_decode - decode.num_verify,
        num_verify=decode.num_verify,
        prompt_ids=_prompt_ids(state, prompts) if prompts.rows else EMPTY,
        starts=starts,
        ends=ends,
        blocks=changes.blocks,
        freed=changes.freed,
        zeroed=changes.zeroed,
        copies=changes.copies,
        exports=exports,
        late_rows=_late_rows(state, index, sample) if table.num_late else (),
        embeds=_embeds(state, prompts, decode.num_tokens) if prompts.rows else (),
        positions=_positions(state, prompts, decode.num_tokens) if prompts.rows else (),
    )


def _with_last(state: SchedulerState, decode: Decode, last: list[int]) -> Decode:
    """Add rows that begin with their last token; there are no drafts where such rows are."""
    index = np.array(last, np.intp)
    return Decode(
        rows=np.concatenate([decode.rows, index.astype(np.int32)]),
        index=np.concatenate([decode.index, index]),
        num_new=state.ones.ints(len(decode.rows) + len(last)),
        bounds=np.concatenate([decode.bounds, state.table.reserved[index]]),
    )


def _late_rows(state: SchedulerState, index: np.ndarray, sample: np.ndarray) -> tuple[int, ...]:
    late = state.table.late[index] & sample
    state.table.unsampled[index[late]] = True
    return tuple(np.flatnonzero(late).tolist())


def _prompt_ids(state: SchedulerState, prompts: Prompts) -> np.ndarray:
    parts = zip(prompts.rows, prompts.starts, prompts.num_new, strict=True)
    chunks = [state.table.tokens[row, begin : begin + num] for row, begin, num in parts]
    return np.concatenate(chunks) if chunks else EMPTY


def _publish(state: SchedulerState, prompts: Prompts) -> list[tuple[int, int, int]]:
    """Name prompt blocks that this plan fills, so that plans ordered after it may share them."""
    new: list[tuple[int, int, int]] = []
    table, unit = state.table, state.cache.unit
    for row in prompts.rows:
        request = table.at(row)
        if state.caches(request):
            upto = int(table.reserved[row]) // unit * unit
            request.chain.extend(table.tokens[row], upto)
            named = state.cache.publish(row, request.chain.digests, int(table.published[row]), upto)
            new += [(group, block, request.request_id) for group, block in named]
            table.published[row] = upto
    return new


def _exports(
    state: SchedulerState, prompts: Prompts, num_decode: int
) -> tuple[tuple[StateExport, ...], list[tuple[int, int, int]]]:
    """Checkpoint recurrent states at unit boundaries inside the chunks of this plan; the second value: their blocks."""
    found: list[StateExport] = []
    written: list[tuple[int, int, int]] = []
    every = max(state.config.checkpoint_tokens // state.cache.granule, 1) * state.cache.granule
    for group in state.cache.recurrent:
        parts = zip(prompts.rows, prompts.starts, prompts.num_new, strict=True)
        for index, (row, begin, num) in enumerate(parts, num_decode):
            request = state.table.at(row)
            if not state.caches(request):
                continue
            request.chain.extend(state.table.tokens[row], begin + num)
            for at in range((begin // every + 1) * every, begin + num + 1, every):
                if (at - begin) % group.plan.checkpoint_alignment:
                    continue
                block = state.cache.checkpoint(group, request.chain.digests, at)
                if block:
                    found.append(StateExport(group=group.number, index=index, offset=at - begin, block=block))
                    written.append((group.number, block, request.request_id))
    return tuple(found), written


def _embeds(state: SchedulerState, prompts: Prompts, offset: int) -> tuple[EmbedRun, ...]:
    """Embeddings for the prompt tokens of this plan that have them; generated tokens have ids."""
    runs = []
    for row, begin, num in zip(prompts.rows, prompts.starts, prompts.num_new, strict=True):
        request = state.table.at(row)
        values = request.asked.embeds
        if values is not None and begin < len(values):
            runs.append(EmbedRun(offset=offset, values=values[begin : begin + num]))
        offset += num
    return tuple(runs)


def _positions(state: SchedulerState, prompts: Prompts, offset: int) -> tuple[PositionRun, ...]:
    """Positions of three rows for the prompt tokens of this plan; generated tokens go on from the largest."""
    runs = []
    for row, begin, num in zip(prompts.rows, prompts.starts, prompts.num_new, strict=True):
        request = state.table.at(row)
        given = request.asked.positions
        if given is not None:
            after = int(given.max()) + 1 + np.arange(max(0, begin + num - given.shape[1]), dtype=np.int32)
            whole = np.concatenate([given.astype(np.int32), np.broadcast_to(after, (3, len(after)))], axis=1)
            runs.append(PositionRun(offset=offset, values=whole[:, begin : begin + num]))
        offset += num
    return tuple(runs)
