"""What a result changes: counters, tokens, ends, names of blocks. Arrays over the rows; Python only for what ends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from drivetrain.params import Finished, StepOutputs, TokenLogprobs
from drivetrain.sched.failing import drop_lost, fail_step
from drivetrain.sched.plan import EMPTY, StepPlan, StepResult
from drivetrain.sched.request import Request, stop_ids
from drivetrain.sched.state import SchedulerState, period

PUBLISH_EVERY = 8  # steps at most
UNITS_AT_LEAST = 8
NO_IDS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Tokens that a step added. ``valid`` [B, m]: which places count; ``stopped``: batch row -> reason and end token,
    for rows that met an end token or their limit."""

    valid: np.ndarray
    stopped: dict[int, tuple[str, int | None]]


def commit_result(state: SchedulerState, plan: StepPlan, result: StepResult) -> StepOutputs:
    """Take a plan's result in; plans are committed in the order in which they were made."""
    table = state.table
    prompts = state.in_flight.pop(plan.plan_id)
    for request_id in result.transfers_done:
        state.release(request_id)
    if result.invalid_blocks:
        drop_lost(state, result.invalid_blocks)
    rows = plan.rows.astype(np.intp)
    alive = table.epoch[rows] == plan.epochs
    everyone = np.count_nonzero(alive) == len(rows)
    if not everyone:
        _departed(state, plan, result, np.flatnonzero(~alive))
    if result.failure:
        ended = fail_step(state, plan.plan_id, result.failure, rows[alive], prompts)
        return _outputs(state, ended, NO_IDS, EMPTY, EMPTY)
    state.writing.done(plan.plan_id)
    index = alive.nonzero()[0]
    num_new, start, counts, tokens = plan.num_new, plan.start, result.counts, result.tokens
    if not everyone:
        rows, num_new, start = rows[index], num_new[index], start[index]
        counts, tokens = counts[index], tokens[index]
    exact = not plan.num_verify and np.count_nonzero(counts) == len(rows) and not len(result.non_finite)
    kept = num_new if exact else np.where(start >= 0, num_new, counts)
    confirmed = table.confirm(rows, num_new, kept)
    drawn = (
        _append_one(state, rows, tokens[:, 0])
        if exact and tokens.shape[1] == 1
        else _append(state, rows, counts, tokens)
    )
    reports = _reports(state, result, rows, index, drawn) if result.logprobs is not None else ()
    refused = _grammar(state, rows, tokens, drawn) if table.num_late else {}
    ids, accepted, out_tokens = _columns(table.request_id[rows], tokens, drawn.valid)
    if state.config.prefix_caching and plan.plan_id % period(len(rows), PUBLISH_EVERY) == 0:
        _publish(state, rows, confirmed)
    ended = _ends(state, result, rows, index, drawn, refused) if _any_end(result, drawn, refused) else []
    outputs = _outputs(state, ended, ids, accepted, out_tokens)
    return replace(outputs, logprobs=reports) if reports else outputs


