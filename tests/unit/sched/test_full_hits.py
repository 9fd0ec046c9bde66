"""A prompt of which all is cached computes its last token only, as a decode row, in that token's old place."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain.params import PoolingParams
from tests.unit.sched.simulated import FULL, STATE, WINDOW, expected
from tests.unit.sched.test_scheduler import answer, ask, make, prompt, run, setup

PLAIN = {"groups": (FULL,), "announce_freed": False, "budget": 1 << 20}


def starts_of(runner) -> dict[int, int]:
    return {start.request_id: start.computed for plan in runner.plans for start in plan.starts}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("length", [64, 65])
def test_the_last_token_alone_is_a_decode_row(depth: int, length: int) -> None:
    loop, runner = setup(depth, **PLAIN)
    for number in range(3):
        loop.submit(ask(number, prompt(length), 9, eos_ids=()))
        assert run(loop)[number][0] == expected(prompt(length), 9, ends=())[0]
    assert starts_of(runner) == {0: 0, 1: 64 - (length == 64), 2: 64 - (length == 64)}
    again = [plan for plan in runner.plans if plan.starts and plan.starts[0].request_id == 2]
    assert again[0].num_decode == again[0].num_rows == 1 and not len(again[0].prompt_ids)
    assert again[0].starts[0].last_token == prompt(length)[-1]


def test_it_joins_rows_that_decode_and_prompts() -> None:
    loop, runner = setup(2, **PLAIN)
    loop.submit(ask(0, prompt(64), 3))
    run(loop)
    loop.submit(ask(1, prompt(20, 1), 30, eos_ids=()))
    loop.step()
    loop.submit(ask(2, prompt(64), 9, eos_ids=()))
    loop.submit(ask(3, prompt(20, 3), 9, eos_ids=()))
    got = run(loop)
    assert all(got[n][0] == expected(p, m, ends=())[0] for n, p, m in ((2, prompt(64), 9), (3, prompt(20, 3), 9)))
    plan = next(plan for plan in runner.plans if any(start.request_id == 2 for start in plan.starts))
    assert (plan.num_decode, plan.num_rows, len(plan.prompt_ids)) == (2, 3, 20)


def test_who_shares_the_block_writes_to_one_of_its_own() -> None:
    loop, runner = setup(1, **PLAIN)
    loop.submit(ask(0, prompt(64), 3))
    run(loop)
    for number in (1, 2):
        loop.submit(ask(number, prompt(64), 9, eos_ids=()))
    got = run(loop)
    assert got[1][0] == got[2][0] == expected(prompt(64), 9, ends=())[0]
    assert starts_of(runner)[1] == 63 and starts_of(runner)[2] < 63


@pytest.mark.parametrize(
    "settings",
    [
        {"groups": (FULL, WINDOW)},
        {"groups": (FULL, STATE)},
        {"announce_freed": True},
        {"fixed_chunk": 32},
        {"drafts": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_no_block_is_written_twice_where_that_could_be_seen(settings) -> None:
    loop, runner = setup(1, **{**PLAIN, **settings})
    for number in range(2):
        loop.submit(ask(number, prompt(64), 3))
        run(loop)
    assert starts_of(runner)[1] < 63 or settings.get("drafts")
    assert all(start.last_token == -1 for plan in runner.plans for start in plan.starts)


@pytest.mark.parametrize("fields", [{"pooling": PoolingParams(kind="mean")}, {"embeds": np.zeros((65, 3), np.float32)}])
def test_who_needs_more_than_ids_stays_a_prompt(fields) -> None:
    loop, runner = setup(1, **PLAIN)
    for number in range(2):
        loop.submit(ask(number, prompt(65), 1, **fields))
        run(loop)
    assert all(start.last_token == -1 for plan in runner.plans for start in plan.starts)


def test_with_fixed_chunks_one_token_left_stays_a_chunk() -> None:
    loop, runner = setup(1, **PLAIN, fixed_chunk=32)
    for number in range(2):
        loop.submit(ask(number, prompt(65), 2))
        run(loop)
    assert starts_of(runner)[1] == 64
    assert all(start.last_token == -1 for plan in runner.plans for start in plan.starts)


def test_a_failed_step_takes_the_name_of_the_block_along() -> None:
    scheduler, _ = make(**PLAIN, max_num_batched_tokens=64)
    scheduler.add(ask(0, prompt(64), 1))
    first = scheduler.schedule()
    scheduler.commit(first, answer(first, 20))
    scheduler.add(ask(1, prompt(64), 9, eos_ids=()))
    failing = scheduler.schedule()
    assert failing.starts[0].computed == 63
    (end,) = scheduler.commit(failing, answer(failing, failure="lost")).finished
    assert end.reason == "error"
    scheduler.add(ask(2, prompt(64), 9, eos_ids=()))
    assert 0 < scheduler.schedule().starts[0].computed < 63
    scheduler.check_integrity()


def test_a_block_that_a_plan_in_flight_writes_is_not_written_by_another() -> None:
    scheduler, _ = make(**{**PLAIN, "groups": ({**FULL, "block_tokens": 8},)}, max_num_batched_tokens=64)
    scheduler.add(ask(0, prompt(8), 9))
    failing = scheduler.schedule()
    scheduler.abort(0)
    scheduler.add(ask(1, prompt(8), 9, eos_ids=()))
    after = scheduler.schedule()
    assert after.starts[0].computed == 0
    scheduler.commit(failing, answer(failing, failure="lost"))
    scheduler.commit(after, answer(after, 20))
    scheduler.add(ask(2, np.concatenate([prompt(8), prompt(9, 1)]), 9))
    (start,) = [start for start in scheduler.schedule().starts if start.request_id == 2]
    assert start.computed == 0
    scheduler.check_integrity()


def test_an_end_is_told_before_its_blocks_are_let_go_of() -> None:
    loop, _ = setup(1, **PLAIN)
    loop.submit(ask(0, prompt(64), 1, eos_ids=()))
    while loop.has_work():
        loop.step()
    cache = loop.scheduler._state.cache
    assert cache.num_held > 0
    loop.settle()
    assert cache.num_held == 0
    loop.submit(ask(1, prompt(64, 1), 1, eos_ids=()))
    run(loop)
    assert loop.stats().cache_used == 0, "whoever looks finds it done"


def test_a_prompt_that_waits_for_the_blocks_of_one_that_ended_gets_them() -> None:
    loop, runner = setup(1, **PLAIN | {"budget": 32 << 10})
    prompts = [prompt(64, number) for number in range(3)]
    for number, one in enumerate(prompts):
        loop.submit(ask(number, one, 2, eos_ids=()))
    got = run(loop)
    assert [got[n][0] for n in range(3)] == [expected(one, 2, ends=())[0] for one in prompts]
    rows = [{start.row for start in plan.starts} for plan in runner.plans if plan.starts]
    assert len(rows) == 3, "one at a time: there is no room for two"
