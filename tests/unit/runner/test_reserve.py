"""Memory after ready: on an allocator that keeps what is freed, and on an emulated device that runs out of it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from drivetrain.dist.executors import InlineExecutor
from drivetrain.runner.batch import step_limits
from drivetrain.runner.dummies import capture_missing
from drivetrain.runner.reserve import MARGIN, MIB, Reserve
from drivetrain.runner.warmup import warm_up
from drivetrain_api.v1 import MemoryInfo
from drivetrain_api.v1.torch_runtime import classify_torch_error
from drivetrain_mirage.ledger import MirageOutOfMemory
from tests.unit.runner.devices import device
from tests.unit.runner.test_graphs import checkpoint, lose, many_graphs, real_runner, serve, shape
from tests.unit.runner.test_runner import plan_of, step

__all__ = ["checkpoint", "many_graphs"]
STEP, EACH = 400 * MIB, 2 * MIB


class Piece:
    """Bytes handed out; they go back to the allocator with it."""

    def __init__(self, owner: Allocator, nbytes: int) -> None:
        self.owner, self.nbytes = owner, nbytes

    def __del__(self) -> None:
        self.owner.live -= self.nbytes
        self.owner.kept += self.nbytes if self.owner.keeps else 0


class Allocator:
    """A device of ``total`` bytes whose allocator keeps what is freed until it is trimmed, as one piece."""

    def __init__(self, total: int, *, keeps: bool = True) -> None:
        self.total, self.keeps = total, keeps
        self.live = self.kept = self.graphs = 0
        self.trims = 0
        self.classify_error = classify_torch_error

    def memory(self) -> MemoryInfo:
        free = self.total - self.live - self.kept - self.graphs
        return MemoryInfo(free=free, total=self.total, allocated=self.live, peak=0)

    def empty(self, shape: tuple[int], dtype: torch.dtype) -> Piece:
        (nbytes,) = shape
        from_kept = min(self.kept, nbytes)
        if nbytes - from_kept > self.memory().free:
            raise torch.OutOfMemoryError(f"{nbytes} bytes asked for")
        self.kept -= from_kept
        self.live += nbytes
        return Piece(self, nbytes)

    def capture(self, nbytes: int) -> None:
        """A graph's memory: never from what steps have freed."""
        if nbytes > self.memory().free:
            raise torch.OutOfMemoryError(f"{nbytes} bytes asked for in a capture")
        self.graphs += nbytes

    def synchronize(self) -> None:
        """Nothing runs."""

    def trim(self) -> None:
        self.trims += 1
        self.kept = 0


