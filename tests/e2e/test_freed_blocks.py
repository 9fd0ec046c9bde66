"""On a device that fills freed blocks with NaN: tokens are as ever, and what reads a freed block is found out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from drivetrain.sched.plan import StepPlan
from tests.checkpoints import hf_greedy, random_ids, tiny_checkpoint
from tests.e2e.harness import Served

PROMPTS = [random_ids(n, i) for i, n in enumerate((118, 140, 129, 60, 150, 124))]
BLOCK_BYTES = 98_304  # one block of each of the two groups, a window and full attention


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("gemma3_text", tmp_path_factory.mktemp("freed") / "gemma")


@pytest.fixture(params=["mirage", "mirage-static"])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


class Watched:
    """A served model of few blocks, and its plans. ``alter`` may change a plan on its way to the runner."""

    def __init__(self, checkpoint: Path, device: str, blocks: int, **settings: object) -> None:
        self.served = Served(checkpoint, device, cache_bytes=blocks * BLOCK_BYTES, depth=2, **settings)
        self.plans: list[StepPlan] = []
        self.alter = lambda plan: plan
        forward = self.served.loop.executor.forward

        def watched(plan: StepPlan) -> None:
            self.plans.append(self.alter(plan))
            forward(self.plans[-1])

        self.served.loop.executor.forward = watched

    def told(self) -> Iterator[tuple[StepPlan, set[tuple[int, int]]]]:
        for plan in self.plans:
            yield plan, {(group, block) for group, blocks in plan.freed for block in blocks.tolist()}


def test_tokens_are_as_ever_with_hits_evictions_preemptions_and_aborts(checkpoint: Path, device: str) -> None:
    watched = Watched(checkpoint, device, blocks=9)
    served = watched.served
    doomed: list[int] = []

    def between(step: int) -> None:
        state = served.loop.scheduler._state
        if step % 7 == 5 and state.decoding:
            state.preempt(next(iter(state.decoding)))
        if step % 9 == 4 and len(doomed) < 3:
            doomed.append(served.submit(random_ids(131 + step, 90 + step), 40))
        elif step % 9 == 8 and doomed:
            served.loop.abort(doomed[-1])

    numbers = []
    for _ in range(2):
        numbers.append([served.submit(prompt, 16) for prompt in PROMPTS])
        served.run(between)
    want = hf_greedy(checkpoint, PROMPTS, 16)
    for round in numbers:
        assert [served.open[number].tokens for number in round] == want
    stats = served.loop.stats()
    assert stats.preemptions > 2 and stats.prefix_hit_tokens > 0
    assert any(served.open[number].end.reason == "abort" for number in doomed)
    told = [blocks for _, blocks in watched.told() if blocks]
    anew = [blocks & {(g, b) for _, g, _, b in plan.blocks.tolist()} for plan, blocks in watched.told()]
    assert len(told) > 5 and any(anew), "blocks were freed, and some used anew by the plan that told of them"
    served.close()


@pytest.mark.parametrize("announced", [True, False])
def test_a_stray_read_of_a_freed_block_ends_its_request_and_is_not_seen_without_the_news(
    checkpoint: Path, device: str, announced: bool
) -> None:
    """Planted fault: a running request's table is led to a block of one that has just been aborted."""
    watched = Watched(checkpoint, device, blocks=12, enable_prefix_caching=False)
    served, manager = watched.served, watched.served.loop.scheduler._state.cache
    assert manager.pool.freed is not None
    if not announced:
        manager.pool.freed = None
    group = len(manager.groups) - 1  # full attention
    one, other = served.submit(PROMPTS[0], 40), served.submit(PROMPTS[5], 40)
    while min(len(served.open[n].tokens) for n in (one, other)) < 12:
        served.step()
    rows = {r.request_id: r.row for r in served.loop.scheduler._state.requests.values()}
    stale = int(manager.tables[group][rows[other], 0])

    def mislead(plan: StepPlan) -> StepPlan:
        watched.alter = lambda plan: plan
        return replace(plan, blocks=np.concatenate([plan.blocks, [[rows[one], group, 0, stale]]]).astype(np.int32))

    served.loop.abort(other)
    watched.alter = mislead
    while served.open[one].end is None:
        served.step()
    end = served.open[one].end
    assert any((group, stale) in blocks for _, blocks in watched.told()) == announced
    if announced:
        assert end.reason == "error" and "not finite" in end.error
    else:
        assert end.reason == "length" and served.open[one].tokens != hf_greedy(checkpoint, [PROMPTS[0]], 40)[0]
    served.close()
