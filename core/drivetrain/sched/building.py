"""Making one plan: decode rows first, then prompts by policy; blocks are allocated, and taken back by preemption."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drivetrain.sched.admission import announce, eligible, load_remote, lookup, open_row
from drivetrain.sched.plan import EMPTY, EmbedRun, PositionRun, StateExport, StepPlan
from drivetrain.sched.policy import Candidate, Share
from drivetrain.sched.request import Request, State
from drivetrain.sched.state import SchedulerState

NO_ROWS = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class Prompts:
    """The prefill part of a plan under construction, in batch order."""

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    sample: list[bool] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Query tokens so far."""
        return sum(self.num_new)


def build_plan(state: SchedulerState) -> StepPlan | None:
    """Make the next plan, or None when nothing can run now."""
    before = state.totals.preemptions
    decode, num_new = decode_part(state, state.config.max_num_batched_tokens)
    admits = state.totals.preemptions == before  # who has just lost a row must not take blocks back at once
    prompts = prefill_part(state, state.config.max_num_batched_tokens - int(num_new.sum()), admits)
    if not len(decode) and not prompts.rows:
        if not state.in_flight and (victim := worst_row(state)) is not None and len(state.prefilling) > 1:
            state.preempt(victim)  # rows in mid-prompt hold all blocks: none could ever go on
            return build_plan(state)
        return None
    return assemble(state, decode, num_new, prompts)


