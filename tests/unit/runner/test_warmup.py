"""Warm-up reaches every shape that serving needs; steady decode waits once a step."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain.dist.executors import InlineExecutor
from drivetrain.errors import DeviceError
from drivetrain.runner.batch import BatchBuilder, step_limits
from drivetrain.runner.drafter import RandomDrafter
from drivetrain.runner.warmup import reachable, warm_up
from drivetrain_api.v1 import ShapePolicy, bucket
from tests.unit.runner.devices import STATIC, device, host
from tests.unit.runner.fakes import Job, expected_greedy
from tests.unit.runner.test_runner import (
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
    run,
    sampling,
    step,
)


def limits_of(runner):
    config = runner.config
    return step_limits(runner.backend.shapes, config.max_num_seqs, config.max_num_batched_tokens)


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_after_warm_up_no_op_meets_a_new_shape(max_drafts: int) -> None:
    """The device refuses any op signature after ready that it has not seen before."""
    drafter = RandomDrafter(VOCABULARY, max_drafts) if max_drafts else None
    runner, _ = make(device("mirage-static", strict_shapes=True), depth=2, max_drafts=max_drafts, drafter=drafter)
    done = warm_up(runner, limits_of(runner))
    assert done.steps >= 2 + 6 * 3 and done.graphs == 0
    todo = jobs(12)
    for i, job in enumerate(todo):
        job.start = {**(sampling(i) if i % 2 else {}), "max_drafts": max_drafts if i % 3 else 0}
        if i % 4 == 0:
            job.late = True
        if i == 5:
            job.start["logprobs"] = 4
    todo.append(Job(prompt=list(range(60)), max_new=1, start={"pooling": "mean"}))
    run(InlineExecutor(runner), todo, depth=2, max_drafts=max_drafts, late=lambda job: mask_rows(allowed_after(job)))
    for i, job in enumerate(todo[:-1]):
        if i % 4 == 0:
            assert max_drafts or job.out == expected_masked(job)
        else:
            greedy = expected_greedy(job.prompt, job.max_new, VOCABULARY, WINDOW)
            assert job.out == (expected_draws(job) if i % 2 else greedy)
    assert todo[-1].pooled is not None


def test_without_warm_up_the_same_run_is_refused() -> None:
    runner, _ = make(device("mirage-static", strict_shapes=True), depth=2)
    runner.backend.ready()
    result = step(runner, plan_of(0, prompt=[1, 2, 3], row=0))
    assert "no-late-compile" in result.failure


def test_warm_up_leaves_no_trace_in_the_rows() -> None:
    runner, _ = make(device("mirage-static"))
    warm_up(runner, limits_of(runner))
    row = runner.tables.padding_row
    assert runner.tables.flags[row] == 0 and runner.tables.logprobs[row] == -1 and not runner.tables.pooling
    assert runner.in_flight == 0
    wanted = expected_greedy([3, 1, 4], 1, VOCABULARY, WINDOW)
    assert step(runner, plan_of(0, prompt=[3, 1, 4], row=0)).tokens.tolist() == [wanted]


def test_a_shape_that_cannot_run_stops_the_start() -> None:
    runner, decoder = make()
    decoder.fail_on = 1
    with pytest.raises(DeviceError, match="warm-up with 1 rows and 48 tokens failed"):
        warm_up(runner, limits_of(runner))


@pytest.mark.parametrize("seed", range(20))
def test_reachable_shapes_are_exactly_those_of_random_plans(seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy = ShapePolicy(
        tokens=tuple(sorted(set(rng.integers(2, 40, 4).tolist()) | {40})),
        rows=tuple(sorted(set(rng.integers(2, 12, 3).tolist()) | {12})),
        blocks_per_row=(4,),
    )
    limits = step_limits(policy, 11, 40)
    builder = BatchBuilder(policy, padding_row=11, max_drafts=0, block_tokens=(16,), max_widths=(4,))
    seen = set()
    for rows in range(1, limits.rows + 1):
        for tokens in range(rows, limits.tokens + 1):
            padded = bucket(policy.tokens, tokens)
            seen.add((padded, bucket(policy.rows, rows + (padded > tokens))))
    found = reachable(policy, limits, 64)
    assert len(found) == len(seen)
    assert all(tokens <= 5 * rows for tokens, rows in reachable(policy, limits, 5))
    for tokens, rows in found:
        padded = bucket(policy.tokens, tokens)
        seen.remove((padded, bucket(policy.rows, rows + (padded > tokens))))
    assert not seen and builder.policy is policy


def test_limits_leave_a_row_for_padded_tokens() -> None:
    limits = step_limits(STATIC, 256, 2048)
    assert (limits.rows, limits.tokens, limits.blocks_per_row) == (7, 64, 16)
    free = step_limits(ShapePolicy(), 256, 2048)
    assert (free.rows, free.tokens, free.blocks_per_row) == (256, 2048, 0)


def test_steady_decode_waits_at_most_once_a_step_and_never_in_forward_or_sample() -> None:
    runner, _ = make(device("mirage", delay=0.2), depth=2)
    step(runner, plan_of(0, prompt=[1, 2, 3], row=0))
    start = runner.runtime.counters()
    runner.forward(decode_of(1, 0, 4))
    runner.sample(1, None)
    drawn = []
    for i in range(20):
        before = runner.runtime.counters()
        runner.forward(decode_of(2 + i, 0, 5 + i))
        runner.sample(2 + i, None)
        assert runner.runtime.counters().waits == before.waits, "submitting must not wait"
        drawn.append(int(runner.poll(True).tokens[0, 0]))
    end = runner.runtime.counters()
    assert end.waits - start.waits <= 21
    assert end.copies_to_host - start.copies_to_host == 21
    assert end.copies_to_device - start.copies_to_device == 21
    assert drawn == expected_greedy([1, 2, 3], 21, VOCABULARY, WINDOW)[1:]


def test_polling_without_waiting_never_waits() -> None:
    runner, _ = make(device("mirage", delay=0.5), depth=2)
    runner.forward(plan_of(0, prompt=[1, 2, 3], row=0))
    runner.sample(0, None)
    before = runner.runtime.counters().waits
    result = None
    while result is None:
        result = runner.poll(False)
    assert runner.runtime.counters().waits == before
    assert result.tokens.tolist() == [expected_greedy([1, 2, 3], 1, VOCABULARY, WINDOW)]


def test_the_host_reference_backend_measures_its_largest_step() -> None:
    runner, _ = make(host())
    done = warm_up(runner, limits_of(runner), largest_tokens=16)
    assert done.largest.peak >= 0 and done.steps == 2