def _columns(ids: np.ndarray, tokens: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return request ids, counts and tokens of the rows that have any."""
    if np.count_nonzero(valid) == len(valid) and tokens.shape[1] == 1:
        return ids, valid[:, 0].astype(np.int32), tokens[:, 0]
    counts = valid.sum(1, dtype=np.int32)
    some = counts > 0
    return ids[some], counts[some], tokens[valid]


def _outputs(
    state: SchedulerState, ended: list[Finished], ids: np.ndarray, counts: np.ndarray, tokens: np.ndarray
) -> StepOutputs:
    """Return tokens, what has started, and what has ended since that was last told."""
    started, state.started = tuple(state.started), []
    others, state.ended = tuple(state.ended), []
    finished = (*others, *ended)
    return StepOutputs(request_ids=ids, counts=counts, tokens=tokens, started=started, finished=finished)


def _append_one(state: SchedulerState, rows: np.ndarray, drew: np.ndarray) -> Drawn:
    """The same as ``_append`` where every row drew one token."""
    table = state.table
    known, stop = table.append(rows, drew), table.stops_at(rows, drew)
    over = known >= table.limit[rows]
    stopped: dict[int, tuple[str, int | None]] = {}
    if np.count_nonzero(stop) or np.count_nonzero(over):
        for i in (stop | over).nonzero()[0].tolist():
            stopped[i] = ("stop", int(drew[i])) if stop[i] else ("length", None)
    return Drawn(~stop[:, None], stopped)


def _append(state: SchedulerState, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> Drawn:
    """Make drawn tokens known, place by place, until a row meets an end token or its limit."""
    table = state.table
    valid = np.zeros(tokens.shape, bool)
    stopped: dict[int, tuple[str, int | None]] = {}
    active = counts > 0
    for place in range(tokens.shape[1]):
        index = active.nonzero()[0]
        if not len(index):
            break
        every = len(index) == len(rows)
        here = rows if every else rows[index]
        drew = tokens[:, place] if every else tokens[index, place]
        known = table.append(here, drew)
        stop = table.stops_at(here, drew)
        valid[index, place] = ~stop
        over = stop | (known >= table.limit[here])
        if np.count_nonzero(over):
            for i in over.nonzero()[0].tolist():
                stopped[int(index[i])] = ("stop", int(drew[i])) if stop[i] else ("length", None)
        if place + 1 < tokens.shape[1]:
            active = counts > place + 1
            active[list(stopped)] = False
    return Drawn(valid, stopped)


def _reports(
    state: SchedulerState, result: StepResult, rows: np.ndarray, index: np.ndarray, drawn: Drawn
) -> tuple[tuple[int, TokenLogprobs], ...]:
    """Turn the result's log-probabilities into values, for tokens that count and requests that asked."""
    lines = result.logprobs
    assert lines is not None, "asked for only where there are any"
    place_of = {int(batch): i for i, batch in enumerate(index)}
    found = []
    for i in range(len(lines.index)):
        at, place = place_of.get(int(lines.index[i])), int(lines.place[i])
        if at is None or not drawn.valid[at, place]:
            continue
        request = state.table.at(int(rows[at]))
        most = request.asked.sampling.logprobs
        if most is None:
            continue
        found.append(
            (
                request.request_id,
                TokenLogprobs(
                    token=int(result.tokens[int(lines.index[i]), place]),
                    logprob=float(lines.logprob[i]),
                    rank=int(lines.rank[i]),
                    top_ids=tuple(lines.top_ids[i, :most].tolist()),
                    top_logprobs=tuple(lines.top_logprobs[i, :most].tolist()),
                ),
            )
        )
    return tuple(found)


def _grammar(state: SchedulerState, rows: np.ndarray, tokens: np.ndarray, drawn: Drawn) -> dict[int, str]:
    """Move automata on; returns batch rows whose automaton refuses a token that was drawn under its own mask."""
    refused: dict[int, str] = {}
    for at in np.flatnonzero(state.table.late[rows]).tolist():
        grammar = state.table.at(int(rows[at])).grammar
        assert grammar is not None, "late rows have a grammar"
        for token in tokens[at][drawn.valid[at]].tolist():
            if not grammar.accept(int(token)):
                refused[at] = f"its grammar does not allow token {token}"
                break
    return refused


def _publish(state: SchedulerState, rows: np.ndarray, confirmed: np.ndarray) -> None:
    """Name the blocks of decoding rows whose next unit is confirmed; called every few steps.

    At most about twice as many rows as complete a unit on average: where many do so at once, the rest follow with the
    next calls, and each at the latest when it leaves its row.
    """
    table, unit = state.table, state.cache.unit
    begins = table.published[rows]
    due = (confirmed - begins >= unit).nonzero()[0]
    if not len(due):
        return
    tokens = period(len(rows), PUBLISH_EVERY) * (1 + state.config.max_drafts) * len(rows)
    due = due[: UNITS_AT_LEAST + 2 * tokens // unit]
    rows, begins = rows[due], begins[due]
    table.published[rows] = begins + unit
    data = table.tokens[rows[:, None], begins[:, None] + state.places].astype("<i4", copy=False).tobytes()
    units, size, at, digests = begins // unit, 4 * unit, 0, []
    requests = table.requests
    for row, number in zip(rows.tolist(), units.tolist(), strict=True):
        request = requests[row]
        assert request is not None, "a row that is alive has a request"
        known = request.chain.digests
        digests.append(known[number] if len(known) > number else request.chain.push(data[at : at + size]))
        at += size
    state.cache.publish_units(rows, units, digests)


def _any_end(result: StepResult, drawn: Drawn, refused: dict[int, str]) -> bool:
    return bool(drawn.stopped or refused or result.pooled or len(result.non_finite))


def _ends(
    state: SchedulerState,
    result: StepResult,
    rows: np.ndarray,
    index: np.ndarray,
    drawn: Drawn,
    refused: dict[int, str],
) -> list[Finished]:
    """End the requests that are done, and those that failed by themselves."""
    ended: list[Finished] = []
    broken = np.flatnonzero(np.isin(index, result.non_finite)).tolist() if len(result.non_finite) else []
    for at in broken:
        request = state.table.at(int(rows[at]))
        state.cache.withdraw(request.chain.digests)
        ended.append(state.fail(request, "the model's logits were not finite"))
    for at, reason in refused.items():
        if at not in broken:
            ended.append(state.fail(state.table.at(int(rows[at])), reason))
    for at, (why, token) in drawn.stopped.items():
        if at not in broken and at not in refused:
            request = state.table.at(int(rows[at]))
            ended.append(state.end(request, "stop" if why == "stop" else "length", token))
    vectors = dict(result.pooled)
    for at, number in enumerate(index.tolist()) if vectors else ():
        if number in vectors and at not in broken:
            request = state.table.at(int(rows[at]))
            end = Finished(request_id=request.request_id, reason="stop", pooled=_pooled(request, vectors[number]))
            ended.append(state.finish(request, end))
    return ended


def _pooled(request: Request, vector: np.ndarray) -> np.ndarray:
    pooling = request.asked.pooling
    if pooling is not None and pooling.normalize:
        return (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
    return vector


def _departed(state: SchedulerState, plan: StepPlan, result: StepResult, lost: np.ndarray) -> None:
    """Accept tokens of requests that were preempted after this plan was made; drop those of ended ones."""
    for at in lost.tolist():
        epoch = int(plan.epochs[at])
        left = state.departed_plans[epoch] - 1
        if left:
            state.departed_plans[epoch] = left
        else:
            del state.departed_plans[epoch]
        request = state.departed.get(epoch)
        if request is None:
            continue
        if result.failure or at in result.non_finite:
            state.drop_flights(request)  # what follows in this epoch came of nothing
            continue
        if not left:
            state.drop_flights(request)
        _late_tokens(state, request, result.tokens[at, : result.counts[at]])


def _late_tokens(state: SchedulerState, request: Request, tokens: np.ndarray) -> None:
    """Give a waiting request the tokens that were in flight when it lost its row."""
    ends = stop_ids(request.asked)
    kept: list[int] = []
    over: tuple[str, int | None] | None = None
    for token in tokens.tolist():
        if token in ends:
            over = ("stop", token)
            break
        kept.append(token)
        if request.grammar is not None and not request.grammar.accept(token):
            state.ended.append(state.fail(request, f"its grammar does not allow token {token}"))
            return
        if len(request.tokens) + len(kept) >= request.limit:
            over = ("length", None)
            break
    if kept:
        request.tokens = np.concatenate([request.tokens, np.array(kept, np.int32)])
        state.late_outputs.append((request.request_id, kept))
    if over is not None:
        state.ended.append(state.end(request, "stop" if over[0] == "stop" else "length", over[1]))