def decode_part(state: SchedulerState, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose the rows that decode in this step and allocate for them; returns rows and query tokens of each.

    A row near its length limit waits until what is in flight is known, so that the limit is never overrun.
    """
    rows = state.rows_decoding()
    if not len(rows):
        return NO_ROWS, NO_ROWS
    table = state.table
    room = table.limit[rows] - 1 - table.reserved[rows]
    ready = (room > 0) & ~table.unsampled[rows]
    if not ready.all():
        rows, room = rows[ready], room[ready]
    if state.config.max_drafts:
        num_new = np.where(table.late[rows], 1, np.minimum(room, 1 + state.config.max_drafts)).astype(np.int32)
    else:
        num_new = np.ones(len(rows), np.int32)
    if int(num_new.sum()) > budget:
        turn = state.next_plan % len(rows)
        rows, num_new = np.roll(rows, -turn), np.roll(num_new, -turn)
        fits = np.cumsum(num_new) <= budget
        rows, num_new = rows[fits], num_new[fits]
    rows, num_new = _allocate(state, rows, num_new)
    if state.config.max_drafts:
        order = np.argsort(num_new > 1, kind="stable")
        rows, num_new = rows[order], num_new[order]
    return rows, num_new


def _allocate(state: SchedulerState, rows: np.ndarray, num_new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slide windows, then give every row its blocks; rows are preempted, worst first, until the others have theirs."""
    table = state.table
    if state.config.max_drafts:
        state.cache.slide(rows, table.confirmed[rows] + table.in_flight[rows])
    else:
        state.cache.slide(rows, table.reserved[rows])
    while len(rows):
        if state.cache.extend_rows(rows, table.reserved[rows] + num_new) is None:
            break
        victim = worst_row(state)
        assert victim is not None, "a decoding row is running"
        state.preempt(victim)
        keep = rows != victim
        rows, num_new = rows[keep], num_new[keep]
    return rows, num_new


def worst_row(state: SchedulerState) -> int | None:
    """Return the row to preempt: the highest priority number, then the latest arrival."""
    rows = [*state.decoding, *state.prefilling]
    if not rows:
        return None

    def rank(row: int) -> tuple[int, int]:
        request = state.table.requests[row]
        assert request is not None
        return request.asked.priority, request.order

    return max(rows, key=rank)


def prefill_part(state: SchedulerState, budget: int, admits: bool) -> Prompts:
    """Choose prompt chunks within the budget, by policy over rows in mid-prompt and waiting requests."""
    prompts = Prompts()
    if budget < 1 or not (state.prefilling or state.waiting):
        return prompts
    table = state.table
    waiting = [r for r in state.waiting if eligible(state, r)] if admits and table.num_free else []
    requests = [*state.prefilling.values(), *waiting]
    candidates = [
        Candidate(
            remaining=int(table.target[r.row] - table.reserved[r.row]) if r.row >= 0 else len(r.tokens),
            order=r.order,
            priority=r.asked.priority,
            skipped=r.skipped,
        )
        for r in requests
    ]
    served: set[int] = set()
    blocked = False
    for share in state.policy(candidates, budget, state.next_plan):
        left = budget - prompts.num_tokens
        if left < 1:
            break
        request = requests[share.index]
        if share.index in served or (blocked and request.row < 0):
            continue
        took = serve(state, request, share, left, prompts)
        if took:
            served.add(share.index)
        elif request.row < 0 and request.state is State.WAITING:
            blocked = True
    for index, request in enumerate(requests):
        request.skipped = 0 if index in served else request.skipped + 1
    return prompts


def serve(state: SchedulerState, request: Request, share: Share, left: int, prompts: Prompts) -> bool:
    """Give one request its turn; False when it gets none (no row, no blocks, or a fixed chunk that does not fit)."""
    most = min(left, share.cap) if share.cap else left
    if request.row < 0:
        return _admit(state, request, most, prompts)
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
    if not state.table.num_free:
        return False
    hit = lookup(state, request)
    if state.connector is not None and request.asked.pooling is None:
        request.chain.extend(request.tokens, len(request.tokens))
        loading = load_remote(state, request, hit, state.connector)
        if loading is not None:
            if loading:
                state.waiting.remove(request)
            return False
    num = chunk(state, hit, len(request.tokens), most)
    if not num or not _headroom(state) or not open_row(state, request, hit, hit + num):
        return False
    state.waiting.remove(request)
    announce(state, request, hit)
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
    table.reserve(np.array([row]), np.array([num], np.int32))
    prompts.rows.append(row)
    prompts.starts.append(begin)
    prompts.num_new.append(num)
    ends = begin + num == int(table.target[row])
    prompts.sample.append(ends)
    if not ends:
        return
    del state.prefilling[row]
    if request.asked.pooling is None:
        state.decoding[row] = None
        state.decode_rows = None
    if request.asked.fanout is not None:
        state.fanouts[request.asked.fanout].written = True


def assemble(state: SchedulerState, decode: np.ndarray, num_decode_new: np.ndarray, prompts: Prompts) -> StepPlan:
    """Put the parts together, count what is reserved, and publish prompt blocks for the plans that follow."""
    table = state.table
    if len(decode):
        table.reserve(decode, num_decode_new)
    num_verify = int((num_decode_new > 1).sum())
    rows = np.concatenate([decode, np.array(prompts.rows, np.int32)]) if prompts.rows else decode
    plan_id = state.next_plan
    state.next_plan += 1
    state.in_flight.add(plan_id)
    exports = _exports(state, prompts, len(decode))
    published = _publish(state, prompts)
    if published:
        state.published[plan_id] = published
    late = table.late[rows] & np.concatenate([np.ones(len(decode), bool), np.array(prompts.sample, bool)])
    table.unsampled[rows[late]] = True
    changes = state.cache.take_changes()
    starts, state.starts = tuple(state.starts), []
    ends, state.ends = tuple(state.ends), []
    return StepPlan(
        plan_id=plan_id,
        rows=rows,
        epochs=table.epoch[rows],
        num_new=_joined(num_decode_new, prompts.num_new),
        start=_joined(np.full(len(decode), -1, np.int32), prompts.starts),
        bounds=table.reserved[rows],
        sample=np.concatenate([np.ones(len(decode), bool), np.array(prompts.sample, bool)]),
        num_decode=len(decode) - num_verify,
        num_verify=num_verify,
        prompt_ids=_prompt_ids(state, prompts),
        starts=starts,
        ends=ends,
        blocks=changes.blocks,
        zeroed=changes.zeroed,
        copies=changes.copies,
        exports=exports,
        late_rows=tuple(np.flatnonzero(late).tolist()),
        embeds=_embeds(state, prompts, int(num_decode_new.sum())),
        positions=_positions(state, prompts, int(num_decode_new.sum())),
    )


def _joined(decode: np.ndarray, prompts: list[int]) -> np.ndarray:
    return np.concatenate([decode, np.array(prompts, np.int32)]) if prompts else decode


def _prompt_ids(state: SchedulerState, prompts: Prompts) -> np.ndarray:
    parts = zip(prompts.rows, prompts.starts, prompts.num_new, strict=True)
    chunks = [state.table.tokens[row, begin : begin + num] for row, begin, num in parts]
    return np.concatenate(chunks) if chunks else EMPTY


def _publish(state: SchedulerState, prompts: Prompts) -> list[tuple[int, int]]:
    """Name prompt blocks that this plan fills: plans ordered after it may share them."""
    new: list[tuple[int, int]] = []
    for row in prompts.rows:
        request = state.table.requests[row]
        assert request is not None
        if state.caches(request) and request.asked.pooling is None:
            upto = int(state.table.reserved[row])
            request.chain.extend(state.table.tokens[row], upto)
            new += state.cache.publish(row, request.chain.digests, upto)
            state.table.hashed[row] = upto // state.cache.unit
    return new


def _exports(state: SchedulerState, prompts: Prompts, num_decode: int) -> tuple[StateExport, ...]:
    """Checkpoint recurrent states at unit boundaries inside the chunks of this plan."""
    found: list[StateExport] = []
    every = max(state.config.checkpoint_tokens // state.cache.unit, 1) * state.cache.unit
    for group in state.cache.recurrent:
        parts = zip(prompts.rows, prompts.starts, prompts.num_new, strict=True)
        for index, (row, begin, num) in enumerate(parts, num_decode):
            request = state.table.requests[row]
            assert request is not None
            if not state.caches(request) or request.asked.pooling is not None:
                continue
            request.chain.extend(state.table.tokens[row], begin + num)
            for at in range((begin // every + 1) * every, begin + num + 1, every):
                block = state.cache.checkpoint(group, request.chain.digests, at)
                if block:
                    found.append(StateExport(group=group.number, index=index, offset=at - begin, block=block))
    return tuple(found)


def _embeds(state: SchedulerState, prompts: Prompts, offset: int) -> tuple[EmbedRun, ...]:
    """Embeddings for the prompt tokens of this plan that have them; generated tokens have ids."""
    runs = []
    for row, begin, num in zip(prompts.rows, prompts.starts, prompts.num_new, strict=True):
        request = state.table.requests[row]
        assert request is not None
        values = request.asked.embeds
        if values is not None and begin < len(values):
            runs.append(EmbedRun(offset=offset, values=values[begin : begin + num]))
        offset += num
    return tuple(runs)


def _positions(state: SchedulerState, prompts: Prompts, offset: int) -> tuple[PositionRun, ...]:
    """Positions of three rows for the prompt tokens of this plan; generated tokens go on from the largest."""
    runs = []
    for row, begin, num in zip(prompts.rows, prompts.starts, prompts.num_new, strict=True):
        request = state.table.requests[row]
        assert request is not None
        given = request.asked.positions
        if given is not None:
            after = int(given.max()) + 1 + np.arange(max(0, begin + num - given.shape[1]), dtype=np.int32)
            whole = np.concatenate([given.astype(np.int32), np.broadcast_to(after, (3, len(after)))], axis=1)
            runs.append(PositionRun(offset=offset, values=whole[:, begin : begin + num]))
        offset += num
    return tuple(runs)
