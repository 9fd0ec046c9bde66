"""Freed blocks: caches that want to know are told, in the stream's order, before the plan does anything else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drivetrain.dist.executors import InlineExecutor, StagedExecutor
from drivetrain.runner.batch import step_limits
from drivetrain.runner.caches import pack_freed, recycles
from drivetrain.runner.runner import Runner
from drivetrain.runner.warmup import warm_up
from drivetrain.sched.plan import BlockCopy, StepPlan
from drivetrain_api.v1 import BlockRecycler
from tests.unit.runner.devices import STATIC, device, host
from tests.unit.runner.fakes import expected_greedy
from tests.unit.runner.test_runner import VOCABULARY, WINDOW, decode_of, make, plan_of, step

PROMPT = [3, 14, 15, 9, 26, 5]


def freed(*blocks: int, groups: tuple[int, ...] = (0, 1)) -> tuple[tuple[int, np.ndarray], ...]:
    return tuple((group, np.array(blocks, np.int32)) for group in groups)


class Listener:
    """A cache that writes down what it is told and asked, and forgets nothing."""

    def __init__(self, inner, log: list) -> None:
        self.inner, self.log, self.layout = inner, log, inner.layout
        self.read = inner.read

    def freed(self, blocks: torch.Tensor) -> None:
        self.log.append(("freed", blocks.dtype, blocks.tolist()))

    def zero_blocks(self, blocks: torch.Tensor) -> None:
        self.log.append(("zero", blocks.dtype, blocks.tolist()))

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.log.append(("copy", source.dtype, source.tolist()))

    def write(self, slots: torch.Tensor, values) -> None:
        self.log.append(("write", slots.dtype, slots.tolist()))
        self.inner.write(slots, values)


def listening(backend=None, **config) -> tuple[Runner, object, list]:
    """A runner whose first layer's cache listens."""
    runner, decoder = make(backend, **config)
    log: list = []
    caches = (Listener(runner.caches[0], log), *runner.caches[1:])
    runner.caches = runner.passes.caches = caches
    return runner, decoder, log


def test_who_wants_to_know() -> None:
    silent, _ = make()
    hearing, _, _ = listening()
    assert not recycles(silent.caches) and not InlineExecutor(silent).recycles
    assert recycles(hearing.caches) and InlineExecutor(hearing).recycles
    assert isinstance(hearing.caches[0], BlockRecycler) and not isinstance(hearing.caches[1], BlockRecycler)
    assert not recycles((None,)) and make(device("mirage"))[0].caches[0].freed


def test_one_stage_that_listens_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedExecutor, "__init__", lambda self, stages: setattr(self, "_stages", stages))
    silent, hearing = make()[0], listening()[0]
    assert StagedExecutor((silent, hearing)).recycles and not StagedExecutor((silent,)).recycles


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_freed_comes_before_zeros_copies_and_writes(dtype: str) -> None:
    runner, _, log = listening(host(slot_dtype=dtype))
    more = {"zeroed": ((0, 1),), "copies": (BlockCopy(group=0, source=9, target=1),)}
    plan = plan_of(0, prompt=PROMPT, row=0, freed=(*freed(1, 5, groups=(0,)), *freed(7, groups=(1,))), **more)
    assert step(runner, plan).tokens.tolist() == [expected_greedy(PROMPT, 1, VOCABULARY, WINDOW)]
    assert [kind for kind, _, _ in log] == ["freed", "zero", "copy", "write"]
    assert log[0][1:] == (getattr(torch, dtype), [1, 5]), "of its own group only, and of its slot type"


def test_fixed_shapes_get_pieces_of_one_size_filled_up_with_the_null_block() -> None:
    runner, _, log = listening(host(STATIC))
    step(runner, plan_of(0, prompt=PROMPT, row=0, freed=freed(*range(1, 71))))
    pieces = [ids for kind, _, ids in log if kind == "freed"]
    assert pieces == [list(range(1, 65)), [*range(65, 71), *[0] * 58]]


def test_a_plan_without_rows_tells_too() -> None:
    runner, _, log = listening()
    none = np.zeros(0, np.int32)
    columns = {name: none for name in ("rows", "epochs", "num_new", "start", "bounds")}
    plan = StepPlan(plan_id=0, **columns, sample=none.astype(bool), num_decode=0, freed=freed(4))
    assert not step(runner, plan).failure
    assert log == [("freed", torch.int64, [4])]


