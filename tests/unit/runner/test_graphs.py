"""Captured decode steps give the tokens of eager ones, on a device whose graphs replay fixed buffers."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain.dist.executors import InlineExecutor
from drivetrain.models.build import build, load
from drivetrain.models.families import read_spec
from drivetrain.models.source import resolve
from drivetrain.ops import Ops
from drivetrain.runner.batch import BatchShape, step_limits
from drivetrain.runner.dummies import capture_missing, capture_plan, decode_plan
from drivetrain.runner.graphs import Captured, graph_buckets
from drivetrain.runner.runner import Runner
from drivetrain.runner.warmup import warm_up
from drivetrain_api.v1 import AttentionTraits, GraphBudget, ShapePolicy
from tests.checkpoints import tiny_checkpoint
from tests.unit.runner.devices import device
from tests.unit.runner.fakes import Job, MiniScheduler, drive, runner_config
from tests.unit.runner.test_runner import decode_of, plan_of, step

BLOCKS = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("gemma3", tmp_path_factory.mktemp("model") / "gemma3")


def real_runner(checkpoint, backend, **config) -> Runner:
    source = resolve(str(checkpoint))
    size = backend.storage.block_tokens[0]
    ops = Ops(backend, block_tokens=size)
    decoder = build(read_spec(source.config, "float32"), ops)
    load(decoder, source.open_checkpoint(), backend.device)
    caches = [None] * len(decoder.cache_specs)
    for group in decoder.groups:
        for layer in group.layers:
            caches[layer] = backend.storage.allocate(group.layout, BLOCKS)
    return Runner(backend, decoder, caches, runner_config(**config), ops)


def serve(runner: Runner, depth: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    todo = [
        Job(prompt=rng.integers(5, 290, int(rng.integers(1, 60))).tolist(), max_new=24, arrive=3 * i) for i in range(7)
    ]
    size = runner.backend.storage.block_tokens[0]
    groups = len(runner.decoder.groups)
    sched = MiniScheduler(rows=5, budget=40, block_tokens=size, num_blocks=BLOCKS, groups=groups)
    for job in todo:
        sched.add(job)
    drive(InlineExecutor(runner), sched, depth=depth)
    return [job.out for job in todo]


@pytest.mark.parametrize("kind", ["mirage", "mirage-static"])
def test_replayed_steps_give_the_tokens_of_eager_ones(checkpoint, kind: str) -> None:
    wanted = serve(real_runner(checkpoint, device("cpu"), max_num_seqs=6), 1)
    runner = real_runner(checkpoint, device(kind, native=True, delay=0.002), depth=2)
    limits = step_limits(runner.backend.shapes, 6, 48)
    done = warm_up(runner, limits)
    assert done.graphs == len(runner.graphs.buckets) >= 1
    replayed = []
    inner = runner.graphs.run
    runner.graphs.run = lambda captured, views: (replayed.append(captured.shape.rows), inner(captured, views))[1]
    assert serve(runner, 2) == wanted
    assert len(replayed) > 20, "steady decode must have been replayed"
    runner.close()
    assert runner.graphs.count == 0


def shape(runner: Runner, rows: int) -> BatchShape:
    return runner.graphs.capture_shape(rows)


def lose(runner: Runner, rows: int) -> None:
    """Take a bucket away, as if it had not been captured yet."""
    captured = runner.graphs._captured.pop(rows)
    captured.graph.release()
    captured.drawing.release()


def test_large_buckets_are_captured_later_those_first_that_plans_missed(checkpoint) -> None:
    runner = real_runner(checkpoint, device("mirage", native=True), max_num_seqs=20, depth=2)
    warm_up(runner, step_limits(runner.backend.shapes, 20, 48))
    assert runner.graphs.buckets == (1, 20) and runner.graphs.count == 2
    lose(runner, 20)
    assert runner.graphs.find(capture_plan(runner, shape(runner, 1))) is not None
    assert runner.graphs.find(capture_plan(runner, shape(runner, 19))) is None and runner.graphs.missing() == shape(
        runner, 20
    )
    assert capture_missing(runner) and runner.graphs.count == 2
    assert runner.graphs.find(capture_plan(runner, shape(runner, 19))) is not None
    assert not capture_missing(runner)
    runner.close()


@pytest.fixture
def many_graphs(monkeypatch) -> None:
    monkeypatch.setattr("drivetrain_mirage.graphs.MirageGraphs.budget", GraphBudget())
    monkeypatch.setattr("drivetrain_mirage.graphs.MAX_GRAPHS", 100)
    monkeypatch.setattr(
        "drivetrain_mirage.providers.MirageAttention.traits",
        AttentionTraits(lengths="device", row_order="any", graph="any"),
    )


def test_small_steps_with_prompts_are_replayed_too(checkpoint, many_graphs, monkeypatch) -> None:
    wanted = serve(real_runner(checkpoint, device("cpu"), max_num_seqs=6), 1)
    runner = real_runner(checkpoint, device("mirage", native=True, delay=0.002), depth=2)
    warm_up(runner, step_limits(runner.backend.shapes, 6, 48))
    while capture_missing(runner):
        pass
    replayed, drawn = [], []
    inner, draw = runner.graphs.run, Captured.draw
    runner.graphs.run = lambda captured, views: (replayed.append(captured.shape.tokens), inner(captured, views))[1]
    monkeypatch.setattr(Captured, "draw", lambda self, part: (drawn.append(self.shape.tokens), draw(self, part))[1])
    assert serve(runner, 2) == wanted
    assert {16, 32} & set(replayed), "steps with prompts must have been replayed"
    assert {16, 32} & set(drawn), "and drawn by the second graph"
    assert set(replayed) & {1, 2, 3, 4, 5}, "steps of decode rows must have been replayed"
    runner.close()
    assert runner.graphs.count == 0


def test_captures_leave_no_length_behind(checkpoint) -> None:
    """Every capture runs a decode step of the padding row once, whose count must not grow from one to the next."""
    runner = real_runner(checkpoint, device("mirage", native=True), max_num_seqs=20, depth=2)
    warm_up(runner, step_limits(runner.backend.shapes, 20, 48))
    for _ in range(5):
        lose(runner, 20)
        assert capture_missing(runner)
    counts = runner.runtime.to_host([runner.tables.computed]).get()[0]
    assert counts[runner.tables.padding_row] <= 1
    runner.close()


def test_a_capture_that_fails_leaves_its_steps_eager(checkpoint, caplog) -> None:
    runner = real_runner(checkpoint, device("mirage", native=True), max_num_seqs=20, depth=2)
    warm_up(runner, step_limits(runner.backend.shapes, 20, 48))
    lose(runner, 20)
    runner.graphs.capture = lambda plan, batch: 1 / 0
    assert capture_missing(runner) and not capture_missing(runner)
    assert "could not be captured" in caplog.text and runner.graphs.count == 1
    assert len(serve(runner, 2)) == 7
    runner.close()


@pytest.mark.parametrize(
    ("length", "budget", "chunks"), [(64, 48, (16, 32)), (40, 300, (16, 32)), (64, 64, (16, 32, 64))]
)
def test_small_steps_are_captured_as_far_as_one_row_fills_them(checkpoint, many_graphs, length, budget, chunks) -> None:
    backend = device("mirage", native=True)
    runner = real_runner(checkpoint, backend, max_model_len=length, max_num_batched_tokens=budget, depth=2)
    assert runner.graphs.chunks == chunks
    warm_up(runner, step_limits(backend.shapes, 6, budget))
    while capture_missing(runner):
        pass
    backend.device.synchronize()
    assert runner.graphs.count == len(runner.graphs.buckets) + len(chunks)
    runner.close()


def test_after_giving_up_a_bucket_much_too_large_still_does_not_serve(checkpoint, many_graphs) -> None:
    runner = real_runner(checkpoint, device("mirage", native=True), max_num_seqs=20, depth=2)
    warm_up(runner, step_limits(runner.backend.shapes, 20, 48))
    nine, eight = (decode_plan(runner, rows, 1) for rows in (9, 8))
    assert runner.graphs.find(nine) is None and runner.graphs.find(eight) is not None
    runner.graphs.give_up()
    assert runner.graphs.find(nine) is None and runner.graphs.find(eight) is not None
    assert runner.graphs.missing() is None
    runner.close()


def test_a_capture_that_fails_half_way_keeps_no_graph(checkpoint, monkeypatch) -> None:
    runner = real_runner(checkpoint, device("mirage", native=True), max_num_seqs=20, depth=2)
    warm_up(runner, step_limits(runner.backend.shapes, 20, 48))
    lose(runner, 20)
    held = runner.backend.graphs.count
    monkeypatch.setattr(Captured, "take_drawing", lambda *given: 1 / 0)
    assert capture_missing(runner) and runner.backend.graphs.count == held
    runner.close()
    assert runner.backend.graphs.count == 0


def test_a_bucket_of_fixed_shapes_may_have_more_rows_than_the_tables(checkpoint) -> None:
    backend = device("mirage-static", native=True)
    assert backend.shapes.rows[-1] > 5, "four requests and the padding row"
    runner = real_runner(checkpoint, backend, max_num_seqs=4, depth=2)
    assert warm_up(runner, step_limits(backend.shapes, 4, 48)).graphs == len(runner.graphs.buckets) >= 1
    rows = [[7, 8, 9], [70, 71]]
    eager = real_runner(checkpoint, device("cpu"), max_num_seqs=4)
    outs = []
    for one in (runner, eager):
        out = [step(one, plan_of(i, prompt=ids, row=i)).tokens[0, 0] for i, ids in enumerate(rows)]
        out += [step(one, decode_of(2 + i, 0, len(rows[0]) + 1 + i)).tokens[0, 0] for i in range(3)]
        outs.append([int(token) for token in out])
    assert outs[0] == outs[1]
    runner.close()


def test_without_capture_every_step_is_eager(checkpoint) -> None:
    runner = real_runner(checkpoint, device("mirage"), depth=2)
    assert runner.graphs.buckets == () and runner.graphs.count == 0


def test_buckets_fit_the_budget_and_reach_the_largest_batch() -> None:
    assert graph_buckets(ShapePolicy(), GraphBudget(), 11) == (1, 2, 3, 4, 5, 6, 7, 8, 10, 11)
    assert graph_buckets(ShapePolicy(), GraphBudget(), 0) == ()
    four = graph_buckets(ShapePolicy(), GraphBudget(max_graphs=4), 256)
    assert len(four) == 4 and four[0] == 1 and four[-1] == 256
    assert graph_buckets(ShapePolicy(), GraphBudget(max_graphs=1), 256) == (256,)
    static = ShapePolicy(tokens=(4, 16, 64), rows=(4, 8, 16), blocks_per_row=(2,))
    assert graph_buckets(static, GraphBudget(max_graphs=4), 15) == (4, 16)
