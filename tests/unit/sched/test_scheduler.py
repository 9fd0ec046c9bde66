"""What the scheduler promises, one promise a test."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from drivetrain.cache.connector import Arrival, ConnectorEvents
from drivetrain.errors import ConfigError, RequestError
from drivetrain.loop import Loop
from drivetrain.params import PoolingParams
from drivetrain.sched.plan import LogprobRows, StepPlan, StepResult
from drivetrain.sched.policy import Candidate, fair, fcfs, policy_of, priority, shortest_uncached_first
from tests.unit.sched.fleet import Fleet
from tests.unit.sched.simulated import (
    END,
    FULL,
    STATE,
    WINDOW,
    Parity,
    SimulatedRunner,
    SlowConnector,
    ask,
    expected,
    make,
)


def setup(depth: int = 1, drafts: int = 0, **settings) -> tuple[Loop, SimulatedRunner]:
    scheduler, manager = make(max_drafts=drafts, **settings)
    runner = SimulatedRunner(manager, 8, drafts)
    if isinstance(settings.get("connector"), SlowConnector):
        settings["connector"].runner = runner
    return Loop(scheduler, runner, depth=depth), runner


def run(loop: Loop, most: int = 500) -> dict[int, tuple[list[int], object]]:
    """Run until nothing is left; returns tokens and Finished of each request."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, object] = {}
    for _ in range(most):
        if not loop.has_work():
            break
        for outputs in loop.step():
            at = 0
            for number, count in zip(outputs.request_ids.tolist(), outputs.counts.tolist(), strict=True):
                tokens.setdefault(number, []).extend(outputs.tokens[at : at + count].tolist())
                at += count
            for end in outputs.finished:
                ends[end.request_id] = end
    loop.check_integrity()
    return {number: (tokens.get(number, []), end) for number, end in ends.items()}


def prompt(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, num).astype(np.int32)


@pytest.mark.parametrize("drafts", [0, 3])
def test_outputs_do_not_depend_on_depth(drafts: int) -> None:
    def outputs(depth: int) -> dict:
        loop, _ = setup(depth, drafts, budget=220 * 1024)
        for number in range(12):
            loop.submit(ask(number, prompt(5 + 4 * number, number % 5), 20))
        return {number: (tokens, end.reason) for number, (tokens, end) in run(loop).items()}

    first = outputs(1)
    assert first == outputs(2) == outputs(3)
    assert first == {n: expected(prompt(5 + 4 * n, n % 5), 20) for n in range(12)}


def test_the_next_step_is_scheduled_before_the_tokens_of_this_one_are_known() -> None:
    scheduler, _ = make()
    scheduler.add(ask(0, prompt(9)))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None and second is not None
    assert (first.start.tolist(), second.start.tolist()) == ([0], [-1])
    assert second.bounds.tolist() == [10]


def test_length_limits_are_never_overrun_and_end_tokens_by_at_most_the_depth() -> None:
    for depth in (1, 2, 3):
        loop, runner = setup(depth)
        loop.submit(ask(0, prompt(5), 11, eos_ids=()))
        tokens, end = run(loop)[0]
        assert (len(tokens), end.reason) == (11, "length")
        assert sum(int(plan.num_new.sum()) for plan in runner.plans) == 5 + 10, "computed beyond the limit"
        seed = next(s for s in range(99) if expected(prompt(5, s), 30)[1] == "stop")
        wanted, _ = expected(prompt(5, seed), 30)
        loop, runner = setup(depth)
        loop.submit(ask(0, prompt(5, seed), 30))
        tokens, end = run(loop)[0]
        assert (tokens, end.reason, end.stop_token) == (wanted, "stop", END)
        assert sum(int(plan.num_new.sum()) for plan in runner.plans) <= 5 + len(wanted) + depth - 1


def test_stop_tokens_beyond_those_kept_by_row() -> None:
    many = tuple(range(20, 40))
    loop, _ = setup()
    loop.submit(ask(0, prompt(5), 40, eos_ids=(), sampling={"stop_token_ids": many}))
    tokens, end = run(loop)[0]
    assert (tokens, end.reason) == expected(prompt(5), 40, ends=many) and end.stop_token in many


