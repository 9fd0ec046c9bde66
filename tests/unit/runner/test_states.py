"""Recurrent groups: working blocks, zeroed fresh states, checkpoints exported inside a chunk, copies on a hit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drivetrain.errors import ConfigError
from drivetrain.ops import Ops
from drivetrain.runner.batch import step_limits
from drivetrain.runner.forward import StatePlan
from drivetrain.runner.runner import Runner
from drivetrain.runner.warmup import warm_up
from drivetrain.sched.plan import BlockCopy, RowStart, StateExport, StepPlan
from drivetrain_api.v1 import CachePart, CacheSpec
from tests.unit.runner.devices import DEVICES, device
from tests.unit.runner.fakes import HIDDEN, MODULUS, FakeDecoder, FakeGroup, FakeSpec, runner_config, tables

VOCABULARY = 97
FULL, STATE = 0, 1


class StatePlanner:
    """Recurrent groups are not planned by anything of their own."""


class StateDecoder:
    """One attention layer of the fake model, and one layer whose state is state * 3 + embedding, modulo 61."""

    greedy = None

    def __init__(self, backend) -> None:
        size = backend.storage.block_tokens[0]
        self._attention = FakeDecoder(backend, vocabulary=VOCABULARY, block_tokens=size, layers=(0,))
        self.spec = FakeSpec(VOCABULARY)
        state = CacheSpec(kind="recurrent", parts=(CachePart(name="state", shape=(HIDDEN,), dtype="float32"),))
        group = FakeGroup(state, backend.storage.layout(state, size), (1,), StatePlanner())
        self.groups = (*self._attention.groups, group)
        self.cache_specs = (*self._attention.cache_specs, state)
        self.embed, self.logits = self._attention.embed, self._attention.logits

    def forward(self, carry, step):
        plan, cache = step.plans[STATE], step.caches[1]
        assert isinstance(plan, StatePlan)
        assert step.state_blocks[STATE] is plan.state_blocks and step.state_blocks[FULL] is None
        states, exports = [], {(i, offset): block for i, offset, block in plan.exports_host}
        bounds = plan.query_start_host
        rows = self._attention.table[carry["ids"]]
        for b in range(len(bounds) - 1):
            block = plan.state_blocks[b : b + 1]
            (state,) = cache.read(block)
            for at, t in enumerate(range(int(bounds[b]), int(bounds[b + 1]))):
                state = (state * 3 + rows[t]) % MODULUS
                states.append(state)
                if (b, at + 1) in exports:
                    rank = next(n for n, e in enumerate(plan.exports_host) if e[:2] == (b, at + 1))
                    cache.write(step.exports[STATE][rank, 2:], (state,))
            if bounds[b + 1] > bounds[b]:
                cache.write(block, (state,))
        out = self._attention.forward(carry, step)
        return {**out, "hidden": out["hidden"] + torch.cat(states)}

    def finish(self, carry):
        return self._attention.finish(carry)


def expected(tokens: list[int], count: int) -> list[int]:
    embed, head = tables(VOCABULARY)
    tokens = list(tokens)
    for _ in range(count):
        last, state, total = len(tokens) - 1, np.zeros(HIDDEN), np.zeros(HIDDEN)
        for s, token in enumerate(tokens):
            state = (state * 3 + embed[token]) % MODULUS
            total += embed[token] * (s % 7 + 1)
        hidden = (total + embed[tokens[-1]] + state + last % 11) % MODULUS
        tokens.append(int((hidden.astype(np.float32) @ head).argmax()))
    return tokens[-count:]


def make(kind: str) -> Runner:
    backend = device(kind)
    decoder = StateDecoder(backend)
    caches = tuple(backend.storage.allocate(group.layout, 40) for group in decoder.groups)
    size = backend.storage.block_tokens[0]
    return Runner(backend, decoder, caches, runner_config(), Ops(backend, block_tokens=size))


def plan(plan_id: int, rows: list[tuple[int, int, list[int] | None]], **more) -> StepPlan:
    """``rows``: (row, start, prompt tokens), or (row, length bound, None) for decode."""
    decode = [r for r in rows if r[2] is None]
    ordered = decode + [r for r in rows if r[2] is not None]
    counts = [1 if r[2] is None else len(r[2]) for r in ordered]
    return StepPlan(
        plan_id=plan_id,
        rows=np.array([r[0] for r in ordered], np.int32),
        epochs=np.zeros(len(ordered), np.int32),
        num_new=np.array(counts, np.int32),
        start=np.array([-1 if r[2] is None else r[1] for r in ordered], np.int32),
        bounds=np.array([r[1] if r[2] is None else r[1] + n for r, n in zip(ordered, counts, strict=True)], np.int32),
        sample=np.ones(len(ordered), bool),
        num_decode=len(decode),
        prompt_ids=np.array([t for r in ordered for t in r[2] or ()], np.int32),
        **more,
    )


def start(row: int) -> RowStart:
    return RowStart(
        row=row,
        request_id=row,
        epoch=0,
        computed=0,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        sample_index=0,
    )


def blocks(*entries) -> np.ndarray:
    return np.array(entries, np.int32)


def step(runner: Runner, submitted: StepPlan) -> dict[int, int]:
    runner.forward(submitted)
    runner.sample(submitted.plan_id, None)
    result = runner.poll(True)
    assert not result.failure, result.failure
    return {int(row): int(result.tokens[i, 0]) for i, row in enumerate(submitted.rows)}


@pytest.mark.parametrize("kind", DEVICES)
def test_states_live_in_blocks_and_a_checkpoint_starts_another_request(kind: str) -> None:
    runner = make(kind)
    warm_up(runner, step_limits(runner.backend.shapes, 6, 48))
    prompt, other = [3, 14, 15, 9, 26, 5, 35, 8, 9], [2, 7, 1]
    first = step(
        runner,
        plan(
            0,
            [(0, 0, prompt), (2, 0, other)],
            starts=(start(0), start(2)),
            blocks=blocks((0, FULL, 0, 7), (2, FULL, 0, 9), (0, STATE, 0, 11), (2, STATE, 0, 12)),
            zeroed=((STATE, 11), (STATE, 12)),
            exports=(
                StateExport(group=STATE, index=0, offset=4, block=20),
                StateExport(group=STATE, index=0, offset=8, block=21),
            ),
        ),
    )
    assert first == {0: expected(prompt, 1)[0], 2: expected(other, 1)[0]}
    again = prompt[:8] + [50, 51]
    second = step(
        runner,
        plan(
            1,
            [(0, len(prompt) + 1, None), (2, len(other) + 1, None), (1, 8, again[8:])],
            starts=(start(1),),
            blocks=blocks((1, FULL, 0, 8), (1, STATE, 0, 13)),
            copies=(BlockCopy(group=STATE, source=21, target=13), BlockCopy(group=FULL, source=7, target=8)),
        ),
    )
    assert second == {0: expected(prompt, 2)[1], 2: expected(other, 2)[1], 1: expected(again, 1)[0]}
    third = step(
        runner,
        plan(
            2,
            [(0, len(prompt) + 2, None), (2, len(other) + 2, None), (1, len(again) + 1, None)],
        ),
    )
    assert third == {0: expected(prompt, 3)[2], 2: expected(other, 3)[2], 1: expected(again, 2)[1]}


def test_drafts_and_recurrent_layers_are_refused_together() -> None:
    backend = device("cpu")
    decoder = StateDecoder(backend)
    caches = tuple(backend.storage.allocate(group.layout, 40) for group in decoder.groups)
    with pytest.raises(ConfigError, match="recurrent layers can't verify drafts"):
        Runner(backend, decoder, caches, runner_config(max_drafts=2), Ops(backend, block_tokens=16))
