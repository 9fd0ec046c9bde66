"""What a result changes: counters, tokens, ends, names of blocks. Arrays over the rows; Python only for what ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drivetrain.params import Finished, StepOutputs, TokenLogprobs
from drivetrain.sched.plan import StepPlan, StepResult
from drivetrain.sched.request import Request, stop_ids
from drivetrain.sched.state import SchedulerState


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Tokens that a step added. ``valid`` [B, m]: which places count; ``stopped``: batch row -> reason and end token, for
    rows that met an end token or their limit."""

    valid: np.ndarray
    stopped: dict[int, tuple[str, int | None]]


def commit_result(state: SchedulerState, plan: StepPlan, result: StepResult) -> StepOutputs:
    """Take a plan's result in; plans are committed in the order in which they were made."""
    state.in_flight.discard(plan.plan_id)
    published = state.published.pop(plan.plan_id, [])
    alive = state.table.epoch[plan.rows] == plan.epochs
    everyone = bool(alive.all())
    if result.failure:
        return _failed(state, plan, result, alive, published)
    if not everyone:
        _departed(state, plan, result, np.flatnonzero(~alive))
    index = np.arange(plan.num_rows) if everyone else np.flatnonzero(alive)
    rows, num_new = plan.rows[index], plan.num_new[index]
    counts, tokens = result.counts[index], result.tokens[index]
    kept = np.where(plan.start[index] >= 0, num_new, counts)
    state.table.confirm(rows, num_new, kept)
    drawn = _append(state, rows, counts, tokens)
    ids = state.table.request_id[rows]
    accepted = drawn.valid.sum(1, dtype=np.int32)
    some = accepted > 0
    out_ids, out_counts, out_tokens = ids[some], accepted[some], tokens[drawn.valid]
    reports = _reports(state, result, rows, index, drawn)
    refused = _grammar(state, rows, tokens, drawn)
    _publish(state, rows)
    ended = _ends(state, result, rows, index, drawn, refused) if _any_end(result, drawn, refused) else []
    started, state.started = tuple(state.started), []
    others, state.ended = tuple(state.ended), []
    return StepOutputs(
        request_ids=out_ids,
        counts=out_counts,
        tokens=out_tokens,
        started=started,
        finished=(*others, *ended),
        logprobs=reports,
    )