def test_ignored_end_tokens_come_out() -> None:
    seed = next(s for s in range(99) if expected(prompt(5, s), 20)[1] == "stop")
    loop, _ = setup()
    loop.submit(ask(0, prompt(5, seed), 20, sampling={"ignore_eos": True}))
    tokens, end = run(loop)[0]
    assert (tokens, end.reason) == expected(prompt(5, seed), 20, ends=()) and END in tokens


class Counting:
    """Answers every plan with one token a sampling row; for tests of order, not of contents."""

    def __init__(self) -> None:
        self.results: deque[StepResult] = deque()

    def forward(self, plan: StepPlan) -> None:
        tokens = np.full((plan.num_rows, 1), 9, np.int32)
        self.results.append(StepResult(plan_id=plan.plan_id, tokens=tokens, counts=plan.sample.astype(np.int32)))

    def sample(self, plan_id: int, late: object) -> None:
        pass

    def later(self) -> bool:
        return False

    def poll(self, wait: bool) -> StepResult:
        return self.results.popleft()


@pytest.mark.parametrize("depth", [1, 2])
def test_short_prompts_are_not_starved_by_a_stream_of_long_ones(depth: int) -> None:
    """A 4,000-token prompt arrives every fourth step, more than can be computed; a 10-token request gets its first
    token within ceil(waiting short tokens / budget) + 2 steps. Some of the long ones end as well."""
    budget, random = 512, np.random.default_rng(0)
    scheduler, _ = make(
        budget=1 << 24, max_tokens=4200, max_num_batched_tokens=budget, max_num_seqs=256, unit=32, groups=(FULL,)
    )
    loop = Loop(scheduler, Counting(), depth=depth)
    arrivals: dict[int, tuple[int, int]] = {}
    first_token: dict[int, int] = {}
    waiting, long_ones, number = set(), set(), 0
    for step in range(300):
        lengths = [4000] if step % 4 == 0 and step < 200 else []
        lengths += [10] * (120 if step % 25 == 0 else int(random.integers(0, 4))) if step < 200 else []
        for length in lengths:
            loop.submit(ask(number, random.integers(10, 50, length), 2))
            if length == 10:
                waiting.add(number)
                arrivals[number] = (step, 10 * len(waiting))
            else:
                long_ones.add(number)
            number += 1
        for outputs in loop.step():
            for one in outputs.request_ids.tolist():
                first_token.setdefault(one, step)
                waiting.discard(one)
    assert len(arrivals) > 900
    for one, (arrived, tokens) in arrivals.items():
        steps = first_token[one] - arrived + 1
        assert steps <= -(-tokens // budget) + 2, f"request {one} waited {steps} steps, {tokens} short tokens queued"
    assert len(first_token.keys() & long_ones) >= 20, "long prompts go on as well"


def test_a_long_prompt_goes_on_under_a_flood_of_short_ones() -> None:
    loop, _ = setup(budget=1 << 22, max_num_batched_tokens=16, max_num_seqs=8)
    loop.submit(ask(0, prompt(90), 1))
    ended = False
    for number in range(1, 1500):
        loop.submit(ask(number, prompt(16, number), 1))
        ended |= any(end.request_id == 0 for outputs in loop.step() for end in outputs.finished)
    assert ended, "the long prompt was passed over for ever"


def test_policies_order_by_what_they_are_named_after() -> None:
    some = [Candidate(50, 0, 1, 0), Candidate(10, 1, 2, 0), Candidate(30, 2, 0, 0)]

    def order(policy) -> list[int]:
        return [share.index for share in policy(some, 100, 1)]

    assert order(fcfs) == [0, 1, 2]
    assert order(priority) == [2, 0, 1]
    assert order(shortest_uncached_first) == order(fair) == [1, 2, 0]
    aged = fair([some[0]._replace(skipped=16), *some[1:]], 100, 16)
    assert (aged[0].index, aged[0].cap) == (0, 25)
    assert policy_of("fair") is fair
    with pytest.raises(ConfigError, match="fcfs"):
        policy_of("fastest")


def test_shortest_first_counts_uncached_tokens() -> None:
    loop, _ = setup(max_num_batched_tokens=24)
    loop.submit(ask(0, prompt(80), 1))
    run(loop)
    loop.submit(ask(1, prompt(20, 9), 1))
    loop.submit(ask(2, np.concatenate([prompt(80), prompt(3, 5)]), 1))  # 83 tokens, 80 of them cached
    plan = loop.scheduler.schedule()
    assert plan is not None and plan.starts[0].request_id == 2 and plan.starts[0].computed == 80


def test_preempted_requests_give_the_same_tokens() -> None:
    loop, _ = setup(2, groups=(FULL,), budget=40 * 1024, policy=fcfs)
    for number in range(6):
        loop.submit(ask(number, prompt(30, number), 40, eos_ids=()))
    got = run(loop)
    assert loop.stats().preemptions > 0
    assert {n: tokens for n, (tokens, _) in got.items()} == {
        n: expected(prompt(30, n), 40, ends=())[0] for n in range(6)
    }


def test_the_latest_of_the_lowest_priority_loses_its_row() -> None:
    fleet = Fleet(0, groups=(FULL,), budget=40 * 1024, policy=fcfs)
    for number, urgency in enumerate((0, 2, 1, 2)):
        fleet.loop.submit(ask(number, prompt(6, number), 60, eos_ids=(), priority=urgency))
    state = fleet.scheduler._state
    for _ in range(60):
        if not state.totals.preemptions:
            fleet.loop.step()
    assert [request.request_id for request in state.waiting] == [3]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, STATE), (WINDOW, STATE, {**STATE, "layer_bytes": 64})])
