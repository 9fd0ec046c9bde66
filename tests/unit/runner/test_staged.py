"""A pipeline of two runners gives the tokens of one, at any depth, in the order of plans."""

from __future__ import annotations

import pytest

from drivetrain.dist.executors import InlineExecutor, StagedExecutor
from drivetrain.errors import ConfigError
from drivetrain.ops import Ops
from drivetrain.runner.drafter import RandomDrafter
from drivetrain.runner.runner import Runner
from tests.unit.runner.devices import device, host
from tests.unit.runner.fakes import FakeDecoder, Job, MiniScheduler, drive, expected_greedy, runner_config
from tests.unit.runner.test_runner import (
    BLOCKS,
    VOCABULARY,
    WINDOW,
    allowed_after,
    decode_of,
    expected_draws,
    expected_masked,
    jobs,
    make,
    mask_rows,
    plan_of,
    sampling,
)


def stages(backend, *, depth=3, vocabulary=VOCABULARY, drafter=None, **config):
    size = backend.storage.block_tokens[0]
    runners = []
    for number in (0, 1):
        decoder = FakeDecoder(backend, vocabulary=vocabulary, window=WINDOW, block_tokens=size, layers=(number,))
        caches = tuple(backend.storage.allocate(g.layout, BLOCKS) for g in decoder.groups)
        own = runner_config(depth=depth, group_ids=(number,), first=number == 0, last=number == 1, **config)
        runners.append(
            Runner(backend, decoder, caches, own, Ops(backend, block_tokens=size), drafter if number else None)
        )
    return runners


def serve(backend, todo, *, depth, max_drafts=0, **more):
    drafter = RandomDrafter(more.get("vocabulary", VOCABULARY), max_drafts) if max_drafts else None
    late = more.pop("late", None)
    runners = stages(backend, depth=depth, max_drafts=max_drafts, drafter=drafter, **more)
    executor = StagedExecutor(runners, depth)
    size = backend.storage.block_tokens[0]
    sched = MiniScheduler(rows=6, budget=48, block_tokens=size, num_blocks=BLOCKS, max_drafts=max_drafts)
    for job in todo:
        sched.add(job)
    drive(executor, sched, depth=depth, late=late)


@pytest.mark.parametrize(
    ("kind", "depth"), [("cpu", 1), ("cpu", 3), ("cpu-static", 3), ("mirage", 3), ("mirage-static", 2)]
)
def test_two_stages_give_the_tokens_of_one(kind: str, depth: int) -> None:
    todo = jobs(9)
    for i, job in enumerate(todo):
        job.start = sampling(i) if i % 2 else {}
    serve(device(kind), todo, depth=depth)
    for i, job in enumerate(todo):
        greedy = expected_greedy(job.prompt, job.max_new, VOCABULARY, WINDOW)
        assert job.out == (expected_draws(job) if i % 2 else greedy)


def test_drafts_are_verified_by_the_last_stage_and_reach_the_first() -> None:
    todo = jobs(8, vocabulary=3, max_drafts=3)
    serve(host(), todo, depth=3, max_drafts=3, vocabulary=3)
    for job in todo:
        assert job.out == expected_greedy(job.prompt, job.max_new, 3, WINDOW)


def test_late_rows_hold_back_only_their_own_next_plan() -> None:
    todo = jobs(6)
    for job in todo[::2]:
        job.late = True
    serve(host(), todo, depth=3, late=lambda job: mask_rows(allowed_after(job)))
    for i, job in enumerate(todo):
        greedy = expected_greedy(job.prompt, job.max_new, VOCABULARY, WINDOW)
        assert job.out == (greedy if i % 2 else expected_masked(job))


def test_plans_of_different_rows_are_in_different_stages_at_once() -> None:
    first, last = stages(host())
    executor = StagedExecutor([first, last], 3)
    order = []
    for name, runner in (("first", first), ("last", last)):
        inner = runner.forward

        def spy(plan, carry=None, *, inner=inner, name=name):
            order.append((name, plan.plan_id))
            return inner(plan, carry)

        runner.forward = spy
    for number in range(3):
        executor.forward(plan_of(number, prompt=[number + 1, 2], row=number))
        executor.sample(number, None)
    assert order == [("first", 0), ("last", 0), ("first", 1), ("last", 1), ("first", 2)]
    assert first.in_flight == 3 and last.in_flight == 2
    tokens = [executor.poll(True).tokens.tolist() for _ in range(3)]
    assert tokens == [[expected_greedy([n + 1, 2], 1, VOCABULARY, WINDOW)] for n in range(3)]


def test_a_plan_waits_for_the_tokens_that_its_rows_still_await() -> None:
    first, last = stages(host())
    executor = StagedExecutor([first, last], 3)
    executor.forward(plan_of(0, prompt=[5, 2], row=0))
    executor.sample(0, None)
    executor.forward(decode_of(1, 0, 3))
    executor.sample(1, None)
    assert first.in_flight == 1, "row 0 has not drawn when plan 1 arrives"
    tokens = [int(executor.poll(True).tokens[0, 0]) for _ in range(2)]
    assert tokens == expected_greedy([5, 2], 2, VOCABULARY, WINDOW)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_failure_in_either_stage_is_the_plans_result(stage: int) -> None:
    runners = stages(host())
    executor = StagedExecutor(runners, 3)
    runners[stage].decoder.fail_on = 4
    executor.forward(plan_of(0, prompt=[5, 2], row=0))
    executor.sample(0, None)
    result = executor.poll(True)
    assert "planted failure 4" in result.failure and result.counts.tolist() == [0]
    runners[stage].decoder.fail_on = None
    executor.forward(plan_of(1, prompt=[5, 2], row=0))
    executor.sample(1, None)
    assert executor.poll(True).tokens.tolist() == [expected_greedy([5, 2], 1, VOCABULARY, WINDOW)]


def test_stages_out_of_order_and_depths_too_small_are_refused() -> None:
    runners = stages(host(), depth=2)
    with pytest.raises(ConfigError, match="stages are"):
        StagedExecutor(runners[::-1], 2)
    with pytest.raises(ConfigError, match="smaller depth than 3"):
        StagedExecutor(runners, 3)


def test_an_inline_executor_is_its_runner() -> None:
    runner, _ = make(depth=2)
    executor = InlineExecutor(runner)
    assert executor.depth == 2
    job = Job(prompt=[1, 2], max_new=3)
    sched = MiniScheduler(rows=2, budget=8, block_tokens=16, num_blocks=BLOCKS)
    sched.add(job)
    drive(executor, sched, depth=executor.depth)
    executor.close()
    assert job.out == expected_greedy([1, 2], 3, VOCABULARY, WINDOW) and runner.in_flight == 0
