"""A model whose next token depends on every cached token at its own position, and a scheduler of a screen's length.

The model reads tokens back from the cache through block tables, so a wrong slot, block, length or position gives a
wrong token. All sums are of small integers in float32, so results are exact and do not depend on the batch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from drivetrain.runner.sizes import RunnerConfig
from drivetrain.sched.plan import LateInput, RowStart, StepPlan, StepResult
from drivetrain_api.v1 import AttentionTraits, CachePart, CacheSpec

HIDDEN = 16
MODULUS = 61


def tables(vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    embed = rng.integers(0, MODULUS, (vocabulary, HIDDEN)).astype(np.float32)
    head = rng.integers(-40, 41, (HIDDEN, vocabulary)).astype(np.float32)
    return embed, head


def expected_hidden(tokens: list[int], vocabulary: int, window: int, embeds=None, shift=0) -> np.ndarray:
    """The final hidden state of the last of ``tokens``, on the host."""
    embed, _ = tables(vocabulary)
    last = len(tokens) - 1
    total = np.zeros(HIDDEN, np.float64)
    for s, token in enumerate(tokens):
        total += embed[token] * (s % 7 + 1)
        if s > last - window:
            total += embed[token][::-1] * (s % 5 + 1)
    own = embed[tokens[-1]] if embeds is None or last >= len(embeds) else embeds[last]
    return ((total + own + (last + shift) % 11) % MODULUS).astype(np.float32)


def expected_logits(tokens: list[int], vocabulary: int, window: int, **more) -> np.ndarray:
    return expected_hidden(tokens, vocabulary, window, **more) @ tables(vocabulary)[1]


def expected_greedy(prompt: list[int], count: int, vocabulary: int, window: int, **more) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(expected_logits(tokens, vocabulary, window, **more).argmax()))
    return tokens[len(prompt) :]


class FakeAttention:
    """Keeps the batch as the plan; the decoder below reads and writes by itself."""

    traits = AttentionTraits()

    def plan(self, batch):
        assert int(batch.query_start_host[-1]) == batch.slots_dev.shape[0]
        assert batch.num_rows == batch.lengths_dev.shape[0]
        return batch


@dataclass(frozen=True)
class FakeGroup:
    spec: CacheSpec
    layout: object
    layers: tuple[int, ...]
    attention: FakeAttention


@dataclass(frozen=True)
class FakeSpec:
    vocabulary: int
    hidden: int = HIDDEN


class FakeDecoder:
    """Layer 0 keeps all tokens, layer 1 a window of them. Hidden sums live in the carry's ``residual``."""

    greedy = None

    def __init__(self, backend, *, vocabulary: int = 97, window: int = 20, block_tokens: int = 16, layers=(0, 1)):
        self.spec = FakeSpec(vocabulary)
        self.window = window
        self.layers = layers
        runtime = backend.device
        embed, head = tables(vocabulary)
        self.table, self.head = runtime.from_host(embed), runtime.from_host(head)
        self.reversed = runtime.from_host(np.ascontiguousarray(embed[:, ::-1]))
        parts = (CachePart(name="token", shape=(2,), dtype="float32"),)
        kinds = {0: CacheSpec(kind="full", parts=parts), 1: CacheSpec(kind="window", parts=parts, window=window)}
        self.cache_specs = tuple(kinds[layer] for layer in layers)
        self.groups = tuple(
            FakeGroup(spec, backend.storage.layout(spec, block_tokens), (i,), FakeAttention())
            for i, spec in enumerate(self.cache_specs)
        )
        self.fail_on: int | None = None
        self.spoil: int | None = None
        self.positions_seen: list = []

    def embed(self, ids):
        hidden = self.table[ids]
        return {"hidden": hidden, "residual": hidden * 0, "ids": ids}

    def forward(self, carry, step):
        residual = carry["residual"]
        self.positions_seen.append(step.positions)
        for i, layer in enumerate(self.layers):
            batch, cache = step.plans[i], step.caches[i]
            if self.fail_on is not None:
                raise RuntimeError(f"planted failure {self.fail_on}")
            ids, places = carry["ids"], batch.positions_dev
            values = torch.stack((ids.to(torch.float32), places.to(torch.float32)), -1)
            cache.write(batch.slots_dev, (values,))
            residual = residual + self._sums(batch, cache, layer)
        return {**carry, "residual": residual, "positions": step.positions.reshape(-1, step.ids.shape[0])[-1]}

    def _sums(self, batch, cache, layer):
        size = cache.layout.block_tokens
        table = batch.block_table_dev[batch.token_row_dev]  # [T, W]
        width = table.shape[1] * size
        place = (table.new_ones(width).cumsum(0) - 1).to(table.dtype)
        slots = (table.unsqueeze(-1) * size + place[:size]).flatten(1)  # [T, W * size]
        query = batch.positions_dev.unsqueeze(1)
        inside = (place <= query) & (place < batch.lengths_dev[batch.token_row_dev].unsqueeze(1))
        if layer == 1:
            inside = inside & (place > query - self.window)
        (kept,) = cache.read(torch.where(inside, slots, 0).flatten())
        kept = kept.unflatten(0, slots.shape)
        tokens = torch.where(inside, kept[..., 0], 0.0).to(torch.int32).clamp(0, len(self.table) - 1)
        factor = kept[..., 1] % 5 + 1 if layer == 1 else kept[..., 1] % 7 + 1
        rows = (self.reversed if layer == 1 else self.table)[tokens]
        return (rows * torch.where(inside, factor, 0.0).unsqueeze(-1)).sum(1)

    def finish(self, carry):
        position = (carry["positions"] % 11).to(torch.float32).unsqueeze(-1)
        hidden = (carry["residual"] + carry["hidden"] + position) % MODULUS
        if self.spoil is not None:
            hidden = torch.where(carry["ids"].unsqueeze(-1) == self.spoil, float("nan"), hidden)
        return hidden

    def logits(self, hidden):
        return hidden @ self.head