def test_a_repeated_prompt_is_found(depth: int, groups: tuple) -> None:
    loop, runner = setup(depth, groups=groups, budget=1 << 20)
    first = prompt(70)
    loop.submit(ask(0, first, 4))
    assert run(loop)[0][0] == expected(first, 4)[0]
    loop.submit(ask(1, first, 4))
    got = run(loop)[1]
    assert (got[0], got[1].reason) == expected(first, 4)
    starts = [start for plan in runner.plans for start in plan.starts]
    assert [start.computed for start in starts] == [0, 64]
    assert loop.stats().prefix_hit_tokens == 64


def test_generated_tokens_are_found_too() -> None:
    loop, runner = setup(2)
    loop.submit(ask(0, prompt(10), 40, eos_ids=()))
    tokens = run(loop)[0][0]
    loop.submit(ask(1, np.concatenate([prompt(10), tokens[:38]]), 2, eos_ids=()))
    run(loop)
    assert runner.plans[-2].starts or runner.plans[-3].starts
    assert next(s.computed for plan in runner.plans for s in plan.starts if s.request_id == 1) == 40


def test_salted_and_adapted_prompts_share_nothing() -> None:
    loop, runner = setup()
    for number, fields in enumerate(({}, {"cache_salt": "a"}, {"adapter": "b"}, {"cache_salt": "a"})):
        loop.submit(ask(number, prompt(40), 2, **fields))
        run(loop)
    assert [s.computed for plan in runner.plans for s in plan.starts] == [0, 0, 0, 32]


def test_prompts_of_embeddings_are_named_by_their_content() -> None:
    loop, runner = setup()
    for number, value in enumerate((0.0, 1.0, 0.0)):
        loop.submit(ask(number, prompt(40), 2, embeds=np.full((40, 3), value, np.float32)))
        run(loop)
    assert [s.computed for plan in runner.plans for s in plan.starts] == [0, 0, 32]
    assert runner.plans[0].embeds[0].values.shape == (32, 3), "the chunk's part"