def _append(state: SchedulerState, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> Drawn:
    """Make drawn tokens known, place by place, until a row meets an end token or its limit."""
    table = state.table
    valid = np.zeros(tokens.shape, bool)
    stopped: dict[int, tuple[str, int | None]] = {}
    active = counts > 0
    for place in range(tokens.shape[1]):
        index = np.flatnonzero(active)
        if not len(index):
            break
        here, drew = rows[index], tokens[index, place]
        table.append(here, drew)
        stop = (drew[:, None] == table.stops[here]).any(1)
        if table.many_stops:
            for i, row in enumerate(here.tolist()):
                if row in table.many_stops:
                    stop[i] = int(drew[i]) in table.many_stops[row]
        full = table.known[here] >= table.limit[here]
        valid[index, place] = ~stop
        for i in np.flatnonzero(stop | full).tolist():
            stopped[int(index[i])] = ("stop", int(drew[i])) if stop[i] else ("length", None)
        active = counts > place + 1
        if stopped:
            active[list(stopped)] = False
    return Drawn(valid, stopped)


def _reports(
    state: SchedulerState, result: StepResult, rows: np.ndarray, index: np.ndarray, drawn: Drawn
) -> tuple[tuple[int, TokenLogprobs], ...]:
    """Turn the result's log-probabilities into values, for tokens that count and requests that asked."""
    lines = result.logprobs
    if lines is None:
        return ()
    place_of = {int(batch): i for i, batch in enumerate(index)}
    found = []
    for i in range(len(lines.index)):
        at, place = place_of.get(int(lines.index[i])), int(lines.place[i])
        if at is None or not drawn.valid[at, place]:
            continue
        request = state.table.requests[int(rows[at])]
        assert request is not None
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
    if not state.table.late[rows].any():
        return refused
    for at in np.flatnonzero(state.table.late[rows]).tolist():
        request = state.table.requests[int(rows[at])]
        assert request is not None and request.grammar is not None
        for token in tokens[at][drawn.valid[at]].tolist():
            if not request.grammar.accept(int(token)):
                refused[at] = f"its grammar does not allow token {token}"
                break
    return refused


def _publish(state: SchedulerState, rows: np.ndarray) -> None:
    """Name the blocks of decoding rows whose last unit is confirmed now."""
    table, unit = state.table, state.cache.unit
    units = table.confirmed[rows] // unit
    for at in np.flatnonzero(units > table.hashed[rows]).tolist():
        row = int(rows[at])
        request = table.requests[row]
        assert request is not None
        table.hashed[row] = units[at]
        if state.config.prefix_caching and request.asked.pooling is None:
            confirmed = int(table.confirmed[row])
            request.chain.extend(table.tokens[row], confirmed)
            state.cache.publish(row, request.chain.digests, confirmed)


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
    broken = {int(at): "the model's logits were not finite" for at in np.flatnonzero(np.isin(index, result.non_finite))}
    vectors = dict(result.pooled)
    for at, reason in {**broken, **refused}.items():
        ended.append(state.fail(_at(state, rows, at), reason))
    for at, (why, token) in drawn.stopped.items():
        if at not in broken and at not in refused:
            ended.append(state.end(_at(state, rows, at), "stop" if why == "stop" else "length", token))
    for at, number in enumerate(index.tolist()) if vectors else ():
        if number in vectors and at not in broken:
            request = _at(state, rows, at)
            ended.append(
                state.finish(
                    request,
                    Finished(request_id=request.request_id, reason="stop", pooled=_pooled(request, vectors[number])),
                )
            )
    return ended


def _pooled(request: Request, vector: np.ndarray) -> np.ndarray:
    pooling = request.asked.pooling
    if pooling is not None and pooling.normalize:
        return (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
    return vector


def _at(state: SchedulerState, rows: np.ndarray, at: int) -> Request:
    request = state.table.requests[int(rows[at])]
    assert request is not None
    return request


def _departed(state: SchedulerState, plan: StepPlan, result: StepResult, lost: np.ndarray) -> None:
    """Accept tokens of requests that were preempted after this plan was made; drop those of ended ones."""
    for at in lost.tolist():
        epoch = int(plan.epochs[at])
        left = state.departed_plans.get(epoch, 0) - 1
        if left > 0:
            state.departed_plans[epoch] = left
        else:
            state.departed_plans.pop(epoch, None)
        request = state.departed.get(epoch)
        if request is None:
            continue
        if left <= 0:
            del state.departed[epoch]
            request.departed.discard(epoch)
        if not result.failure:
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


def _failed(
    state: SchedulerState, plan: StepPlan, result: StepResult, alive: np.ndarray, published: list[tuple[int, int]]
) -> StepOutputs:
    """A step failed: withdraw what it was to write, and end its requests and those that already use it."""
    message = f"the step failed: {result.failure}"
    _departed(state, plan, result, np.flatnonzero(~alive))
    doomed: dict[int, Request] = {}
    for row in plan.rows[alive].tolist():
        request = state.table.requests[row]
        assert request is not None
        state.table.in_flight[row] -= 1
        doomed[request.request_id] = request
    lost = set(published)
    for row, other in enumerate(state.table.requests):
        if other is not None and lost.intersection(state.cache.held(row)):
            doomed[other.request_id] = other
    for group, block in published:
        state.cache.pool.unname(group, block)
    ended = [state.fail(request, message) for request in doomed.values()]
    others, state.ended = tuple(state.ended), []
    started, state.started = tuple(state.started), []
    empty = np.zeros(0, np.int32)
    return StepOutputs(
        request_ids=np.zeros(0, np.int64),
        counts=empty,
        tokens=empty,
        started=started,
        finished=(*others, *ended),
    )
