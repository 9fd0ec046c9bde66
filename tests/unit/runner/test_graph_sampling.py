"""Replayed steps whose rows ask for different draws, and what happens to them when an upload does not come."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain.dist.executors import InlineExecutor
from drivetrain.runner.batch import step_limits
from drivetrain.runner.graphs import FED
from drivetrain.runner.rows import LOGPROBS, NON_GREEDY
from drivetrain.runner.runner import Runner
from drivetrain.runner.staging import Pack
from drivetrain.runner.warmup import warm_up
from tests.checkpoints import tiny_checkpoint
from tests.unit.runner.devices import device
from tests.unit.runner.fakes import Job, MiniScheduler, drive
from tests.unit.runner.test_graphs import BLOCKS, real_runner
from tests.unit.runner.test_runner import decode_of, plan_of, step

WARM = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 11}
KINDS = ({}, WARM, {"logprobs": 3}, {**WARM, "seed": 12, "logprobs": 2}, {}, {"temperature": 1.3, "seed": 5})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("gemma3", tmp_path_factory.mktemp("model") / "gemma3")


def captured_runner(checkpoint, kind: str) -> Runner:
    runner = real_runner(checkpoint, device(kind, native=True, delay=0.002), depth=2)
    assert warm_up(runner, step_limits(runner.backend.shapes, 6, 48)).graphs >= 1
    return runner


def serve(runner: Runner, depth: int) -> list[Job]:
    rng = np.random.default_rng(8)
    todo = [
        Job(prompt=rng.integers(5, 290, 4 + 5 * i).tolist(), max_new=12 + 2 * i, arrive=i, start=dict(start))
        for i, start in enumerate(KINDS)
    ]
    size, groups = runner.backend.storage.block_tokens[0], len(runner.decoder.groups)
    sched = MiniScheduler(rows=5, budget=40, block_tokens=size, num_blocks=BLOCKS, groups=groups)
    for job in todo:
        sched.add(job)
    drive(InlineExecutor(runner), sched, depth=depth)
    return todo


each_kind = pytest.mark.parametrize("kind", ["mirage", "mirage-static"])


@each_kind
def test_warming_up_leaves_no_flag_behind(checkpoint, kind: str) -> None:
    tables = captured_runner(checkpoint, kind).tables
    assert not tables.flags.any() and tables.plain()


@each_kind
def test_padded_replays_with_mixed_draws_give_the_tokens_of_eager_steps(checkpoint, kind: str) -> None:
    wanted = serve(real_runner(checkpoint, device("cpu")), 1)
    runner = captured_runner(checkpoint, kind)
    seen: list[tuple[int, int, int]] = []  # rows, places, facts
    inner = runner._draw

    def draw(flight, part, mask):
        if flight.captured is not None and part.arrays.whole:
            seen.append((part.arrays.num_logits, len(part.arrays.rows), flight.facts))
        return inner(flight, part, mask)

    runner._draw = draw
    got = serve(runner, 2)
    padded = [facts for rows, places, facts in seen if rows < places]
    assert any(facts & NON_GREEDY and facts & LOGPROBS for facts in padded), "rows must have been mixed and padded"
    assert len({facts for _, _, facts in seen}) > 1
    for left, right in zip(got, wanted, strict=True):
        assert left.out == right.out and not left.error
        assert len(left.logprobs) == len(right.logprobs) == (len(left.out) if "logprobs" in left.start else 0)
        for a, b in zip(left.logprobs, right.logprobs, strict=True):
            asked = left.start["logprobs"]
            assert a[0] == b[0] and a[2] == b[2] and a[3][:asked].tolist() == b[3][:asked].tolist()
            assert abs(a[1] - b[1]) < 1e-4 and np.allclose(a[4][:asked], b[4][:asked], atol=1e-4)
    greedy = [job.out for job in wanted if not job.start.get("temperature")]
    drawn = [job.out for job in wanted if job.start.get("temperature")]
    assert all(len(set(out)) > 2 for out in drawn) and len(greedy) == 3
    runner.close()


def test_rows_are_uploaded_when_they_change_or_may_not_have_come(checkpoint) -> None:
    runner = captured_runner(checkpoint, "mirage")
    plan = decode_of(0, 3, 5)
    captured = runner.graphs.find(plan)
    batch = runner.builder.arrays(plan, captured.shape)

    def sent() -> list[str]:
        pack = Pack()
        runner.graphs.pack(captured, batch, pack)
        return pack.names

    assert sent() == [FED] and sent() == []
    runner.graphs.forget_rows()
    assert sent() == [FED] and sent() == []
    runner.close()


PROMPTS = ([5, 80, 12, 33], [60, 61, 62, 63, 64])


def after_a_failure(runner: Runner, spoil) -> tuple[list[int], list[int]]:
    """Two prompts, a step of row 0, one of row 1 that fails, and two more of row 1. Its tokens; those of row 0."""
    for row, ids in enumerate(PROMPTS):
        assert not step(runner, plan_of(row, prompt=ids, row=row)).failure
    first = step(runner, decode_of(2, 0, len(PROMPTS[0]) + 1)).tokens[:, 0].tolist()
    if spoil is not None:
        restore = spoil(runner)
        failed = step(runner, decode_of(3, 1, len(PROMPTS[1]) + 1))
        assert "planted" in failed.failure
        restore()
    tokens = []
    for i in (1, 2):
        result = step(runner, decode_of(3 + i, 1, len(PROMPTS[1]) + i))
        assert not result.failure
        tokens += result.tokens[:, 0].tolist()
    return tokens, first


def planted(*given, **more):
    raise RuntimeError("planted")


def failing_packing(runner: Runner):
    inner, runner._pack_samples = runner._pack_samples, planted
    return lambda: setattr(runner, "_pack_samples", inner)


def failing_upload(runner: Runner):
    inner, runner.runtime.upload = runner.runtime.upload, planted
    return lambda: setattr(runner.runtime, "upload", inner)


@pytest.mark.parametrize("spoil", [failing_packing, failing_upload])
def test_after_a_step_whose_rows_did_not_come_they_are_sent_again(checkpoint, spoil) -> None:
    wanted, other = after_a_failure(real_runner(checkpoint, device("mirage", native=True), depth=1), None)
    runner = captured_runner(checkpoint, "mirage")
    got, first = after_a_failure(runner, spoil)
    assert got == wanted and first == other
    assert wanted[0] != wanted[1] and wanted[0] != other[0], "rows that draw alike would prove nothing"
    runner.close()