def test_positions_of_three_rows_go_on_from_the_largest() -> None:
    loop, runner = setup()
    positions = np.stack([np.arange(40), np.arange(40) // 2, np.arange(40) + 7]).astype(np.int32)
    loop.submit(ask(0, prompt(40), 2, positions=positions))
    run(loop)
    start, *_ = runner.plans[0].starts
    assert start.position_delta == 47 - 40
    runs = [run.values for plan in runner.plans for run in plan.positions]
    assert np.array_equal(np.concatenate(runs, axis=1), positions)


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_share_their_prompt(caching: bool) -> None:
    loop, runner = setup(2, prefix_caching=caching, budget=1 << 20)
    for sample in range(4):
        loop.submit(ask(sample, prompt(40), 6, sample_index=sample, fanout=77))
    loop.submit(ask(9, prompt(40), 6))
    got = run(loop)
    assert all(got[n][0] == expected(prompt(40), 6, n)[0] for n in range(4))
    computed = {s.request_id: s.computed for plan in runner.plans for s in plan.starts}
    assert [computed[n] for n in range(4)] == [0, 32, 32, 32]
    assert caching or computed[9] == 0, "with caching off only siblings share"


def test_a_leader_that_is_aborted_leaves_its_siblings_going() -> None:
    loop, _ = setup()
    for sample in range(3):
        loop.submit(ask(sample, prompt(40), 6, sample_index=sample, fanout=5))
    loop.abort(0)
    got = run(loop)
    assert (
        got[0][1].reason == "abort" and got[1][0] == expected(prompt(40), 6, 1)[0] and not loop.scheduler._state.fanouts
    )


def test_fixed_chunks_end_at_their_multiples_whatever_else_runs() -> None:
    for others in (0, 3):
        loop, runner = setup(fixed_chunk=16, budget=1 << 20, max_num_batched_tokens=40)
        for number in range(others):
            loop.submit(ask(100 + number, prompt(9 + number, number), 20))
        loop.submit(ask(0, prompt(70), 3))
        run(loop)
        row = next(s.row for plan in runner.plans for s in plan.starts if s.request_id == 0)
        ends = [
            int(plan.start[i] + plan.num_new[i])
            for plan in runner.plans
            for i in range(plan.num_rows)
            if plan.rows[i] == row and plan.start[i] >= 0 and plan.start[i] + plan.num_new[i] > 15
        ]
        assert [end for end in ends if end <= 70][-5:] == [16, 32, 48, 64, 70]


def test_an_aged_prompt_gets_a_whole_fixed_chunk() -> None:
    fleet = Fleet(0, fixed_chunk=16, max_num_batched_tokens=32)
    state = fleet.scheduler._state
    fleet.loop.submit(ask(0, prompt(60), 1))
    state.requests[0].skipped = 99
    state.next_plan = 16
    fleet.loop.submit(ask(1, prompt(10, 1), 1))
    plan = fleet.scheduler.schedule()
    assert plan is not None and plan.num_new.tolist() == [16, 10]


def test_grammar_rows_wait_for_their_mask_and_hold_nobody_up() -> None:
    loop, runner = setup(3)
    grammar = Parity()
    loop.submit(ask(0, prompt(9), 12, eos_ids=()), grammar)
    loop.submit(ask(1, prompt(9, 1), 12, eos_ids=()))
    got = run(loop)
    assert got[0][0] == expected(prompt(9), 12, ends=(), grammar=Parity())[0] == grammar.accepted
    assert got[1][0] == expected(prompt(9, 1), 12, ends=())[0]
    assert all(len(plan.late_rows) <= 1 for plan in runner.plans)


def test_late_input_is_refused_while_an_earlier_token_is_unknown() -> None:
    scheduler, manager = make()
    scheduler.add(ask(0, prompt(9), 12, eos_ids=()), Parity())
    runner = SimulatedRunner(manager, 8)
    first = scheduler.schedule()
    runner.forward(first)
    late = scheduler.late_input(first)
    runner.sample(first.plan_id, late)
    second = scheduler.schedule()
    assert second is not None and second.late_rows == (0,)
    assert scheduler.late_input(second) is None
    assert scheduler.schedule() is None, "a row is not scheduled again before its late sample is submitted"
    scheduler.commit(first, runner.poll(True))
    assert scheduler.late_input(second).mask.shape == (1, 2)


def test_a_token_that_the_grammar_refuses_ends_that_request_only() -> None:
    class Never(Parity):
        def accept(self, token: int) -> bool:
            return False

    loop, _ = setup(2)
    loop.submit(ask(0, prompt(9), 5), Never())
    loop.submit(ask(1, prompt(9, 1), 5))
    got = run(loop)
    assert got[0][1].reason == "error" and "grammar" in got[0][1].error
    assert (got[1][0], got[1][1].reason) == expected(prompt(9, 1), 5)


def test_a_pooled_vector_is_normalized_where_asked() -> None:
    loop, runner = setup(2)
    loop.submit(ask(0, prompt(70), pooling=PoolingParams()))
    end = run(loop)[0][1]
    assert end.reason == "stop" and np.linalg.norm(end.pooled) == pytest.approx(1.0)
    assert sum(int(plan.num_new.sum()) for plan in runner.plans) == 70


def test_log_probabilities_are_those_of_the_request_and_of_tokens_that_count() -> None:
    scheduler, _ = make()
    scheduler.add(ask(0, prompt(9), 5, eos_ids=(), sampling={"logprobs": 1}))
    scheduler.add(ask(1, prompt(8), 5, eos_ids=()))
    plan = scheduler.schedule()
    lines = LogprobRows(
        index=np.array([0, 1], np.int32),
        place=np.zeros(2, np.int32),
        logprob=np.array([-0.5, -1.0], np.float32),
        rank=np.array([1, 2], np.int32),
        top_ids=np.array([[3, 4], [5, 6]], np.int32),
        top_logprobs=np.array([[-0.5, -2.0], [-0.7, -1.0]], np.float32),
    )
    result = StepResult(
        plan_id=plan.plan_id, tokens=np.array([[3], [6]], np.int32), counts=np.ones(2, np.int32), logprobs=lines
    )
    asked = int(np.flatnonzero(scheduler._state.table.request_id[plan.rows] == 0)[0])
    ((number, report),) = scheduler.commit(plan, result).logprobs
    assert number == 0 and report.token == int(result.tokens[asked, 0])
    assert report.top_ids == (int(lines.top_ids[asked, 0]),) and report.rank == int(lines.rank[asked])


def test_rows_that_are_not_finite_end_alone_and_leave_nothing_in_the_index() -> None:
    scheduler, _ = make(budget=1 << 20, max_num_batched_tokens=64)
    scheduler.add(ask(0, prompt(24), 5, eos_ids=()))
    scheduler.add(ask(1, prompt(24, 1), 5, eos_ids=()))
    plan = scheduler.schedule()
    bad = int(np.flatnonzero(scheduler._state.table.request_id[plan.rows] == 0)[0])
    result = StepResult(
        plan_id=plan.plan_id,
        tokens=np.full((2, 1), 3, np.int32),
        counts=np.array([int(i != bad) for i in range(2)], np.int32),
        non_finite=np.array([bad], np.int32),
    )
    outputs = scheduler.commit(plan, result)
    assert [(end.request_id, end.reason) for end in outputs.finished] == [(0, "error")]
    assert outputs.request_ids.tolist() == [1]
    scheduler.check_integrity()
    scheduler.add(ask(2, prompt(24), 5))
    scheduler.add(ask(3, prompt(24, 1), 5))
    computed = {start.request_id: start.computed for start in scheduler.schedule().starts}
    assert computed == {2: 0, 3: 16}


def test_a_failed_step_ends_its_requests_and_what_was_built_on_them() -> None:
    scheduler, _ = make(budget=1 << 20, max_num_batched_tokens=64)
    scheduler.add(ask(0, prompt(5, 3), 30, eos_ids=()))
    bystander = scheduler.schedule()
    scheduler.commit(bystander, StepResult(plan_id=0, tokens=np.full((1, 1), 9, np.int32), counts=np.ones(1, np.int32)))
    scheduler._state.decoding.clear()  # keep it out of the plan that fails
    scheduler._state.decode_rows = None
    scheduler.add(ask(1, prompt(40), 9, eos_ids=()))
    failing = scheduler.schedule()
    scheduler.add(ask(2, prompt(40), 9, eos_ids=()))
    after = scheduler.schedule()
    assert {s.request_id: s.computed for s in after.starts} == {2: 32}
    nothing = {"tokens": np.zeros((1, 1), np.int32), "counts": np.zeros(1, np.int32)}
    outputs = scheduler.commit(failing, StepResult(plan_id=failing.plan_id, failure="lost", **nothing))
    assert {(end.request_id, end.reason) for end in outputs.finished} == {(1, "error"), (2, "error")}
    assert all("lost" in end.error for end in outputs.finished)
    scheduler._state.decoding[int(bystander.rows[0])] = None
    two = {"tokens": np.full((after.num_rows, 1), 9, np.int32), "counts": after.sample.astype(np.int32)}
    assert not len(scheduler.commit(after, StepResult(plan_id=after.plan_id, **two)).request_ids)
    scheduler.check_integrity()
    scheduler.add(ask(3, prompt(40), 9))
    plan = scheduler.schedule()
    assert plan.starts[0].computed == 0 and plan.num_decode == 1


def test_blocks_found_invalid_are_computed_anew() -> None:
    loop, runner = setup(2, budget=1 << 20)
    loop.submit(ask(0, prompt(40), 6, eos_ids=()))
    want = run(loop)[0][0]
    loop.submit(ask(1, prompt(40), 6, eos_ids=()))
    poll, told = runner.poll, []

    def poll_with_news(wait: bool) -> StepResult | None:
        result = poll(wait)
        row = next((row for row, state in runner.rows.items() if state["start"].request_id == 1), None)
        if result is None or told or row is None or row not in runner.plans[result.plan_id].rows:
            return result
        told.append(runner.tables[0][row, 0])
        return StepResult(
            plan_id=result.plan_id,
            tokens=np.full_like(result.tokens, 49),
            counts=result.counts,
            invalid_blocks=((0, told[0]),),
        )

    runner.poll = poll_with_news
    assert run(loop)[1][0] == want and told
    computed = [s.computed for plan in runner.plans for s in plan.starts if s.request_id == 1]
    assert computed == [32, 0]


class Hand:
    """A connector worked by hand."""

    def __init__(self, brings: int, keep: bool = False) -> None:
        self.brings, self.keep = brings, keep
        self.loads: list[tuple] = []
        self.ended: list[tuple] = []
        self.events = ConnectorEvents()

    def match(self, request_id, digests, num_cached) -> int:
        return self.brings

    def load(self, request_id, num_tokens, blocks) -> None:
        self.loads.append((request_id, num_tokens, tuple(blocks)))

    def finished(self, request_id, num_tokens, blocks) -> bool:
        self.ended.append((request_id, num_tokens, tuple(blocks)))
        return self.keep

    def poll(self) -> ConnectorEvents:
        events, self.events = self.events, ConnectorEvents()
        return events


@pytest.mark.parametrize("arrived", [32, 20, 0])
def test_a_request_waits_for_remote_blocks_and_goes_on_from_what_came(arrived: int) -> None:
    connector = Hand(brings=37)
    scheduler, _ = make(connector=connector, budget=1 << 20)
    scheduler.add(ask(0, prompt(40), 4, eos_ids=()))
    assert scheduler.schedule() is None and scheduler.stats().waiting_remote == 1 and scheduler.has_work()
    ((number, num, blocks),) = connector.loads
    assert (number, num, [index for group, index, _ in blocks if group == 0]) == (0, 32, list(range(8)))
    connector.events = ConnectorEvents(arrivals=(Arrival(request_id=0, num_tokens=arrived),))
    plan = scheduler.schedule()
    assert plan.starts[0].computed == plan.start[0] == arrived // 8 * 8
    told = {(g, i): b for _, g, i, b in plan.blocks.tolist()}
    assert all(told[group, index] == block for group, index, block in blocks if group == 0)


def test_an_aborted_load_holds_its_blocks_until_it_ends() -> None:
    connector = Hand(brings=32)
    scheduler, _ = make(connector=connector, budget=1 << 20)
    scheduler.add(ask(0, prompt(40), 4))
    scheduler.schedule()
    scheduler.abort(0)
    assert scheduler.stats().cache_used > 0 and not scheduler.take_events()
    connector.events = ConnectorEvents(arrivals=(Arrival(request_id=0, num_tokens=32),))
    assert scheduler.schedule() is None
    ((end,),) = [outputs.finished for outputs in scheduler.take_events()]
    assert end.reason == "abort" and scheduler.stats().cache_used == 0 and not scheduler.has_work()


@pytest.mark.parametrize("by_result", [False, True])
def test_blocks_of_an_ended_request_stay_until_they_are_released(by_result: bool) -> None:
    connector = Hand(brings=0, keep=True)
    scheduler, manager = make(connector=connector, budget=1 << 20)
    runner = SimulatedRunner(manager, 8)
    loop = Loop(scheduler, runner, depth=1)
    loop.submit(ask(0, prompt(20), 3, eos_ids=()))
    while scheduler.stats().running or scheduler.stats().waiting:
        loop.step()
    assert connector.ended[0][:2] == (0, 22)
    assert scheduler.stats().pinned == 1 and scheduler.stats().cache_used > 0 and loop.has_work()
    loop.check_integrity()
    with pytest.raises(RequestError, match="already"):
        loop.submit(ask(0, prompt(20), 3))
    if by_result:
        connector.keep = False
        loop.submit(ask(1, prompt(5), 1))
        plan = scheduler.schedule()
        runner.forward(plan)
        result = runner.poll(True)
        scheduler.commit(
            plan,
            StepResult(plan_id=plan.plan_id, tokens=result.tokens, counts=result.counts, transfers_done=(0,)),
        )
    else:
        connector.events = ConnectorEvents(released=(0,))
        loop.step()
    assert scheduler.stats().pinned == 0 and scheduler.stats().cache_used == 0 and not loop.has_work()


def test_checkpoints_lie_inside_a_chunk_and_at_what_the_layer_can_export() -> None:
    loop, runner = setup(groups=(FULL, {**STATE, "checkpoint_alignment": 16}), budget=1 << 20, checkpoint_tokens=8)
    loop.submit(ask(0, prompt(60), 2))
    run(loop)
    assert [e.offset for e in runner.plans[0].exports] == [16, 32]
    assert runner.plans[0].num_new[0] == 32, "the chunk was not cut"


def test_one_request_of_the_longest_length_fits_the_smallest_cache() -> None:
    """Also when the blocks of its prefix lie scattered over slabs, and when nothing else could make room."""
    from drivetrain.cache.sizing import GroupNeed, plan_cache, smallest_budget

    groups = (FULL, WINDOW, {**WINDOW, "window": 25, "num_layers": 2})
    needs = [GroupNeed(**group) for group in groups]
    generous = plan_cache(needs, 1 << 20, shared=True, max_tokens=96, chunk=32)
    least = smallest_budget(needs, generous, 96, 32)
    for seed in range(20):
        fleet = Fleet(seed, groups=groups, budget=least, depth=2, max_num_seqs=4)
        for _ in range(12):
            fleet.add()
        for _ in range(3000):
            if not fleet.loop.has_work():
                break
            fleet.step()
        fleet.drain()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [1] * 96}, "leaves no room"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"embeds": np.zeros((3, 2), np.float32)}, "embeds"),
        ({"positions": np.zeros((3, 2), np.int32)}, "positions"),
    ],
)
def test_requests_that_can_never_run_are_refused(fields: dict, says: str) -> None:
    loop, _ = setup()
    values = {"prompt": [1, 2, 3, 4], "max_tokens": 4, **fields}
    with pytest.raises(RequestError, match=says):
        loop.submit(ask(0, values.pop("prompt"), values.pop("max_tokens"), **values))
    assert not loop.has_work()