@dataclass
class Job:
    """A request of the small scheduler. ``draws``: an upper bound of tokens drawn; ``out``: what is known."""

    prompt: list[int]
    max_new: int
    start: dict = field(default_factory=dict)
    late: bool = False
    arrive: int = 0
    row: int = -1
    prefilled: int = 0
    draws: int = 0
    out: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    late_pending: int = 0
    blocks: tuple[list[int], ...] = ()
    pooled: np.ndarray | None = None
    error: str = ""
    done: bool = False


class MiniScheduler:
    """Random chunked prefill beside decode, growing block tables, rows reused after their request."""

    def __init__(self, *, rows: int, budget: int, block_tokens: int, num_blocks: int, max_drafts=0, groups=2, seed=0):
        self.rng = random.Random(seed)
        self.rows, self.budget, self.size, self.k, self.groups = rows, budget, block_tokens, max_drafts, groups
        self.free_rows = list(range(rows))
        self.free_blocks = [list(range(1, num_blocks)) for _ in range(groups)]
        for blocks in self.free_blocks:
            self.rng.shuffle(blocks)
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.ends: list[int] = []
        self.plan_id = 0
        self.members: dict[int, list[Job]] = {}
        self.extra: dict = {}

    def add(self, job: Job) -> Job:
        self.waiting.append(job)
        return job

    def schedule(self) -> StepPlan | None:
        starts = self._admit()
        decode = [
            j for j in self.running if j.prefilled == len(j.prompt) and not j.late_pending and j.draws < j.max_new
        ]
        verify = [j for j in decode if self.k and j.start.get("max_drafts")]
        plain = [j for j in decode if j not in verify]
        rows, new, first, ids = plain + verify, [1] * len(plain), [-1] * len(decode), []
        new += [min(self.k + 1, j.max_new - j.draws) for j in verify]
        left = self.budget - sum(new)
        for job in self.running:
            todo = len(job.prompt) - job.prefilled
            if todo and left > 0:
                chunk = min(todo, left, self.rng.randint(1, max(1, self.budget)))
                rows.append(job)
                new.append(chunk)
                first.append(job.prefilled)
                ids += job.prompt[job.prefilled : job.prefilled + chunk]
                left -= chunk
        if not rows:
            return None
        return self._plan(starts, rows, new, first, ids, len(plain), len(verify))

    def _admit(self):
        starts = []
        ready = [j for j in self.waiting if j.arrive <= self.plan_id]
        for job in ready[: len(self.free_rows)]:
            self.waiting.remove(job)
            job.row = self.free_rows.pop(self.rng.randrange(len(self.free_rows)))
            job.blocks = tuple([] for _ in range(self.groups))
            base = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, sample_index=0)
            starts.append(
                RowStart(row=job.row, request_id=id(job), epoch=0, computed=0, late=job.late, **{**base, **job.start})
            )
            self.running.append(job)
        return tuple(starts)

    def _plan(self, starts, rows, new, first, ids, num_decode, num_verify):
        bounds, sample, blocks = [], [], []
        for index, (job, count, start) in enumerate(zip(rows, new, first, strict=True)):
            if start < 0:
                bounds.append(len(job.prompt) + job.draws - 1 + count)
                job.draws += count
                sample.append(True)
            else:
                job.prefilled += count
                bounds.append(start + count)
                sample.append(job.prefilled == len(job.prompt))
                job.draws += sample[-1] and "pooling" not in job.start
            if job.late and sample[-1]:
                job.late_pending += 1
            for group in range(self.groups):
                while len(job.blocks[group]) * self.size < bounds[index]:
                    block = self.free_blocks[group].pop()
                    blocks.append((job.row, group, len(job.blocks[group]), block))
                    job.blocks[group].append(block)
        plan = StepPlan(
            plan_id=self.plan_id,
            rows=np.array([j.row for j in rows], np.int32),
            epochs=np.zeros(len(rows), np.int32),
            num_new=np.array(new, np.int32),
            start=np.array(first, np.int32),
            bounds=np.array(bounds, np.int32),
            sample=np.array(sample, bool),
            num_decode=num_decode,
            num_verify=num_verify,
            prompt_ids=np.array(ids, np.int32),
            starts=starts,
            ends=tuple(self.ends),
            blocks=np.array(blocks, np.int32).reshape(-1, 4),
            late_rows=tuple(i for i, j in enumerate(rows) if j.late and sample[i]),
            **self.extra,
        )
        self.ends = []
        self.members[self.plan_id] = rows
        self.plan_id += 1
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        assert result.plan_id == plan.plan_id
        spoilt = set(result.non_finite.tolist())
        pooled = dict(result.pooled)
        for index, job in enumerate(self.members.pop(plan.plan_id)):
            count = int(result.counts[index])
            if job.done:
                continue
            if result.failure or index in spoilt:
                job.error = result.failure or "non-finite"
                self._finish(job)
                continue
            kept = result.tokens[index, :count].tolist()
            job.out += kept
            if plan.sample[index] and plan.start[index] < 0:
                job.draws -= int(plan.num_new[index]) - count
            if result.logprobs is not None:
                for entry in np.flatnonzero(result.logprobs.index == index):
                    lp = result.logprobs
                    job.logprobs.append(
                        (
                            int(lp.place[entry]),
                            float(lp.logprob[entry]),
                            int(lp.rank[entry]),
                            lp.top_ids[entry],
                            lp.top_logprobs[entry],
                        )
                    )
            if index in pooled:
                job.pooled = pooled[index]
                self._finish(job)
            elif len(job.out) >= job.max_new:
                self._finish(job)

    def _finish(self, job: Job) -> None:
        job.done = True
        self.running.remove(job)
        self.ends.append(job.row)
        self.free_rows.append(job.row)
        for group, blocks in enumerate(job.blocks):
            self.free_blocks[group] += blocks
            self.rng.shuffle(self.free_blocks[group])


