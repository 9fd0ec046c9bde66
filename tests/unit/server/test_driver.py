"""What the loop's process does without work: a piece that was put off between two looks at the socket, then sleep."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

import numpy as np

from drivetrain import moments
from drivetrain.config import EngineConfig
from drivetrain.errors import DrivetrainError
from drivetrain.params import GenerateRequest, SamplingParams, StepOutputs
from drivetrain.server import loop_process
from drivetrain.server.loop_process import LULL_SECONDS, Driver, serve
from drivetrain.server.messages import PROTOCOL, Launch, LoopError, Stats, Stop, submit_of

BEAT = 0.25
WAITS: dict[int, float] = {}  # what ``rest`` answers with so many pieces left; 0 for others


class Told:
    """A loop with some steps of work and some pieces put off, and a channel; writes down who was called."""

    def __init__(self, steps: int, pieces: int, looks: int) -> None:
        self.steps, self.pieces, self.looks = steps, pieces, looks
        self.log: list[object] = []
        self.in_flight = 1

    def has_work(self) -> bool:
        return self.steps > 0

    def step(self) -> tuple:
        self.steps -= 1
        self.log.append("step")
        return ()

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace()

    def send(self, message: object) -> None:
        """Beats are of no interest here."""

    def receive(self, timeout: float) -> Stop | None:
        self.looks -= 1
        if self.looks < 0:
            return None
        self.log.append(timeout)
        return Stop() if self.looks == 0 else None


class Idling(Told):
    def rest(self) -> float:
        self.log.append("rest")
        self.pieces -= 1
        return WAITS.get(self.pieces, 0.0) if self.pieces >= 0 else math.inf


def drive(told: Told) -> list[object]:
    Driver(told, told, BEAT, os.getppid()).run()
    return told.log


def test_pieces_are_done_without_work_only_and_messages_are_seen_between_them() -> None:
    log = drive(Idling(steps=2, pieces=3, looks=8))
    assert log[:5] == [0.0, "step", 0.0, "step", LULL_SECONDS]
    assert log[5:11] == ["rest", 0.0] * 3
    assert log[11:] == ["rest", BEAT] * 2, "with none left it sleeps on the socket"


def test_nothing_put_off_means_sleep_at_once() -> None:
    assert drive(Idling(steps=0, pieces=0, looks=3)) == ["rest", BEAT] * 3


def test_it_sleeps_on_the_socket_until_a_piece_is_due(monkeypatch) -> None:
    monkeypatch.setitem(WAITS, 1, BEAT / 4)
    monkeypatch.setitem(WAITS, 0, 9 * BEAT)
    assert drive(Idling(steps=0, pieces=2, looks=3)) == ["rest", BEAT / 4, "rest", BEAT, "rest", BEAT]


class Serving(Told):
    """Takes one request, has its token after one step, and writes down all that it is asked and all that is told."""

    def submit(self, request: GenerateRequest) -> None:
        self.steps = 1

    def fill(self) -> None:
        self.log.append("fill")

    def settle(self) -> None:
        self.log.append("settle")

    def step(self) -> tuple:
        super().step()
        token = np.ones(1, np.int32)
        return (StepOutputs(request_ids=np.zeros(1, np.int64), counts=token, tokens=token),)

    def receive(self, timeout: float) -> object:
        self.looks -= 1
        request = GenerateRequest(
            request_id=0, prompt_ids=np.ones(1, np.int32), sampling=SamplingParams(), max_tokens=1, seed=0
        )
        return {2: submit_of(request), 0: Stop()}.get(self.looks)

    def send(self, message: object) -> None:
        if not isinstance(message, Stats):
            self.log.append(type(message).__name__)


def test_the_device_begins_before_a_request_is_told_of_and_blocks_go_after_its_end_is() -> None:
    assert drive(Serving(steps=0, pieces=0, looks=3)) == ["fill", "Accepted", "step", "Outputs", "settle"]


def test_moments_of_the_messages_pass_where_they_are_sent() -> None:
    told = Serving(steps=0, pieces=0, looks=3)
    moments.watch(told.log.append)
    try:
        drive(told)
    finally:
        moments.watch(None)
    assert told.log == ["received", "fill", "Accepted", "told", "step", "Outputs", "sent", "settle"]


def test_a_loop_that_puts_nothing_off_needs_no_such_call() -> None:
    assert drive(Told(steps=1, pieces=9, looks=4)) == [0.0, "step", LULL_SECONDS, BEAT, BEAT]


class Slow:
    """A channel whose front end says nothing for some looks; what it is told."""

    def __init__(self, looks: int) -> None:
        self.looks, self.told = looks, []

    def send(self, message: object) -> None:
        self.told.append(message)

    def receive(self, timeout: float) -> Launch | None:
        self.looks -= 1
        config = EngineConfig(model="none")
        said = Launch(protocol=PROTOCOL, factory=f"{__name__}:refuse", config=config, choice=None, beat_seconds=BEAT)
        return said if self.looks < 0 else None


def refuse(config: EngineConfig, choice: None) -> None:
    raise DrivetrainError("nothing to build", fix="none")


def test_it_waits_for_its_first_message_while_the_front_end_lives(monkeypatch) -> None:
    channel = Slow(3)
    assert serve(channel, os.getppid()) == 2
    assert isinstance(channel.told[-1], LoopError) and channel.told[-1].message == "nothing to build"
    gone = Slow(3)
    assert serve(gone, -1) == 1 and gone.looks == 2
    monkeypatch.setattr(loop_process, "LAUNCH_SECONDS", 0.0)
    assert serve(gone, os.getppid()) == 1 and gone.looks == 1
