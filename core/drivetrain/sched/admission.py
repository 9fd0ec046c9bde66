"""From waiting to running: what a prompt finds in the cache, its row, and blocks that come from elsewhere."""

from __future__ import annotations

import numpy as np

from drivetrain.cache.connector import Connector
from drivetrain.errors import RequestError
from drivetrain.params import Finished, GenerateRequest, Started
from drivetrain.sched.adjusting import adjust_start, check_adjusts
from drivetrain.sched.grammar import GrammarSession
from drivetrain.sched.plan import RowStart
from drivetrain.sched.request import Request, State
from drivetrain.sched.state import Fanout, SchedulerState


def add(state: SchedulerState, asked: GenerateRequest, grammar: GrammarSession | None) -> None:
    """Queue a request. RequestError when it can never run."""
    check(state, asked)
    limit = min(len(asked.prompt_ids) + asked.max_tokens, state.config.max_model_len)
    if asked.pooling is not None:
        limit = len(asked.prompt_ids) + 1
    request = Request(
        asked=asked,
        order=state.next_order,
        chain=state.new_chain(asked),
        tokens=np.ascontiguousarray(asked.prompt_ids, np.int32),
        grammar=grammar,
        limit=limit,
    )
    state.next_order += 1
    state.requests[asked.request_id] = request
    state.waiting.append(request)
    state.stuck = False
    if asked.fanout is not None:
        fanout = state.fanouts.setdefault(asked.fanout, Fanout(leader=asked.request_id, members=0))
        fanout.members += 1


def check(state: SchedulerState, asked: GenerateRequest) -> None:
    """RequestError naming what makes a request impossible."""
    num, most = len(asked.prompt_ids), state.config.max_model_len
    if asked.request_id in state.requests or asked.request_id in state.pinned:
        raise RequestError(f"request {asked.request_id} is already queued", fix="number requests once")
    if num == 0:
        raise RequestError("the prompt is empty", fix="give at least one token", param="prompt")
    if num > most - (asked.pooling is None):
        raise RequestError(
            f"the prompt has {num} tokens, which leaves no room in the model's {most}",
            fix="shorten the prompt or raise --max-model-len",
            param="prompt",
            code="context_length_exceeded",
        )
    if asked.max_tokens < 1 and asked.pooling is None:
        raise RequestError(f"max_tokens is {asked.max_tokens}; it must be 1 or more", param="max_tokens")
    if asked.positions is not None and not state.config.grid_positions:
        raise RequestError("this model's positions have one row", fix="leave positions out", param="positions")
    if asked.adjusts:
        check_adjusts(asked, state.config.max_adjusted_seqs, state.config.vocabulary)
    for name, value in (("embeds", asked.embeds), ("positions", asked.positions)):
        if value is not None and value.shape[0 if name == "embeds" else 1] != num:
            raise RequestError(f"{name} has shape {list(value.shape)} for {num} prompt tokens", param=name)


def eligible(state: SchedulerState, request: Request) -> bool:
    """Return whether a waiting request may run now: nothing of it in flight, its leader's prompt written, a slot free
    where it needs one."""
    if request.departed or not state.table.has_slot(request):
        return False
    number = request.asked.fanout
    if number is None:
        return True
    fanout = state.fanouts[number]
    return fanout.written or fanout.leader == request.request_id


def lookup(state: SchedulerState, request: Request) -> int:
    """Return how many of a waiting request's tokens the cache holds; at least one token is left to compute.

    Where all are cached that is only the last one, if its block is nobody else's: it is computed anew in its old place.
    A block that a plan in flight writes must stay that plan's alone, so that all is found that its failure takes along.
    """
    num, fixed = len(request.tokens), state.config.fixed_chunk
    if not state.caches(request):
        return 0
    request.chain.extend(request.tokens, num)
    digests = request.chain.digests
    if not fixed and state.cache.rewritable(digests, num):
        writing = state.writing.plan_of
        if not writing or writing.keys().isdisjoint(state.cache.last_blocks(digests, num)):
            return num - 1
    return state.cache.longest(digests, num - 1, fixed)