def test_aborts_at_any_moment_leave_nothing_behind() -> None:
    for steps in range(12):
        loop, _ = setup(3, max_num_batched_tokens=16)
        for number in range(6):
            loop.submit(ask(number, prompt(40, number), 10))
        for _ in range(steps):
            loop.step()
        for number in range(6):
            loop.abort(number)
        loop.abort(99)
        run(loop)
        stats = loop.stats()
        assert (stats.waiting, stats.running, stats.cache_used, stats.cache_use) == (0, 0, 0, 0.0)


def test_a_step_costs_no_more_tokens_than_the_budget() -> None:
    loop, runner = setup(2, 3, max_num_batched_tokens=10)
    for number in range(8):
        loop.submit(ask(number, prompt(12, number), 20, eos_ids=()))
    run(loop)
    assert max(int(plan.num_new.sum()) for plan in runner.plans) <= 10
    assert any(plan.num_verify for plan in runner.plans)


def test_steady_decode_tells_only_what_changed() -> None:
    scheduler, manager = make(groups=(FULL,), budget=1 << 20)
    runner = SimulatedRunner(manager, 8)
    loop = Loop(scheduler, runner, depth=1)
    for number in range(4):
        loop.submit(ask(number, prompt(8, number), 40, eos_ids=()))
    for _ in range(20):
        loop.step()
    changed = [len(plan.blocks) for plan in runner.plans[4:]]
    assert set(changed) == {0, 4} and changed.count(4) == len(changed) // 4
    assert not any(plan.starts or plan.ends for plan in runner.plans[4:])