def test_a_plan_that_fits_no_bucket_tells_before_it_fails() -> None:
    runner, _, log = listening(device("cpu-static"))
    failed = step(runner, plan_of(0, prompt=[1] * 70, row=0, freed=freed(4)))
    assert "step_limits" in failed.failure
    assert [(kind, ids[:2]) for kind, _, ids in log] == [("freed", [4, 0])]


def test_a_cache_that_does_not_listen_is_left_alone() -> None:
    runner, _ = make()
    assert step(runner, plan_of(0, prompt=PROMPT, row=0, freed=freed(1, 2))).counts.tolist() == [1]


@pytest.mark.parametrize("kind", ["mirage", "mirage-static"])
def test_a_block_may_be_freed_and_used_anew_by_one_plan(kind: str) -> None:
    """Also by a plan of fixed shapes after ready, where nothing new may run."""
    runner, _ = make(device(kind), depth=2)
    warm_up(runner, step_limits(runner.backend.shapes, 6, 48))
    step(runner, plan_of(0, prompt=PROMPT, row=0))
    other = [2, 7, 1, 8]
    blocks = plan_of(0, prompt=PROMPT, row=0).blocks
    result = step(runner, plan_of(1, prompt=other, row=0, ends=(0,), blocks=blocks, freed=freed(1, 2)))
    assert not result.failure and result.tokens.tolist() == [expected_greedy(other, 1, VOCABULARY, WINDOW)]
    again = step(runner, decode_of(2, 0, 5, freed=freed(2)))
    assert again.tokens.tolist() == [expected_greedy(other, 2, VOCABULARY, WINDOW)[1:]]


def test_lists_of_their_own_length_are_refused_where_shapes_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = make(device("mirage-static"), depth=2)
    warm_up(runner, step_limits(runner.backend.shapes, 6, 48))
    monkeypatch.setattr(
        "drivetrain.runner.runner.pack_freed", lambda plan, places, _, pack: pack_freed(plan, places, 0, pack)
    )
    result = step(runner, plan_of(0, prompt=PROMPT, row=0, freed=freed(1, 2)))
    assert "no-late-compile" in result.failure and "freed blocks" in result.failure


@pytest.mark.parametrize("kind", ["mirage", "mirage-static"])
@pytest.mark.parametrize("told", [True, False])
def test_a_table_that_still_points_at_a_freed_block_is_found_out(kind: str, told: bool) -> None:
    """Planted fault: row 0's table leads to the block of a request that has ended. Untold, nobody sees it."""
    runner, _ = make(device(kind))
    step(runner, plan_of(0, prompt=[40, 41, 42, 43, 44, 45], row=1))
    step(runner, plan_of(1, prompt=PROMPT, row=0))
    stale = np.array([(0, group, 0, 3) for group in (0, 1)], np.int32)  # block 3 was row 1's
    result = step(runner, decode_of(2, 0, 7, ends=(1,), blocks=stale, freed=freed(3, 4) if told else ()))
    assert not result.failure
    assert result.non_finite.tolist() == ([0] if told else [])
    if not told:
        drawn = expected_greedy(PROMPT, 2, VOCABULARY, WINDOW)[1]
        assert result.counts.tolist() == [1] and result.tokens[0, 0] != drawn, "wrong, and nobody saw it"


def test_news_costs_neither_a_wait_nor_a_copy_of_its_own() -> None:
    runner, _ = make(device("mirage", delay=0.2), depth=2)
    step(runner, plan_of(0, prompt=[1, 2, 3], row=0))
    drawn = []
    for i in range(6):
        before = runner.runtime.counters()
        runner.forward(decode_of(1 + i, 0, 4 + i, freed=freed(9, 10 + i)))
        runner.sample(1 + i, None)
        after = runner.runtime.counters()
        assert after.waits == before.waits and after.copies_to_device - before.copies_to_device == 1
        drawn.append(int(runner.poll(True).tokens[0, 0]))
        assert runner.runtime.counters().waits - before.waits <= 1
    assert drawn == expected_greedy([1, 2, 3], 7, VOCABULARY, WINDOW)[1:]
