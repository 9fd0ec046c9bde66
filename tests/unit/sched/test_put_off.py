"""Work that was put off at the start: done when idle, for a share of the time between steps, then never again."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from drivetrain.loop import LATER_SHARE, REST_SECONDS, Loop
from tests.unit.sched.simulated import ask
from tests.unit.sched.test_scheduler import prompt, run, setup

STEP_SECONDS, PIECE_SECONDS = 1.0, 0.5


class PutOff:
    """An executor's pieces of work on a clock of its own: a step and a piece take their time there."""

    def __init__(self, loop: Loop, runner, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.left, self.now = loop, pieces, 0.0
        self.done: list[tuple[float, float]] = []
        self.asked = 0
        self._forward = runner.forward
        runner.later, runner.forward = self.later, self.forward
        monkeypatch.setattr("drivetrain.loop.time", SimpleNamespace(perf_counter=lambda: self.now))

    def forward(self, plan) -> None:
        self.now += STEP_SECONDS
        self._forward(plan)

    def later(self) -> bool:
        self.asked += 1
        if self.left == 0:
            return False
        begin, self.now, self.left = self.now, self.now + PIECE_SECONDS, self.left - 1
        self.done.append((begin, self.now))
        return True


@pytest.fixture
def put_off(monkeypatch):
    def make(pieces: int, depth: int = 1) -> PutOff:
        loop, runner = setup(depth)
        return PutOff(loop, runner, pieces, monkeypatch)

    return make


def test_an_idle_loop_does_a_piece_a_call_and_says_when_none_is_left(put_off) -> None:
    made = put_off(3)
    assert [made.loop.idle() for _ in range(6)] == [True, True, True, False, False, False]
    assert len(made.done) == 3
    assert made.asked == 4, "once there is none, nobody asks again"


def test_pieces_wait_until_the_loop_has_rested(put_off) -> None:
    made = put_off(4)
    made.loop.submit(ask(0, prompt(9, 0), 2, eos_ids=()))
    run(made.loop)
    done = len(made.done)
    assert done < 4
    assert made.loop.rest() == pytest.approx(REST_SECONDS) and len(made.done) == done
    made.now += 0.75 * REST_SECONDS
    assert made.loop.rest() == pytest.approx(0.25 * REST_SECONDS) and len(made.done) == done
    made.now += 0.25 * REST_SECONDS + 1e-9
    assert made.loop.rest() == 0.0 and len(made.done) == done + 1
    assert made.loop.rest() == 0.0 and len(made.done) == done + 2, "it rests still: no request has come"
    made.loop.submit(ask(1, prompt(9, 1), 1, eos_ids=()))
    run(made.loop)
    done = len(made.done)
    assert made.loop.rest() > 0.0 and len(made.done) == done, "another request: it rests anew"


def test_a_new_loop_rests_first_and_one_without_pieces_never_asks_to_be_called(put_off) -> None:
    made = put_off(0)
    made.loop._rested_at = made.now + REST_SECONDS
    assert 0.0 < made.loop.rest() <= REST_SECONDS and made.asked == 0
    made.now += 2 * REST_SECONDS
    assert made.loop.rest() == math.inf and made.asked == 1
    assert made.loop.rest() == math.inf and made.asked == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_between_steps_it_takes_a_share_of_the_time_at_most(put_off, depth: int) -> None:
    made = put_off(10_000, depth)
    for number in range(6):
        made.loop.submit(ask(number, prompt(9, number), 60, eos_ids=()))
        run(made.loop)
    assert len(made.done) > 5, "a busy loop works it off too"
    for (begin, end), (following, _) in zip(made.done, made.done[1:], strict=False):
        assert following - end >= (end - begin) / LATER_SHARE
        assert following - end < (end - begin) / LATER_SHARE + 2 * STEP_SECONDS, "and no later than at the next step"
    used = sum(end - begin for begin, end in made.done[:-1])
    assert used <= LATER_SHARE * made.done[-1][0]


def test_steps_ask_no_more_once_there_is_none(put_off) -> None:
    made = put_off(1)
    for number in range(3):
        made.loop.submit(ask(number, prompt(9, number), 60, eos_ids=()))
        run(made.loop)
    assert made.asked == 2 and len(made.done) == 1
    assert not made.loop.idle() and made.asked == 2


@pytest.mark.parametrize("settles", [True, False])
def test_a_step_tells_its_tokens_before_any_piece_is_done(put_off, settles: bool) -> None:
    made = put_off(3)
    made.loop.submit(ask(0, prompt(9, 0), 3, eos_ids=()))
    tokens = 0
    while not tokens:
        tokens += sum(len(outputs.tokens) for outputs in made.loop.step())
    assert not made.done
    if settles:
        made.loop.settle()
        assert len(made.done) == 1
    made.loop.step()
    assert len(made.done) == 1, "one between two steps, whoever gives time for it"
