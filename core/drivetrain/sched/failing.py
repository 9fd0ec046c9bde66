"""What a failed step takes along: what it was to write, what was built on that, and whose tokens came of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drivetrain.cache.manager import Held
from drivetrain.params import Finished
from drivetrain.sched.request import State
from drivetrain.sched.state import SchedulerState


def fail_step(
    state: SchedulerState, plan_id: int, failure: str, rows: np.ndarray, prompts: Sequence[int]
) -> list[Finished]:
    """End the requests of a failed plan (``rows``: those still running) and all that depends on them.

    ``prompts``: the requests whose prompts the plan was to compute, even those that have left their rows.
    """
    writing = state.writing
    written = writing.blocks.get(plan_id, ())
    lost = {(group, block) for group, block, _ in written if writing.plan_of.get((group, block)) == plan_id}
    tainted = {*prompts, *(state.table.at(int(row)).request_id for row in rows)}
    _spread(state, lost, tainted)
    _withdraw(state, lost)
    writing.done(plan_id)
    state.table.give_up(rows)
    ended = []
    for request_id in sorted(tainted & set(state.requests)):
        request = state.requests[request_id]
        if request.state is State.WAITING:
            state.drop_flights(request)  # it lost its row before; it is computed anew, without these tokens
            continue
        if request.state is State.WAITING_REMOTE:
            request.again = True
        elif not state.table.in_flight[request.row] and request.row not in rows:
            state.preempt(request.row, keep=False)  # nothing was computed yet from what it shares
        else:
            ended.append(state.fail(request, f"the step failed: {failure}"))
    return ended


def _spread(state: SchedulerState, lost: set[Held], tainted: set[int]) -> None:
    """Add what plans in flight made of ``lost`` and ``tainted``: readers of lost blocks, and what those wrote."""
    size = -1
    while size != len(lost) + len(tainted):
        size = len(lost) + len(tainted)
        for hits in state.writing.hits.values():
            tainted.update(reader for reader, group, block in hits if (group, block) in lost)
        for plan_id, blocks in state.writing.blocks.items():
            for group, block, writer in blocks:
                if writer in tainted and state.writing.plan_of.get((group, block)) == plan_id:
                    lost.add((group, block))


def _withdraw(state: SchedulerState, lost: set[Held]) -> None:
    for group, block in lost:
        state.cache.pool.unname(group, block)
        state.writing.plan_of.pop((group, block), None)


def drop_lost(state: SchedulerState, blocks: Sequence[Held]) -> None:
    """Blocks turned out not to hold what they should: requests that read them are computed anew, from before them.

    The tokens of the step that says so, and of later ones, are dropped for these requests.
    """
    lost = set(blocks)
    running = [state.table.at(row) for row in (*state.decoding, *state.prefilling)]
    tainted = {r.request_id for r in running if lost.intersection(state.cache.held(r.row))}
    _spread(state, lost, tainted)
    _withdraw(state, lost)
    for request_id in sorted(tainted & set(state.requests)):
        request = state.requests[request_id]
        state.cache.withdraw(request.chain.digests)
        if request.state is State.RUNNING:
            state.preempt(request.row, keep=False)
        elif request.state is State.WAITING_REMOTE:
            request.again = True
        else:
            state.drop_flights(request)