def open_row(state: SchedulerState, request: Request, hit: int, upto: int) -> bool:
    """Give a request a row holding ``hit`` cached tokens and room for ``upto``; False when blocks lack."""
    row = state.table.start(request, hit)
    hit = -(-hit // state.cache.granule) * state.cache.granule  # with the block of a token that is computed anew
    shared = state.cache.open(row, request.chain.digests, hit)
    if shared is None or not state.cache.extend(row, upto):
        state.cache.close(row)
        state.table.stop(row)
        state.stuck = True
        return False
    if state.caches(request):
        state.table.published[row] = hit
    state.writing.shared(request.request_id, shared)
    return True


def goes_on(state: SchedulerState, request: Request, computed: int) -> bool:
    """Return whether a request's first step can be that of a decode row: one token is left, and it is plain text.

    With fixed chunks it is a chunk as it would be had nothing been cached, so that its values are the same.
    """
    asked, config = request.asked, state.config
    rare = asked.pooling or request.grammar or config.max_drafts or config.fixed_chunk or state.cache.recurrent
    return computed + 1 == len(request.tokens) and not rare and asked.embeds is None and asked.positions is None


def announce(state: SchedulerState, request: Request, computed: int) -> None:
    """Tell the runner of a row that starts, and the outside of what the cache gave."""
    asked, sampling = request.asked, request.asked.sampling
    delta = 0 if asked.positions is None else int(asked.positions.max()) + 1 - request.num_prompt
    plain = asked.pooling is None and request.grammar is None
    state.starts.append(
        RowStart(
            row=request.row,
            request_id=request.request_id,
            epoch=request.epoch,
            computed=computed,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=asked.seed,
            sample_index=asked.sample_index,
            logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
            late=request.grammar is not None,
            pooling=None if asked.pooling is None else asked.pooling.kind,
            position_delta=delta,
            max_drafts=state.config.max_drafts if plain and state.table.slot[request.row] < 0 else 0,
            last_token=int(request.tokens[-1]) if goes_on(state, request, computed) else -1,
            adjust=adjust_start(state, request),
        )
    )
    request.state = State.RUNNING
    state.prefilling[request.row] = request
    if not request.started:
        request.started = True
        request.num_cached = min(computed, request.num_prompt)
        state.started.append(Started(request_id=request.request_id, num_cached=request.num_cached))
        state.totals.prefix_queries += request.num_prompt
        state.totals.prefix_hits += request.num_cached


def load_remote(state: SchedulerState, request: Request, hit: int, connector: Connector) -> bool | None:
    """Ask the connector for more than the cache has: True when a load began, False when blocks lack, None when it has
    nothing to add. Connectors bring blocks of tokens; where there are recurrent states, none is asked."""
    if state.cache.recurrent:
        return None
    brings = min(connector.match(request.request_id, request.chain.digests, hit), len(request.tokens) - 1)
    brings = brings // state.cache.granule * state.cache.granule
    if brings <= hit:
        return None
    if not open_row(state, request, hit, brings):
        return False
    request.state, request.remote_tokens = State.WAITING_REMOTE, brings
    state.remote[request.request_id] = request
    connector.load(request.request_id, brings, state.cache.filled_elsewhere(request.row, hit))
    return True


def poll_connector(state: SchedulerState) -> None:
    """Let rows whose blocks arrived run, and let go of blocks that are not read any more."""
    if state.connector is None:
        return
    events = state.connector.poll()
    for arrival in events.arrivals:
        request = state.remote.pop(arrival.request_id)
        if request.doom is not None:
            state.ended.append(state.finish(request, request.doom))
            continue
        if request.again:
            request.again = False
            state.wait_again(request.row)
            continue
        hit = int(state.table.confirmed[request.row])
        valid = max(hit, min(arrival.num_tokens, request.remote_tokens) // state.cache.granule * state.cache.granule)
        row = request.row
        state.cache.unfilled(row, valid)
        state.table.arrived(row, valid)
        state.cache.slide(np.array([row]), np.array([valid]))
        state.publish_confirmed(row)  # before any plan, which might fail without harm to them
        state.cache.tell(row)
        announce(state, request, valid)
    for request_id in events.released:
        state.release(request_id)


def abort(state: SchedulerState, request_id: int) -> Finished | None:
    """End a request; None when it is unknown (it may just have ended) or must wait for a load to end."""
    request = state.requests.get(request_id)
    if request is None:
        return None
    if request.state is State.WAITING_REMOTE:
        request.doom = Finished(request_id=request_id, reason="abort")
        return None
    return state.end(request, "abort")