def reserve_over(runtime: Allocator, *, graphs: int, step: int = STEP, host: bool = False) -> Reserve:
    memory = SimpleNamespace(graph_estimate=lambda count, tokens: {"bytes": count * EACH // 2})
    capabilities = SimpleNamespace(shared_host_memory=host)
    made = Reserve(SimpleNamespace(device=runtime, memory=memory, capabilities=capabilities))
    made.plan(graphs=graphs, step=step)
    return made


def test_the_largest_step_stays_held_and_other_bytes_do_not_count_as_its_own() -> None:
    runtime = Allocator(1000 * MIB)
    reserve = reserve_over(runtime, graphs=100 * MIB)
    reserve.hold()
    assert runtime.kept == STEP and reserve.free() == 600 * MIB
    reserve.hold()
    assert runtime.kept == STEP, "holding again takes no more"
    host = reserve_over(Allocator(1000 * MIB), graphs=0, host=True)
    host.hold()
    assert host.free() == 1000 * MIB, "a host's memory is not held ahead"


def test_a_step_that_is_not_there_is_said_before_a_request_comes(caplog) -> None:
    reserve = reserve_over(Allocator(300 * MIB), graphs=0)
    reserve.hold()
    assert "the largest step's 400 MiB are not there, 300 MiB are free" in caplog.text
    runtime = Allocator(300 * MIB)
    runtime.empty = lambda *given: 1 / 0
    with pytest.raises(ZeroDivisionError):
        reserve_over(runtime, graphs=0).hold()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("each", [EACH, 7 * MIB, 30 * MIB])
def test_captures_of_any_size_leave_the_largest_step_its_bytes(keeps, each, caplog) -> None:
    """Planned to 99 %: beyond the plan there is a hundredth, whatever captures turn out to take."""
    first, planned = 120 * MIB, 120 * MIB + 40 * EACH
    runtime = Allocator((STEP + planned + 64 * MIB) * 100 // 99, keeps=keeps)
    reserve = reserve_over(runtime, graphs=planned)
    reserve.hold()
    reserve.measured(lambda: runtime.capture(first))
    done = 1
    while done < 41 and reserve.fits(8):
        reserve.measured(lambda: runtime.capture(each))
        done += 1
        assert runtime.empty((STEP,), torch.uint8).nbytes == STEP
    assert (done == 41) == (each == EACH)
    assert reserve.taken == first + (done - 1) * each
    assert ("no more graphs are captured" in caplog.text) == (done < 41)


def test_a_capture_is_expected_to_take_what_the_dearest_later_one_took() -> None:
    runtime = Allocator(1000 * MIB)
    reserve = reserve_over(runtime, graphs=200 * MIB)
    assert reserve.expected(8) == 200 * MIB, "nothing measured: all that is planned"
    for took in (150 * MIB, 3 * MIB, 9 * MIB, 1 * MIB):
        reserve.measured(lambda took=took: runtime.capture(took))
    assert reserve.expected(8) == 9 * MIB and reserve.taken == 163 * MIB
    short = Allocator(163 * MIB + STEP + 9 * MIB + MARGIN - 1)
    short.graphs = 163 * MIB
    reserve._runtime = short
    reserve.hold()
    assert not reserve.fits(8)
    short.total += 1
    assert reserve.fits(8)


class Cache:
    """Gives back up to ``left`` bytes."""

    def __init__(self, left: int) -> None:
        self.left, self.asked = left, []

    def ask(self, nbytes: int) -> bool:
        self.asked.append(nbytes)
        return nbytes <= self.left


def test_the_cache_is_asked_for_just_what_the_next_capture_lacks() -> None:
    runtime = Allocator(STEP + 9 * MIB + MARGIN + 163 * MIB)
    reserve = reserve_over(runtime, graphs=163 * MIB)
    reserve.hold()
    for took in (150 * MIB, 4 * MIB, 9 * MIB):
        reserve.measured(lambda took=took: runtime.capture(took))
    assert reserve.lacking(8) == 0 and not reserve.given_back(8)
    reserve.giving = Cache(7 * MIB)
    assert not reserve.given_back(8) and not reserve.giving.asked, "it fits"
    runtime.graphs += 7 * MIB
    assert reserve.lacking(8) == 7 * MIB and reserve.given_back(8)
    runtime.graphs += 1
    assert not reserve.given_back(8) and reserve.giving.asked == [7 * MIB, 7 * MIB + 1]
    assert not reserve.fits(8)


@pytest.mark.parametrize("captures", [0, 1, 5])
def test_a_capture_that_ran_out_is_expected_to_need_more_than_there_was(captures: int) -> None:
    runtime = Allocator(STEP + 500 * MIB)
    reserve = reserve_over(runtime, graphs=100 * MIB)
    reserve.hold()
    for _ in range(captures):
        reserve.measured(lambda: runtime.capture(EACH))
    assert reserve.fits(8)
    reserve.renew()
    reserve.fell_short()
    assert reserve.lacking(8) == 2 * MARGIN and not reserve.fits(8)
    runtime.total += 2 * MARGIN
    assert reserve.fits(8)


def test_after_a_capture_the_next_one_is_expected_to_take_what_captures_took() -> None:
    runtime = Allocator(STEP + 500 * MIB)
    reserve = reserve_over(runtime, graphs=100 * MIB)
    reserve.hold()
    for took in (100 * MIB, 3 * MIB, 5 * MIB):
        reserve.measured(lambda took=took: runtime.capture(took))
    reserve.renew()
    reserve.fell_short()
    short = reserve.expected(8)
    assert short > 390 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        reserve.measured(lambda: runtime.capture(1000 * MIB))
    assert reserve.expected(8) == short, "one that fails says nothing new"
    runtime.total += 2 * MARGIN
    assert reserve.fits(8)
    reserve.measured(lambda: runtime.capture(9 * MIB))
    assert reserve.expected(8) == 9 * MIB and reserve.lacking(8) == 0
    reserve.fell_short()
    assert reserve.expected(8) > 390 * MIB, "and again"


def test_without_a_plan_captures_are_not_held_back() -> None:
    assert reserve_over(Allocator(0), graphs=0, step=0).fits(8)


def test_the_second_run_has_what_the_first_one_held() -> None:
    runtime = Allocator(500 * MIB)
    runtime.kept = 200 * MIB
    reserve = reserve_over(runtime, graphs=0, step=0)
    runs = []

    def run() -> int:
        held = runtime.empty((450 * MIB,), torch.uint8)
        runs.append(runtime.memory().free)
        if len(runs) == 1:
            runtime.empty((100 * MIB,), torch.uint8)
        return held.nbytes

    assert reserve.once_more(run) == 450 * MIB
    assert len(runs) == 2 and runtime.trims == 1 and reserve.retried == 1


@pytest.mark.parametrize(
    ("error", "possible", "runs"),
    [(torch.OutOfMemoryError("a"), True, 2), (torch.OutOfMemoryError("a"), False, 1), (ValueError("b"), True, 1)],
)
def test_a_run_is_done_again_once_and_for_want_of_memory_alone(error, possible, runs) -> None:
    reserve, count = reserve_over(Allocator(MIB), graphs=0, step=0), []

    def run() -> None:
        count.append(1)
        raise error

    with pytest.raises(type(error)):
        reserve.once_more(run, lambda: possible)
    assert len(count) == runs


# -- on a device -----------------------------------------------------------------------------------------------


def failing(run, times: int, after: int = 0):
    """Go out of memory at call ``after`` and the following ones, ``times`` in all."""
    left = [after, times]

    def wrapped(*given):
        left[0] -= 1
        if left[0] < 0 and left[1] > 0:
            left[1] -= 1
            raise MirageOutOfMemory("injected")
        return run(*given)

    return wrapped


@pytest.mark.parametrize("what", ["layers", "logits"])
def test_steps_that_run_out_of_memory_once_give_the_same_tokens(checkpoint, what: str, caplog) -> None:
    wanted = serve(real_runner(checkpoint, device("cpu"), max_num_seqs=6), 1)
    runner = real_runner(checkpoint, device("mirage", native=True, delay=0.002), depth=2)
    if what == "layers":
        runner.decoder.forward = failing(runner.decoder.forward, 1, after=7)
    else:
        runner._sampler._drawer._logits = failing(runner._sampler._drawer._logits, 1, after=7)
    assert serve(runner, 2) == wanted
    assert runner.reserve.retried == 1 and "is done again" in caplog.text
    assert InlineExecutor(runner).figures()["memory_retries"] == 1
    runner.close()


def test_a_step_that_runs_out_twice_fails_alone(checkpoint) -> None:
    runner = real_runner(checkpoint, device("mirage", native=True), depth=2)
    runner.decoder.forward = failing(runner.decoder.forward, 2)
    lost = step(runner, plan_of(0, prompt=[7, 8, 9], row=0))
    assert lost.failure_class == "out_of_memory" and "injected" in lost.failure
    assert not step(runner, plan_of(1, prompt=[7, 8, 9], row=1)).failure
    runner.close()


def warmed(checkpoint, **more):
    runner = real_runner(checkpoint, device("mirage", native=True), max_num_seqs=20, depth=2)
    runner.reserve.plan(graphs=MIB, step=MIB, **more)
    warm_up(runner, step_limits(runner.backend.shapes, 20, 48))
    return runner


def test_a_capture_that_would_not_fit_is_not_begun(checkpoint, caplog) -> None:
    runner = warmed(checkpoint)
    lose(runner, 20)
    ledger = runner.runtime.owner.ledger
    ledger.total = ledger.allocated + MARGIN + MIB
    runner.graphs.capture = lambda plan, batch: pytest.fail("it was begun")
    assert capture_missing(runner) and not capture_missing(runner)
    assert caplog.text.count("no more graphs are captured") == 1
    figures = InlineExecutor(runner).figures()
    assert (figures["graphs_captured"], figures["graphs_wanted"], figures["graphs_given_up"]) == (1, 2, 1)
    assert 0 < figures["memory_least_free_bytes"] <= MARGIN + MIB
    assert figures["graphs_planned_bytes"] == MIB and figures["graphs_measured_bytes"] == runner.reserve.taken > 0
    assert "steps are captured" not in caplog.text
    assert len(serve(runner, 2)) == 7, "steps run eagerly"
    runner.close()


def test_a_capture_that_runs_out_of_memory_gives_back_and_the_step_is_held_again(
    checkpoint, monkeypatch, caplog
) -> None:
    runner = warmed(checkpoint)
    lose(runner, 20)
    done = []
    runtime = type(runner.runtime)
    monkeypatch.setattr(runtime, "trim", lambda self: done.append("trim"))
    hold = Reserve.hold
    monkeypatch.setattr(Reserve, "hold", lambda self: (done.append("hold"), hold(self))[1])
    runner.decoder.forward = failing(runner.decoder.forward, 1)
    count = runner.backend.graphs.count
    assert capture_missing(runner) and not capture_missing(runner)
    assert done == ["trim", "hold"] and "could not be captured" in caplog.text
    assert runner.backend.graphs.count == count and InlineExecutor(runner).figures()["graphs_given_up"] == 1
    assert len(serve(runner, 2)) == 7
    runner.close()


def test_captures_go_on_while_they_fit(checkpoint, many_graphs, caplog) -> None:
    caplog.set_level(logging.INFO)
    runner = warmed(checkpoint)
    while capture_missing(runner):
        assert "memory:" not in caplog.text
    figures = InlineExecutor(runner).figures()
    assert figures["graphs_captured"] == figures["graphs_wanted"] == runner.graphs.count > 9
    assert figures["graphs_given_up"] == 0
    assert f"memory: all {runner.graphs.count} steps are captured, in " in caplog.text and "of 1 planned" in caplog.text
    assert runner.graphs.missing() is None and shape(runner, 20).rows == 20
    runner.close()
