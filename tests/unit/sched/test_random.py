"""Ten thousand random operations, with every invariant checked after each of them."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain.loop import Loop
from tests.unit.sched.simulated import FULL, STATE, WINDOW, SimulatedRunner, ask, expected, make

CASES = {
    "shared": ({}, 1, 0),
    "deep": ({}, 3, 0),
    "partitioned": ({"shared": False}, 2, 0),
    "drafts": ({}, 2, 3),
    "large_blocks": ({"groups": ({**FULL, "block_tokens": 16}, {**WINDOW, "block_tokens": 16})}, 2, 0),
    "recurrent": ({"groups": (FULL, STATE)}, 2, 0),
    "no_prefix": ({"prefix_caching": False}, 2, 0),
    "tight": ({"budget": 200 * 1024}, 2, 0),
    "tight_drafts": ({"budget": 200 * 1024, "max_num_seqs": 5}, 3, 2),
    "fixed_chunks": ({"fixed_chunk": 16}, 2, 0),
}


class Fleet:
    """A loop over the simulated runner, with what every request must produce."""

    def __init__(self, seed: int, depth: int, drafts: int, settings: dict) -> None:
        self.scheduler, manager = make(**settings, max_drafts=drafts)
        self.runner = SimulatedRunner(manager, 8, drafts, seed)
        self.loop = Loop(self.scheduler, self.runner, depth=depth)
        self.random = np.random.default_rng(seed)
        self.want: dict[int, tuple[list[int], str]] = {}
        self.got: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.failed: set[int] = set()
        self.next = 0
        self.prompts = [self.random.integers(0, 50, 64) for _ in range(3)]

    def add(self) -> None:
        base = self.prompts[self.random.integers(3)]
        prompt = base[: self.random.integers(1, 60)].copy()
        if self.random.random() < 0.3:
            prompt[-1] = self.random.integers(50)
        samples = int(self.random.integers(1, 4)) if self.random.random() < 0.2 else 1
        most = int(self.random.integers(1, 30))
        group = self.next
        for sample in range(samples):
            number, self.next = self.next, self.next + 1
            self.want[number] = expected(prompt, min(most, 96 - len(prompt)), sample)
            self.got[number] = []
            self.loop.submit(
                ask(
                    number,
                    prompt,
                    most,
                    sample_index=sample,
                    fanout=group if samples > 1 else None,
                    priority=int(self.random.integers(3)),
                )
            )

    def step(self) -> None:
        for outputs in self.loop.step():
            at = 0
            for number, count in zip(outputs.request_ids.tolist(), outputs.counts.tolist(), strict=True):
                assert number in self.want and number not in self.aborted, "tokens of a request that ended"
                self.got[number] += outputs.tokens[at : at + count].tolist()
                at += count
            for end in outputs.finished:
                if end.reason == "error":
                    self.failed.add(end.request_id)
                    continue
                tokens, reason = self.want.pop(end.request_id)
                if end.reason == "abort":
                    assert end.request_id in self.aborted
                    assert self.got[end.request_id] == tokens[: len(self.got[end.request_id])]
                else:
                    assert (self.got[end.request_id], end.reason) == (tokens, reason)

    def abort(self) -> None:
        alive = [n for n in self.want if n not in self.aborted | self.failed]
        if alive:
            number = int(self.random.choice(alive))
            self.loop.abort(number)
            self.aborted.add(number)

    def operate(self) -> None:
        kind = self.random.random()
        if kind < 0.25 and len(self.want) < 24:
            self.add()
        elif kind < 0.28:
            self.abort()
        elif kind < 0.285:
            self.scheduler.reset_prefix_cache()
        elif kind < 0.29:
            self.runner.fail_next = True
        elif kind < 0.31 and (running := [*self.scheduler._state.decoding, *self.scheduler._state.prefilling]):
            self.scheduler._state.preempt(int(self.random.choice(running)))
        else:
            self.step()
        self.loop.check_integrity()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_thousand_random_operations(name: str, seed: int) -> None:
    settings, depth, drafts = CASES[name]
    fleet = Fleet(seed, depth, drafts, settings)
    for _ in range(500):
        fleet.operate()
    fleet.runner.fail_next = False
    for _ in range(3000):
        if not fleet.loop.has_work() and not fleet.loop.in_flight:
            break
        fleet.step()
    fleet.loop.check_integrity()
    assert set(fleet.want) == fleet.failed, "requests were forgotten"
    stats = fleet.loop.stats()
    assert (stats.waiting, stats.running, stats.cache_used, stats.cache_use) == (0, 0, 0, 0.0)
    assert fleet.next > 60, "too few requests to mean anything"