def answer(plan: StepPlan, token: int = 9, failure: str = "") -> StepResult:
    counts = np.zeros(plan.num_rows, np.int32) if failure else plan.sample.astype(np.int32)
    tokens = np.full((plan.num_rows, 1), token, np.int32)
    return StepResult(plan_id=plan.plan_id, tokens=tokens, counts=counts, failure=failure)


def test_the_tokens_in_flight_of_a_preempted_request_are_accepted_before_it_runs_again() -> None:
    scheduler, _ = make()
    scheduler.add(ask(0, prompt(9), 6, eos_ids=()))
    plans = [scheduler.schedule(), scheduler.schedule()]
    scheduler._state.preempt(int(plans[0].rows[0]))
    assert scheduler.schedule() is None, "two of its tokens are under way"
    told = [scheduler.commit(plan, answer(plan, 20 + i)) for i, plan in enumerate(plans)]
    assert [(out.request_ids.tolist(), out.tokens.tolist()) for out in told] == [([0], [20]), ([0], [21])]
    again = scheduler.schedule()
    assert again.ends == (int(plans[0].rows[0]),) and again.starts[0].epoch != plans[0].epochs[0]
    known = np.concatenate([prompt(9), [20, 21]])
    assert np.array_equal(again.prompt_ids, known[int(again.start[0]) :])


