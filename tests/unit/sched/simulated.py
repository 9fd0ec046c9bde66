"""A runner that computes nothing but remembers everything: which token's state lies in which slot of which block.

Reading a slot that was never written, or that holds another prefix's state, is an AssertionError; so sharing, eviction,
sliding and preemption can't go wrong unnoticed. The token drawn after a prefix is a function of the prefix and the
sample index alone, so outputs must not depend on batching, depth, preemption, caching or drafts.
"""

from __future__ import annotations

import hashlib
from collections import deque

import numpy as np

from drivetrain.cache.manager import CacheManager
from drivetrain.cache.sizing import GroupNeed, plan_cache
from drivetrain.params import GenerateRequest, SamplingParams
from drivetrain.sched.plan import LateInput, StepPlan, StepResult
from drivetrain.sched.scheduler import Scheduler, SchedulerConfig

VOCABULARY = 50
END = 7


def digest(parent: bytes, token: int) -> bytes:
    return hashlib.blake2b(parent + int(token).to_bytes(4, "little"), digest_size=8).digest()


def draw(prefix: bytes, sample: int, mask: np.ndarray | None = None) -> int:
    value = int.from_bytes(hashlib.blake2b(prefix + bytes([sample]), digest_size=4).digest(), "little")
    if mask is None:
        return value % VOCABULARY
    allowed = [t for t in range(VOCABULARY) if (int(mask[t // 32]) >> (t % 32)) & 1]
    return allowed[value % len(allowed)]


def expected(
    prompt: np.ndarray, max_tokens: int, sample: int = 0, ends: tuple[int, ...] = (END,)
) -> tuple[list[int], str]:
    """What a request must produce, computed alone and without a cache."""
    state, out = b"", []
    for token in prompt:
        state = digest(state, token)
    for _ in range(max_tokens):
        token = draw(state, sample)
        if token in ends:
            return out, "stop"
        out.append(token)
        state = digest(state, token)
    return out, "length"


class SimulatedRunner:
    """Executes plans when they are submitted, in order; results are handed out when polled."""

    def __init__(self, manager: CacheManager, max_rows: int, max_drafts: int = 0, seed: int = 0) -> None:
        self.groups = manager.plan.groups
        self.slots: list[dict[tuple[int, int], bytes]] = [{} for _ in self.groups]
        self.states: list[dict[int, bytes]] = [{} for _ in self.groups]
        self.tables = [dict[tuple[int, int], int]() for _ in self.groups]
        self.rows: dict[int, dict] = {}
        self.results: deque[StepResult] = deque()
        self.held: dict[int, StepPlan] = {}
        self.max_drafts = max_drafts
        self.random = np.random.default_rng(seed)
        self.fail_next = False
        self.plans: list[StepPlan] = []

    def forward(self, plan: StepPlan) -> None:
        assert len(set(plan.rows.tolist())) == plan.num_rows, "a row twice in one plan"
        self.plans.append(plan)
        for row in plan.ends:
            del self.rows[row]
        for start in plan.starts:
            assert start.row not in self.rows, "a row started twice"
            self.rows[start.row] = {"start": start, "computed": start.computed, "last": [], "prefix": {}}
        for row, group, index, block in plan.blocks.tolist():
            self.tables[group][row, index] = block
        for group, block in plan.zeroed:
            self.states[group][block] = b""
        for copy in plan.copies:
            self.states[copy.group][copy.target] = self.states[copy.group][copy.source]
        self._run(plan)

    def _run(self, plan: StepPlan) -> None:
        width = self.max_drafts + 1
        tokens, counts = np.zeros((plan.num_rows, width), np.int32), np.zeros(plan.num_rows, np.int32)
        self.late: dict[int, tuple[bytes, dict]] = {}
        at = 0
        for i, row in enumerate(plan.rows.tolist()):
            state, num = self.rows[row], int(plan.num_new[i])
            assert state["start"].epoch == plan.epochs[i], "a plan for another occupant of the row"
            if plan.start[i] >= 0:
                ids, begin = plan.prompt_ids[at : at + num].tolist(), int(plan.start[i])
                at += num
            else:
                ids, begin = [state["last"][-1], *self._drafts(state, num - 1)], state["computed"]
            assert plan.bounds[i] >= begin + num, "the host's bound is too low"
            prefixes = [self._token(row, begin + j, token, state) for j, token in enumerate(ids)]
            self._states(plan, i, row, begin, ids)
            if not plan.sample[i]:
                state["computed"] = begin + num
                continue
            if i in plan.late_rows:
                self.late[i] = (prefixes[-1], state)
                state["computed"] = begin + num
                continue
            kept = self._keep(plan.start[i] >= 0, ids, prefixes, state)
            tokens[i, : len(kept)], counts[i] = kept, len(kept)
            state["last"] = kept
            state["computed"] = begin + (num if plan.start[i] >= 0 else len(kept))
        failure = "injected" if self.fail_next else ""
        self.fail_next = False
        if failure:
            counts[:] = 0
        self.results.append(StepResult(plan_id=plan.plan_id, tokens=tokens, counts=counts, failure=failure))

    def _drafts(self, state: dict, count: int) -> list[int]:
        """Guesses, some of them right, so that acceptance varies."""
        out = []
        prefix = digest(state["prefix"][state["computed"] - 1] if state["computed"] else b"", state["last"][-1])
        for _ in range(count):
            right = draw(prefix, state["start"].sample_index)
            out.append(right if self.random.random() < 0.6 else int(self.random.integers(VOCABULARY)))
            prefix = digest(prefix, out[-1])
        return out

    def _keep(self, prefill: bool, ids: list[int], prefixes: list[bytes], state: dict) -> list[int]:
        sample = state["start"].sample_index
        if prefill:
            return [draw(prefixes[-1], sample)]
        kept = []
        for j in range(len(ids)):
            token = draw(prefixes[j], sample)
            kept.append(token)
            if j + 1 < len(ids) and ids[j + 1] != token:
                break
        return kept

    def _token(self, row: int, position: int, token: int, state: dict) -> bytes:
        """Write one token's slot in every paged group, then read all that its query may see."""
        prefix = b""
        for number, group in enumerate(self.groups):
            if group.kind == "recurrent":
                continue
            size = group.block_tokens
            first = 0 if group.window is None else max(0, position - group.window + 1)
            for p in range(first, position):
                block = self.tables[number].get((row, p // size), 0)
                assert block, f"group {number}: position {p} of row {row} has no block at {position}"
                found = self.slots[number].get((block, p % size))
                want = state["prefix"].get(p)
                assert found is not None and (want is None or found == want), f"group {number}: slot of {p} is foreign"
                state["prefix"][p] = found
            parent = state["prefix"].get(position - 1, b"") if position else b""
            prefix = digest(parent, token)
            block = self.tables[number].get((row, position // size), 0)
            assert block, f"group {number}: no block to write position {position}"
            self.slots[number][block, position % size] = prefix
        state["prefix"][position] = prefix
        return prefix

    def _states(self, plan: StepPlan, index: int, row: int, begin: int, ids: list[int]) -> None:
        for number, group in enumerate(self.groups):
            if group.kind != "recurrent":
                continue
            block = self.tables[number][row, 0]
            state = self.states[number][block]
            for j, token in enumerate(ids, 1):
                state = digest(state, token)
                for export in plan.exports:
                    if export.group == number and export.index == index and export.offset == j:
                        self.states[number][export.block] = state
            self.states[number][block] = state
            assert state == self.rows[row]["prefix"][begin + len(ids) - 1], "the recurrent state is not the prefix's"

    def sample(self, plan_id: int, late: LateInput | None) -> None:
        if late is None:
            return
        result = next(r for r in self.results if r.plan_id == plan_id)
        for i, mask in zip(late.indices.tolist(), late.mask, strict=True):
            prefix, state = self.late[i]
            token = draw(prefix, state["start"].sample_index, mask)
            result.tokens[i, 0], result.counts[i] = token, 1
            state["last"] = [token]

    def poll(self, wait: bool) -> StepResult | None:
        return self.results.popleft() if self.results else None

    def close(self) -> None:
        self.results.clear()


FULL = {"kind": "full", "layer_bytes": 1024, "num_layers": 1, "block_tokens": 4}
WINDOW = {"kind": "window", "layer_bytes": 1024, "num_layers": 5, "block_tokens": 4, "window": 10}
STATE = {"kind": "recurrent", "layer_bytes": 3072, "num_layers": 2, "block_tokens": 4}


def make(
    groups: tuple[dict, ...] = (FULL, WINDOW),
    *,
    budget: int = 400 * 1024,
    shared: bool = True,
    unit: int = 8,
    max_tokens: int = 96,
    connector: object = None,
    policy: object = None,
    **config: object,
) -> tuple[Scheduler, CacheManager]:
    settings = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": max_tokens,
        "checkpoint_tokens": 8,
        **config,
    }
    needs = [GroupNeed(**group) for group in groups]
    plan = plan_cache(needs, budget, shared=shared, max_tokens=max_tokens, chunk=settings["max_num_batched_tokens"])
    manager = CacheManager(plan, max_rows=settings["max_num_seqs"], max_tokens=max_tokens, unit=unit)
    extra = {"policy": policy} if policy else {}
    return Scheduler(SchedulerConfig(**settings), manager, connector=connector, **extra), manager


def ask(number: int, prompt: list[int] | np.ndarray, max_tokens: int = 8, **fields: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=number,
        prompt_ids=np.array(prompt, np.int32),
        sampling=SamplingParams(**fields.pop("sampling", {})),
        max_tokens=max_tokens,
        seed=0,
        eos_ids=fields.pop("eos_ids", (END,)),
        **fields,
    )
