"""Which plan tells that a block is void: the first one made after it, before whatever may use the block anew."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain.cache.connector import Arrival, ConnectorEvents
from drivetrain.cache.manager import CacheManager
from drivetrain.sched.plan import StepPlan
from drivetrain.sched.scheduler import Scheduler
from tests.unit.sched.simulated import FULL, STATE, WINDOW, ask, make
from tests.unit.sched.test_scheduler import Hand, answer, prompt


def told(plan: StepPlan | None) -> set[tuple[int, int]]:
    assert plan is not None
    return {(group, block) for group, blocks in plan.freed for block in blocks.tolist()}


def held(manager: CacheManager, plan: StepPlan, index: int = 0) -> set[tuple[int, int]]:
    return set(manager.held(int(plan.rows[index])))


def running(count: int = 1, tokens: int = 9, **settings) -> tuple[Scheduler, CacheManager, list[StepPlan]]:
    """Requests in their first two plans, both in flight."""
    scheduler, manager = make(**{"budget": 1 << 20, "max_num_batched_tokens": 64, **settings})
    for number in range(count):
        scheduler.add(ask(number, prompt(tokens, number), 30, eos_ids=()))
    return scheduler, manager, [scheduler.schedule(), scheduler.schedule()]


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, STATE)])
def test_an_aborted_request_is_told_of_after_all_plans_that_write_for_it(groups: tuple) -> None:
    scheduler, manager, plans = running(2, groups=groups)
    row = next(iter(scheduler._state.decoding))
    lost = set(manager.held(row))
    scheduler.abort(0)
    assert not any(plan.freed for plan in plans)
    found = {name for group in manager.pool.groups for name in group.index}
    assert found, "what is cached is not void"
    cached = {(n, block) for n, group in enumerate(manager.pool.groups) for block in group.index.values()}
    third = scheduler.schedule()
    assert told(third) == lost - cached and told(third) and third.ends == (row,)
    assert not told(scheduler.schedule())


def test_without_anything_to_run_the_news_waits_for_the_next_plan() -> None:
    scheduler, manager, plans = running()
    lost = held(manager, plans[1])
    scheduler.abort(0)
    assert scheduler.schedule() is None
    for plan in plans:
        scheduler.commit(plan, answer(plan))
    assert scheduler.schedule() is None and not scheduler._state.in_flight
    scheduler.add(ask(5, prompt(3, 5), 2))
    plan = scheduler.schedule()
    cached = {(n, block) for n, group in enumerate(manager.pool.groups) for block in group.index.values()}
    assert told(plan) == lost - cached
    again = {(group, block) for _, group, _, block in plan.blocks.tolist()}
    assert told(plan) & again, "void and used anew by the same plan"


def test_a_preempted_rows_blocks_are_told_of_by_the_plan_that_gives_them_away() -> None:
    scheduler, manager = make(groups=(FULL,), budget=30 * 1024, prefix_caching=False, max_num_batched_tokens=64)
    for number in range(2):
        scheduler.add(ask(number, prompt(40, number), 56, eos_ids=()))
    row, last = -1, None
    while row < 0:
        plan = scheduler.schedule()
        if plan.ends:
            row = plan.ends[0]
            break
        last = set(manager.held(1))
        scheduler.commit(plan, answer(plan))
    assert row == 1 and told(plan) == last
    assert {(0, block) for _, _, _, block in plan.blocks.tolist()} <= last


def test_evicted_blocks_are_told_of_by_the_plan_that_uses_them() -> None:
    scheduler, _ = make(groups=(FULL,), budget=40 * 1024, max_num_batched_tokens=64)
    evicted = set()
    for number in range(4):
        scheduler.add(ask(number, prompt(60, number), 1))
        plan = scheduler.schedule()
        given = {(group, block) for _, group, _, block in plan.blocks.tolist()}
        evicted |= told(plan) & given
        scheduler.commit(plan, answer(plan))
    assert len(evicted) >= 10


def test_what_a_failed_step_was_to_write_is_void_once_its_requests_are_gone() -> None:
    scheduler, manager, plans = running(tokens=40)
    lost = {(group, block) for plan in plans for _, group, _, block in plan.blocks.tolist() if block}
    assert manager.pool.groups[0].index
    scheduler.commit(plans[0], answer(plans[0], failure="lost"))
    assert not manager.pool.groups[0].index
    scheduler.add(ask(7, prompt(3, 7), 2))
    assert told(scheduler.schedule()) == lost


def test_a_reset_of_the_prefix_cache_makes_void_what_nobody_holds() -> None:
    scheduler, manager, plans = running(tokens=16)
    for plan in plans:
        scheduler.commit(plan, answer(plan))
    scheduler.abort(0)
    scheduler.add(ask(1, prompt(9, 1), 9))
    scheduler.schedule()
    cached = {(n, block) for n, group in enumerate(manager.pool.groups) for block in group.cached}
    scheduler.reset_prefix_cache()
    assert cached and cached <= told(scheduler.schedule())


def test_blocks_that_a_connector_reads_are_void_when_it_lets_go_of_them() -> None:
    connector = Hand(brings=0, keep=True)
    scheduler, manager = make(connector=connector, budget=1 << 20, prefix_caching=False)
    scheduler.add(ask(0, prompt(20), 1, eos_ids=()))
    plan = scheduler.schedule()
    lost = held(manager, plan)
    scheduler.commit(plan, answer(plan))
    scheduler.add(ask(1, prompt(5, 1), 9, eos_ids=()))
    assert not told(scheduler.schedule()), "they are still read"
    connector.events = ConnectorEvents(released=(0,))
    assert told(scheduler.schedule()) == lost


@pytest.mark.parametrize(("arrived", "unfilled", "behind"), [(32, 0, 5), (20, 4, 5), (0, 8, 8)])
def test_blocks_that_a_connector_fills_are_not_told_of_unless_they_stay_unfilled(
    arrived: int, unfilled: int, behind: int
) -> None:
    """``behind``: the window's blocks are void where they stay unfilled, and where no later query reads them."""
    connector = Hand(brings=0)
    scheduler, manager = make(connector=connector, budget=1 << 20, shared=False)
    scheduler.add(ask(9, prompt(7, 9), 1, eos_ids=()))
    plan = scheduler.schedule()
    before = held(manager, plan)
    scheduler.commit(plan, answer(plan))
    connector.brings = 37
    scheduler.add(ask(0, prompt(40), 4, eos_ids=()))
    assert scheduler.schedule() is None
    filled = {(group, block) for group, _, block in connector.loads[0][2]}
    assert before and before <= filled, "blocks just let go of, which no plan has told of yet"
    connector.brings = 0
    scheduler.add(ask(1, prompt(5, 1), 9, eos_ids=()))
    assert not told(scheduler.schedule())
    connector.events = ConnectorEvents(arrivals=(Arrival(request_id=0, num_tokens=arrived),))
    void = told(scheduler.schedule())
    assert {group: sum(g == group for g, _ in void & filled) for group in (0, 1)} == {0: unfilled, 1: behind}


def test_nobody_is_told_where_nobody_wants_to_know() -> None:
    scheduler, manager, _ = running(2, announce_freed=False)
    scheduler.abort(0)
    assert scheduler.schedule().freed == () and manager.pool.freed is None


def test_ids_are_small_sorted_and_never_the_null_block() -> None:
    scheduler, _, _ = running(2, tokens=40, prefix_caching=False)
    scheduler.abort(1)
    for _, blocks in scheduler.schedule().freed:
        assert blocks.dtype == np.int32 and blocks.tolist() == sorted(set(blocks.tolist())) and blocks[0] > 0