def test_a_preempted_request_may_end_by_its_tokens_in_flight() -> None:
    for token, most, reason in ((END, 6, "stop"), (20, 2, "length")):
        scheduler, _ = make()
        scheduler.add(ask(0, prompt(9), most))
        plans = [scheduler.schedule(), scheduler.schedule()]
        scheduler.commit(plans[0], answer(plans[0], 20))
        scheduler._state.preempt(int(plans[0].rows[0]))
        (end,) = scheduler.commit(plans[1], answer(plans[1], token)).finished
        assert end.reason == reason and not scheduler.has_work()
        scheduler.check_integrity()


@pytest.mark.parametrize("decoding", [False, True])
def test_tokens_in_flight_behind_a_failed_step_are_dropped_for_a_preempted_request(decoding: bool) -> None:
    scheduler, _ = make()
    scheduler.add(ask(0, prompt(9), 6, eos_ids=()))
    known = prompt(9)
    if decoding:
        first = scheduler.schedule()
        scheduler.commit(first, answer(first, 20))
        known = np.append(known, 20)
    failing, after = scheduler.schedule(), scheduler.schedule()
    scheduler._state.preempt(int(failing.rows[0]))
    assert not scheduler.commit(failing, answer(failing, failure="lost")).finished, "it had left before it failed"
    assert not len(scheduler.commit(after, answer(after, 49)).tokens)
    again = scheduler.schedule()
    assert np.array_equal(again.prompt_ids, known[int(again.start[0]) :])
    scheduler.check_integrity()


