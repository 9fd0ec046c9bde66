"""The scheduler of one replica: decides which tokens each step computes. No torch, no device, no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drivetrain.cache.connector import Connector
from drivetrain.cache.manager import CacheManager
from drivetrain.params import Finished, GenerateRequest, StepOutputs
from drivetrain.sched import admission
from drivetrain.sched.building import build_plan
from drivetrain.sched.committing import commit_result
from drivetrain.sched.grammar import GrammarSession
from drivetrain.sched.plan import LateInput, StepPlan, StepResult
from drivetrain.sched.policy import Policy, fair
from drivetrain.sched.request import RequestTable
from drivetrain.sched.state import SchedulerConfig, SchedulerState

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges (0 when nothing is queued or running; not ``cached_blocks``) and counters since the start."""

    waiting: int
    running: int
    waiting_remote: int
    pinned: int
    cache_used: int
    cache_total: int
    cached_blocks: int
    cache_use: float
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    finished: int
    plans: int


class Scheduler:
    """Continuous batching with chunked prompts, prefix reuse and preemption by recomputing.

    Calls come from one thread: ``add`` and ``abort`` at any time, ``schedule`` to get the next plan, ``commit`` with
    each plan's result in the order of plans.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        *,
        policy: Policy = fair,
        connector: Connector | None = None,
    ) -> None:
        if config.fixed_chunk > config.max_num_batched_tokens:
            raise ValueError(f"chunks of {config.fixed_chunk} do not fit {config.max_num_batched_tokens} tokens a step")
        if config.fixed_chunk % cache.granule:
            raise ValueError(f"chunks of {config.fixed_chunk} are no multiple of {cache.granule}, what blocks cover")
        table = RequestTable(config.max_num_seqs, config.max_model_len, config.max_adjusted_seqs)
        self._state = SchedulerState(config=config, cache=cache, table=table, policy=policy, connector=connector)

    def add(self, request: GenerateRequest, grammar: GrammarSession | None = None) -> None:
        """Queue a request. RequestError when it can never run."""
        admission.add(self._state, request, grammar)

    def abort(self, request_id: int) -> None:
        """End a request; unknown ones are ignored. Its tokens in flight are dropped."""
        end = admission.abort(self._state, request_id)
        if end is not None:
            self._state.ended.append(end)

    def schedule(self) -> StepPlan | None:
        """Return the next plan, or None when nothing can run before something is committed or arrives."""
        admission.poll_connector(self._state)
        self._state.settle()
        return build_plan(self._state)

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Take in the oldest uncommitted plan's result."""
        self._state.settle()
        outputs = commit_result(self._state, plan, result)
        return self._with_late(outputs) if self._state.late_outputs else outputs

    def _with_late(self, outputs: StepOutputs) -> StepOutputs:
        """Add the tokens of requests that were preempted while these were in flight."""
        late, self._state.late_outputs = self._state.late_outputs, []
        return StepOutputs(
            request_ids=np.concatenate([outputs.request_ids, np.array([r for r, _ in late], np.int64)]),
            counts=np.concatenate([outputs.counts, np.array([len(t) for _, t in late], np.int32)]),
            tokens=np.concatenate([outputs.tokens, *(np.array(t, np.int32) for _, t in late)]),
            started=outputs.started,
            finished=outputs.finished,
            logprobs=outputs.logprobs,
        )

    def settle(self) -> None:
        """Let go of the blocks of requests that ended. Whatever needs them does so itself; it may be called before."""
        self._state.settle()

    def late_input(self, plan: StepPlan) -> LateInput | None:
        """Return the masks that a plan's late rows wait for, or None while an earlier token of theirs is unknown.

        Rows that ended since are left out.
        """
        table = self._state.table
        index = np.array(plan.late_rows, np.int32)
        index = index[table.epoch[plan.rows[index]] == plan.epochs[index]]
        rows = plan.rows[index]
        if (table.in_flight[rows] > 1).any():
            return None
        masks = []
        for row in rows.tolist():
            request = table.requests[row]
            assert request is not None and request.grammar is not None
            masks.append(request.grammar.mask())
        table.unsampled[rows] = False
        return LateInput(indices=index, mask=np.stack(masks) if masks else np.zeros((0, 0), np.int32))

    def take_events(self) -> tuple[StepOutputs, ...]:
        """Return what ended outside a commit: aborts, loads that were given up."""
        if not self._state.ended:
            return ()
        ended: tuple[Finished, ...] = tuple(self._state.ended)
        self._state.ended = []
        empty = np.zeros(0, np.int32)
        return (StepOutputs(request_ids=np.zeros(0, np.int64), counts=empty, tokens=empty, finished=ended),)

    def has_work(self) -> bool:
        """Return whether any request or event is left, running or not."""
        return bool(self._state.requests or self._state.ended or self._state.pinned)

    def reset_prefix_cache(self) -> None:
        """Forget all named blocks; what rows hold stays valid for them."""
        self._state.settle()
        self._state.cache.pool.clear_index()

    @property
    def cache(self) -> CacheManager:
        """Who owns the blocks."""
        return self._state.cache

    def stats(self) -> SchedulerStats:
        """Return the present figures."""
        state = self._state
        state.settle()
        return SchedulerStats(
            waiting=len(state.waiting),
            running=state.table.max_rows - state.table.num_free - len(state.remote),
            waiting_remote=len(state.remote),
            pinned=len(state.pinned),
            cache_used=state.cache.num_held,
            cache_total=state.cache.num_blocks,
            cached_blocks=sum(len(group.cached) for group in state.cache.pool.groups),
            cache_use=state.cache.use,
            preemptions=state.totals.preemptions,
            prefix_query_tokens=state.totals.prefix_queries,
            prefix_hit_tokens=state.totals.prefix_hits,
            finished=state.totals.finished,
            plans=state.next_plan,
        )

    def check_integrity(self) -> None:
        """AssertionError naming the first inconsistency of counters, tables, holders, slabs and index."""
        state = self._state
        state.settle()
        state.table.check_integrity()
        rows = {row for row, request in enumerate(state.table.requests) if request is not None}
        remote = {request.row for request in state.remote.values()}
        assert not set(state.decoding) & set(state.prefilling), "a row both decodes and is in mid-prompt"
        assert set(state.decoding) | set(state.prefilling) | remote <= rows, "a row without a request"
        seated = [r.request_id for r in state.table.requests if r is not None]
        places = [*(r.request_id for r in state.waiting), *seated]
        assert sorted(places) == sorted(state.requests), "a request is in no place, or in two"
        assert set(state.departed_plans) >= set(state.departed), "a lost row waits for no plan"
        assert state.in_flight or not (state.departed_plans or state.writing.plan_of or state.writing.hits), "leftovers"
        state.cache.check_integrity([pair for held in state.pinned.values() for pair in held])
