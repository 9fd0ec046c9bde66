"""The decode part of a plan: which rows go on by a token, their blocks, and who loses its row for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from drivetrain.sched.state import SchedulerState, period

NO_ROWS = np.zeros(0, np.int32)
AHEAD = 4  # steps at most


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decode:
    """The decode part of a plan: rows (int32, and intp as numpy's indices are), query tokens of each, and the upper
    bound of its length after the step; the last ``num_verify`` rows have more than one query token."""

    rows: np.ndarray
    index: np.ndarray
    num_new: np.ndarray
    bounds: np.ndarray
    num_verify: int = 0

    def only(self, which: np.ndarray) -> Decode:
        """Return the rows that a mask or an index selects."""
        return Decode(
            rows=self.rows[which], index=self.index[which], num_new=self.num_new[which], bounds=self.bounds[which]
        )

    @property
    def num_tokens(self) -> int:
        """Query tokens in all."""
        return int(self.num_new.sum()) if self.num_verify else len(self.rows)


NO_DECODE = Decode(rows=NO_ROWS, index=NO_ROWS.astype(np.intp), num_new=NO_ROWS, bounds=NO_ROWS)


def decode_part(state: SchedulerState, budget: int) -> Decode:
    """Choose the rows that decode in this step and allocate for them.

    A row near its length limit waits until what is in flight is known, so that the limit is never overrun.
    """
    if not state.decoding:
        return NO_DECODE
    rows, index = state.rows_decoding()
    table, drafts = state.table, state.config.max_drafts
    reserved = table.reserved[index]
    room = table.limit[index] - reserved
    ready = room > 1
    if table.num_late:
        ready &= ~table.unsampled[index]
    if drafts:
        alone = table.late[index] | (table.slot[index] >= 0)
        num_new = np.minimum(room - 1, np.where(alone, 1, 1 + drafts)).astype(np.int32)
    else:
        num_new = state.ones.ints(len(rows))
    decode = Decode(rows=rows, index=index, num_new=num_new, bounds=reserved + num_new)
    if np.count_nonzero(ready) < len(rows):
        decode = decode.only(ready)
    if len(decode.rows) * (1 + drafts) > budget:
        decode = _in_turn(state, decode, budget)
    decode = _allocate(state, decode)
    return _verify_last(decode) if drafts else decode


def _in_turn(state: SchedulerState, decode: Decode, budget: int) -> Decode:
    """Cut the rows to the budget; where they don't all fit, each step begins where the last one ended."""
    if int(decode.num_new.sum()) <= budget:
        return decode
    turn = state.next_plan * budget % len(decode.rows)
    chosen = np.roll(np.arange(len(decode.rows)), -turn)
    return decode.only(chosen[np.cumsum(decode.num_new[chosen]) <= budget])


def _verify_last(decode: Decode) -> Decode:
    """Put rows with drafts behind those without."""
    drafted = decode.num_new > 1
    num_verify = int(np.count_nonzero(drafted))
    if num_verify not in (0, len(decode.rows)):
        decode = decode.only(np.argsort(drafted, kind="stable"))
    return replace(decode, num_verify=num_verify)


def _allocate(state: SchedulerState, decode: Decode) -> Decode:
    """Give every row its blocks; rows are preempted, worst first, until the others have theirs.

    Windows slide only for rows that need a block anyway.
    """
    table, cache, keep, upto = state.table, state.cache, None, decode.bounds
    lacking = upto > cache.horizon[decode.index]
    steps = period(len(decode.rows), AHEAD)
    if state.next_plan % steps == 0:
        lacking, upto = _look_ahead(state, decode, lacking, steps)
    if not np.count_nonzero(lacking):
        return decode
    while True:
        short = decode.index[lacking]
        sure = table.confirmed[short] + table.in_flight[short] if state.config.max_drafts else table.reserved[short]
        cache.slide(short, sure)
        if cache.extend_rows(short, upto[lacking]) is None:
            return decode if keep is None else decode.only(keep)
        victim = worst_row(state)
        assert victim is not None, "a decoding row is running"
        state.preempt(victim)
        upto = decode.bounds
        keep = decode.index != victim if keep is None else keep & (decode.index != victim)
        lacking &= keep


def _look_ahead(
    state: SchedulerState, decode: Decode, lacking: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Let rows that would need a block within some steps have it now, if there are plenty: one round of allocating then
    serves these steps together. Returns which rows to extend, and to how many tokens each."""
    soon = np.minimum(decode.bounds + (steps - 1) * (1 + state.config.max_drafts), state.table.limit[decode.index])
    early = soon > state.cache.horizon[decode.index]
    num = int(np.count_nonzero(early))
    return (early, soon) if num and state.cache.plenty(2 * num) else (lacking, decode.bounds)


def worst_row(state: SchedulerState) -> int | None:
    """Return the row to preempt: the highest priority number, then the latest arrival."""
    rows = [*state.decoding, *state.prefilling]
    if not rows:
        return None

    def rank(row: int) -> tuple[int, int]:
        request = state.table.at(row)
        return request.asked.priority, request.order

    return max(rows, key=rank)