def test_a_preempted_reader_of_lost_blocks_drops_its_tokens_and_goes_on() -> None:
    scheduler, _ = make(budget=1 << 20, max_num_batched_tokens=64)
    scheduler.add(ask(1, prompt(40), 9, eos_ids=()))
    failing = scheduler.schedule()
    scheduler.add(ask(2, prompt(40), 9, eos_ids=()))
    after = scheduler.schedule()
    reader = next(start for start in after.starts if start.request_id == 2)
    assert reader.computed == 32
    scheduler._state.preempt(reader.row)
    ended = scheduler.commit(failing, answer(failing, failure="lost")).finished
    assert [end.request_id for end in ended] == [1]
    assert not len(scheduler.commit(after, answer(after, 49)).tokens)
    again = scheduler.schedule()
    assert again.starts[0].request_id == 2 and again.starts[0].computed == 0
    scheduler.check_integrity()


def test_with_caching_off_samples_of_different_requests_share_nothing() -> None:
    loop, runner = setup(prefix_caching=False, budget=1 << 20)
    for number in range(4):
        loop.submit(ask(number, prompt(40), 2, sample_index=number % 2, fanout=number // 2))
    run(loop)
    computed = {s.request_id: s.computed for plan in runner.plans for s in plan.starts}
    assert computed == {0: 0, 1: 32, 2: 0, 3: 32}
