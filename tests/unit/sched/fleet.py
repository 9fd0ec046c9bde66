"""Random requests over the simulated runner, with what each of them must produce and every invariant checked."""

from __future__ import annotations

import numpy as np

from drivetrain.cache.sizing import cut, holds_longest
from drivetrain.loop import Loop
from drivetrain.params import PoolingParams
from tests.unit.sched.simulated import (
    Parity,
    SimulatedRunner,
    SlowConnector,
    ask,
    expected,
    make,
    prefix_of,
    vector_of,
)

LONGEST = 96


class Fleet:
    """A loop over the simulated runner, with what every request must produce."""

    def __init__(
        self, seed: int, *, depth: int = 1, drafts: int = 0, connector: SlowConnector | None = None, **settings: object
    ) -> None:
        self.scheduler, manager = make(**settings, connector=connector, max_drafts=drafts)
        self.manager, self.retiring, self.given = manager, False, 0
        self.runner = SimulatedRunner(manager, 8, drafts, seed)
        self.connector = connector
        if connector is not None:
            connector.runner = self.runner
        self.loop = Loop(self.scheduler, self.runner, depth=depth)
        self.random = np.random.default_rng(seed)
        self.want: dict[int, tuple[object, str]] = {}
        self.got: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.started: dict[int, int] = {}
        self.next = 0
        self.prompts = [self.random.integers(0, 50, 64) for _ in range(3)]

    def add(self, *, pooling: bool = False, grammar: bool = False, samples: int = 1) -> None:
        base = self.prompts[self.random.integers(3)]
        prompt = base[: self.random.integers(1, 60)].copy()
        if self.random.random() < 0.3:
            prompt[-1] = self.random.integers(50)
        most = int(self.random.integers(1, 30))
        group = self.next
        for sample in range(samples):
            number, self.next = self.next, self.next + 1
            limit = min(most, LONGEST - len(prompt))
            self.want[number] = expected(prompt, limit, sample, grammar=Parity() if grammar else None)
            if pooling:
                self.want[number] = (vector_of(prefix_of(prompt)), "stop")
            self.got[number] = []
            request = ask(
                number,
                prompt,
                most,
                sample_index=sample,
                fanout=group if samples > 1 else None,
                priority=int(self.random.integers(3)),
                pooling=PoolingParams(normalize=False) if pooling else None,
            )
            if self.connector is not None and not pooling:
                self.connector.prompts[number] = prompt
            self.loop.submit(request, Parity() if grammar else None)

    def step(self) -> None:
        for outputs in self.loop.step():
            at = 0
            for one in outputs.started:
                assert one.request_id not in self.started, "started twice"
                self.started[one.request_id] = one.num_cached
            assert len(outputs.request_ids) == len(outputs.counts) and outputs.counts.min(initial=1) > 0
            for number, count in zip(outputs.request_ids.tolist(), outputs.counts.tolist(), strict=True):
                assert number in self.want and number not in self.aborted, "tokens of a request that ended"
                self.got[number] += outputs.tokens[at : at + count].tolist()
                at += count
            for end in outputs.finished:
                self._ended(end)

    def _ended(self, end: object) -> None:
        number, (tokens, reason) = end.request_id, self.want.pop(end.request_id)
        if end.reason == "error":
            assert number in self.runner.tainted, f"request {number} failed without a cause: {end.error}"
            if not isinstance(tokens, np.ndarray):
                assert self.got[number] == tokens[: len(self.got[number])], "wrong before it failed"
        elif end.reason == "abort":
            assert number in self.aborted
            if not isinstance(tokens, np.ndarray):
                assert self.got[number] == tokens[: len(self.got[number])], "wrong before it was aborted"
        elif isinstance(tokens, np.ndarray):
            assert end.pooled is not None and np.array_equal(end.pooled, tokens), "the pooled vector is another's"
        else:
            assert (self.got[number], end.reason) == (tokens, reason)

    def abort(self) -> None:
        alive = [number for number in self.want if number not in self.aborted]
        if alive:
            number = int(self.random.choice(alive))
            self.loop.abort(number)
            self.aborted.add(number)

    def preempt(self) -> None:
        state = self.scheduler._state
        if running := [*state.decoding, *state.prefilling]:
            state.preempt(int(self.random.choice(running)))

    def shrink(self) -> None:
        """Give some of the cache back, as soon as nobody holds it, unless too little would be left."""
        less = self.random.integers(1, max(2, self.manager.plan.total_bytes // 8))
        limits = cut(self.manager.plan, max(0, self.manager.kept_bytes - int(less)))
        chunk = self.scheduler._state.config.max_num_batched_tokens
        if holds_longest(self.manager.plan, limits, LONGEST, chunk):
            self.manager.retire(limits)
            self.retiring = True

    def settle(self) -> None:
        if self.retiring and self.manager.retired():
            self.retiring = False
            limits = [group.limit for group in self.manager.pool.groups]
            self.given += sum(self.runner.limits) - sum(limits)
            self.runner.limits = limits

    def drain(self) -> None:
        """Run until all is done: nothing may be left behind."""
        self.runner.fail_next = False
        for _ in range(4000):
            if not self.loop.has_work():
                break
            self.step()
            self.settle()
        self.loop.settle()
        self.settle()
        assert not self.retiring, "blocks that nobody holds were not given back"
        self.loop.check_integrity()
        assert not self.want, f"requests were forgotten: {list(self.want)}"
        stats = self.loop.stats()
        assert (stats.waiting, stats.running, stats.waiting_remote, stats.pinned) == (0, 0, 0, 0)
        assert (stats.cache_used, stats.cache_use) == (0, 0.0)

    def operate(self, kind: float) -> None:
        """One random operation, chosen by a number from 0 to 1; every invariant is checked after it."""
        room = len(self.want) < 24
        if kind < 0.17 and room:
            self.add()
        elif kind < 0.19 and room:
            self.add(pooling=True)
        elif kind < 0.22 and room:
            self.add(grammar=True)
        elif kind < 0.25 and room:
            self.add(samples=int(self.random.integers(2, 4)))
        elif 0.25 <= kind < 0.28:
            self.abort()
        elif 0.28 <= kind < 0.285:
            self.scheduler.reset_prefix_cache()
        elif 0.285 <= kind < 0.295:
            self.runner.fail_next = True
        elif 0.295 <= kind < 0.31:
            self.preempt()
        elif 0.31 <= kind < 0.318:
            self.shrink()
        else:
            self.step()
        self.settle()
        self.loop.check_integrity()