def drive(executor, sched: MiniScheduler, *, depth: int, late=None, hook=None) -> int:
    """Run until nothing is left; returns the number of steps. ``late(job) -> mask rows`` for late jobs."""
    flights: list[StepPlan] = []
    steps = 0
    while True:
        while len(flights) < depth and (plan := sched.schedule()) is not None:
            executor.forward(plan)
            executor.sample(plan.plan_id, None)
            flights.append(plan)
            if hook is not None:
                hook(plan)
        if not flights:
            if not sched.waiting:
                return steps
            sched.plan_id += 1
            continue
        plan = flights[0]
        if plan.late_rows:
            members = sched.members[plan.plan_id]
            masks = []
            for index in plan.late_rows:
                count = 1 if plan.start[index] >= 0 else int(plan.num_new[index])
                masks += [late(members[index])] * count
                members[index].late_pending -= 1
            executor.sample(plan.plan_id, LateInput(indices=np.array(plan.late_rows, np.int32), mask=np.stack(masks)))
        result = executor.poll(True)
        assert result is not None
        flights.pop(0)
        sched.commit(plan, result)
        steps += 1
        assert steps < 5000


def runner_config(**more) -> RunnerConfig:
    return RunnerConfig(**{**dict(max_num_seqs=6, max_num_batched_tokens=48, max_model_len=200), **more})
