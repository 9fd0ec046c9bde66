"""A runner that computes nothing but remembers everything: which token's state lies in which slot of which block.

Reading a slot that was never written, or that holds another prefix's state, is an AssertionError; so sharing, eviction,
sliding and preemption can't go wrong unnoticed. The token drawn after a prefix is a function of the prefix and the
sample index alone, so outputs must not depend on batching, depth, preemption, caching or drafts.

A failed step writes POISON. Later steps may read it until the failure is committed, and what comes of it is poison too;
a poisoned token that reaches the outside is wrong, and a slot of poison that is read after the commit is an error.

Where plans announce freed blocks, what is announced loses its content, and no block gets a new writer before that.
Where groups share slabs, their blocks lie over each other, and what is written to one is lost to all that lie there.
Blocks that have gone back to the device are named by no plan and touched by none.
"""

from __future__ import annotations

import hashlib
from collections import deque

import numpy as np

from drivetrain.cache.connector import Arrival, ConnectorEvents
from drivetrain.cache.manager import CacheManager
from drivetrain.cache.sizing import GroupNeed, plan_cache
from drivetrain.params import GenerateRequest, SamplingParams
from drivetrain.sched.plan import LateInput, StepPlan, StepResult
from drivetrain.sched.scheduler import Scheduler, SchedulerConfig

VOCABULARY = 50
END = 7
POISON = b"poison"
LOADING = b"loading"
FREED = b"freed"


def digest(parent: bytes, token: int) -> bytes:
    if parent == POISON:
        return POISON
    return hashlib.blake2b(parent + int(token).to_bytes(4, "little"), digest_size=8).digest()


def prefix_of(tokens: np.ndarray) -> bytes:
    state = b""
    for token in tokens:
        state = digest(state, token)
    return state


def draw(prefix: bytes, sample: int, mask: np.ndarray | None = None) -> int:
    value = int.from_bytes(hashlib.blake2b(prefix + bytes([sample]), digest_size=4).digest(), "little")
    if mask is None:
        return value % VOCABULARY
    allowed = [t for t in range(VOCABULARY) if (int(mask[t // 32]) >> (t % 32)) & 1]
    return allowed[value % len(allowed)]


class Parity:
    """A grammar: each token's sum with the one before it must not be divisible by three."""

    def __init__(self) -> None:
        self.last = 0
        self.accepted: list[int] = []

    def accept(self, token: int) -> bool:
        ok = (token + self.last) % 3 != 0
        self.last = token
        self.accepted.append(token)
        return ok

    def mask(self) -> np.ndarray:
        words = np.zeros(2, np.uint32)
        for token in range(VOCABULARY):
            if (token + self.last) % 3:
                words[token // 32] |= np.uint32(1 << (token % 32))
        return words.view(np.int32)


def expected(
    prompt: np.ndarray,
    max_tokens: int,
    sample: int = 0,
    ends: tuple[int, ...] = (END,),
    grammar: Parity | None = None,
) -> tuple[list[int], str]:
    """What a request must produce, computed alone and without a cache."""
    state, out = prefix_of(prompt), []
    for _ in range(max_tokens):
        token = draw(state, sample, grammar.mask() if grammar else None)
        if token in ends:
            return out, "stop"
        if grammar is not None:
            grammar.accept(token)
        out.append(token)
        state = digest(state, token)
    return out, "length"


def vector_of(prefix: bytes) -> np.ndarray:
    """What a pooled prompt gives: one direction for each prefix."""
    return np.frombuffer(hashlib.blake2b(prefix, digest_size=8).digest(), np.uint8).astype(np.float32) + 1


class SimulatedRunner:
    """Executes plans when they are submitted, in order; results are handed out when polled."""

    def __init__(self, manager: CacheManager, max_rows: int, max_drafts: int = 0, seed: int = 0) -> None:
        self.groups, self.shared = manager.plan.groups, manager.plan.shared
        self.announced = manager.pool.freed is not None
        self.writers: list[dict[int, int]] = [{} for _ in self.groups]  # block -> the epoch that wrote to it
        self.slots: list[dict[tuple[int, int], bytes]] = [{} for _ in self.groups]
        self.states: list[dict[int, bytes]] = [{} for _ in self.groups]
        self.tables = [dict[tuple[int, int], int]() for _ in self.groups]
        self.rows: dict[int, dict] = {}
        self.results: deque[StepResult] = deque()
        self.late: dict[int, dict[int, tuple[bytes, dict]]] = {}
        self.max_drafts = max_drafts
        self.random = np.random.default_rng(seed)
        self.fail_next = self.failing = False
        self.tainted: set[int] = set()  # requests whose state came of a failed step
        self.plans: list[StepPlan] = []
        self.limits = [group.num_blocks for group in self.groups]  # from there on blocks are the device's again

    def forward(self, plan: StepPlan) -> None:
        assert len(set(plan.rows.tolist())) == plan.num_rows, "a row twice in one plan"
        assert plan.num_new.min(initial=1) > 0, "a row without query tokens"
        self.plans.append(plan)
        self._freed(plan)
        for row in plan.ends:
            del self.rows[row]
        for start in plan.starts:
            assert start.row not in self.rows, "a row started twice"
            for table in self.tables:
                for key in [key for key in table if key[0] == start.row]:
                    del table[key]
            last = [start.last_token]
            self.rows[start.row] = {"start": start, "computed": start.computed, "last": last, "prefix": {}}
        changed = plan.blocks[:, :3].tolist()
        assert len(set(map(tuple, changed))) == len(changed), "one table entry changed twice in one plan"
        for row, group, index, block in plan.blocks.tolist():
            assert row in self.rows, "blocks for a row that no request has"
            self.there(group, block)
            self.tables[group][row, index] = block
        self._check_freed(plan)
        for group, block in plan.zeroed:
            self._claim(group, block, -1)
            self.states[group][block] = b""
        for copy in plan.copies:
            self.there(copy.group, copy.source)
            assert self.states[copy.group][copy.source] != FREED, "a checkpoint is copied after it was freed"
            self._claim(copy.group, copy.target, -1)
            self.states[copy.group][copy.target] = self.states[copy.group][copy.source]
        self._run(plan)

    def _freed(self, plan: StepPlan) -> None:
        """What is announced loses its content before anything else happens, whoever's content lies there."""
        assert self.announced or not plan.freed, "nobody asked for freed blocks"
        for group, blocks in plan.freed:
            assert blocks.dtype == np.int32 and len(blocks) and blocks.min() > 0, "the null block is never announced"
            assert len(set(blocks.tolist())) == len(blocks), "a block is announced once a plan"
            for block in blocks.tolist():
                self.there(group, block)
                self.writers[group].pop(block, None)
                for number, other in self.lies_at(group, block):
                    for offset in range(self.groups[number].block_tokens):
                        if (other, offset) in self.slots[number]:
                            self.slots[number][other, offset] = FREED
                    if other in self.states[number]:
                        self.states[number][other] = FREED

    def _check_freed(self, plan: StepPlan) -> None:
        """Rows hold of what was announced only what they got by this plan."""
        given = {(group, block) for _, group, _, block in plan.blocks.tolist()}
        for group, blocks in plan.freed:
            held = {block for (row, _), block in self.tables[group].items() if row in self.rows}
            stray = [b for b in blocks.tolist() if b in held and (group, b) not in given]
            assert not stray, f"group {group}: blocks {stray} are announced, and held by rows"

    def there(self, group: int, block: int) -> None:
        assert block < self.limits[group], f"group {group} block {block}: its memory was given back"

    def lies_at(self, group: int, block: int) -> list[tuple[int, int]]:
        """All groups' blocks that have bytes in common with this one, and itself."""
        if not self.shared:
            return [(group, block)]
        first, end = block * self.groups[group].stride, (block + 1) * self.groups[group].stride
        spans = ((number, range(first // g.stride, -(-end // g.stride))) for number, g in enumerate(self.groups))
        return [(number, other) for number, span in spans for other in span]

    def _claim(self, group: int, block: int, epoch: int) -> None:
        """Before a write: the block is this writer's already (-1: it never is), or all that lay there was announced."""
        self.there(group, block)
        if not self.announced or self.writers[group].get(block) == epoch != -1:
            return
        for number, other in self.lies_at(group, block):
            stale = other in self.writers[number]
            assert not stale, f"group {group} block {block}: reused before group {number} block {other} was announced"
            self.forget(number, other)
        self.writers[group][block] = epoch

    def forget(self, group: int, block: int) -> None:
        """A block's content is overwritten."""
        self.writers[group].pop(block, None)
        self.states[group].pop(block, None)
        for offset in range(self.groups[group].block_tokens):
            self.slots[group].pop((block, offset), None)

    def _run(self, plan: StepPlan) -> None:
        width = self.max_drafts + 1
        tokens, counts = np.zeros((plan.num_rows, width), np.int32), np.zeros(plan.num_rows, np.int32)
        pooled: list[tuple[int, np.ndarray]] = []
        late = self.late[plan.plan_id] = {}
        failing = self.failing = self.fail_next
        self.fail_next = False
        at = 0
        for i, row in enumerate(plan.rows.tolist()):
            state, num, prefill = self.rows[row], int(plan.num_new[i]), plan.start[i] >= 0
            assert state["start"].epoch == plan.epochs[i], "a plan for another occupant of the row"
            assert prefill == (i >= plan.num_decode + plan.num_verify), "batch order: decode, verify, prefill"
            if prefill:
                ids, begin = plan.prompt_ids[at : at + num].tolist(), int(plan.start[i])
                at += num
            else:
                ids, begin = [state["last"][-1], *self._drafts(state, num - 1)], state["computed"]
            assert plan.bounds[i] >= begin + num, "the host's bound is too low"
            prefixes = [self._token(row, begin + j, token, state, failing) for j, token in enumerate(ids)]
            self._states(plan, i, row, begin, ids, failing)
            if prefixes[-1] == POISON:
                self.tainted.add(state["start"].request_id)
            state["computed"] = begin + num
            if not plan.sample[i]:
                continue
            if state["start"].pooling is not None:
                pooled.append((i, vector_of(prefixes[-1])))
            elif i in plan.late_rows:
                late[i] = (prefixes[-1], state)
            else:
                kept = self._keep(prefill, ids, prefixes, state)
                tokens[i, : len(kept)], counts[i] = kept, len(kept)
                state["last"] = kept
                state["computed"] = begin + (num if prefill else len(kept))
        self.results.append(
            StepResult(
                plan_id=plan.plan_id,
                tokens=tokens,
                counts=np.zeros_like(counts) if failing else counts,
                pooled=() if failing else tuple(pooled),
                failure="injected" if failing else "",
            )
        )

    def _drafts(self, state: dict, count: int) -> list[int]:
        """Guesses, some of them right, so that acceptance varies."""
        if not count:  # a row may begin with a decode step, before this runner has seen what lies before it
            return []
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

    def _token(self, row: int, position: int, token: int, state: dict, failing: bool) -> bytes:
        """Write one token's slot in every paged group, then read all that its query may see."""
        prefix, poisoned = b"", failing
        for number, group in enumerate(self.groups):
            if group.kind == "recurrent":
                continue
            size = group.block_tokens
            first = 0 if group.window is None else max(0, position - group.window + 1)
            where = f"group {number}, row {row}, token {position}"
            for p in range(first, position):
                poisoned |= self._read(number, row, p, state, f"{where} reads {p}") == POISON
            parent = state["prefix"].get(position - 1, b"") if position else b""
            assert parent or not position, f"row {row}: token {position} has nothing before it"
            prefix = POISON if poisoned else digest(parent, token)
            block = self.tables[number].get((row, position // size), 0)
            assert block, f"group {number}: no block to write position {position}"
            self._claim(number, block, state["start"].epoch)
            self.slots[number][block, position % size] = prefix
        state["prefix"][position] = prefix
        return prefix

    def _read(self, number: int, row: int, p: int, state: dict, where: str) -> bytes:
        size = self.groups[number].block_tokens
        block = self.tables[number].get((row, p // size), 0)
        assert block, f"{where}: no block"
        self.there(number, block)
        found, want = self.slots[number].get((block, p % size)), state["prefix"].get(p)
        assert found is not None and found != LOADING, f"{where}: never written"
        assert found != FREED, f"{where}: freed"
        if found == POISON:
            recent = self.failing or any(result.failure for result in self.results)
            assert recent, f"{where}: written by a step that failed long ago"
        assert want is None or found == want or POISON in (found, want), f"{where}: another prefix"
        state["prefix"][p] = POISON if POISON in (found, want) else found
        return state["prefix"][p]

    def _states(self, plan: StepPlan, index: int, row: int, begin: int, ids: list[int], failing: bool) -> None:
        for number, group in enumerate(self.groups):
            if group.kind != "recurrent":
                continue
            block = self.tables[number][row, 0]
            state = POISON if failing else self.states[number][block]
            assert state != FREED, f"group {number}, row {row}: its state was freed"
            for j, token in enumerate(ids, 1):
                state = digest(state, token)
                for export in plan.exports:
                    if export.group == number and export.index == index and export.offset == j:
                        assert j % group.checkpoint_alignment == 0, "an export between what the layer can export"
                        self._claim(number, export.block, -1)
                        self.states[number][export.block] = state
            self.states[number][block] = state
            want = self.rows[row]["prefix"][begin + len(ids) - 1]
            assert state == want or POISON in (state, want), "the recurrent state is not the prefix's"
            if POISON in (state, want):
                self.rows[row]["prefix"][begin + len(ids) - 1] = POISON
                self.tainted.add(self.rows[row]["start"].request_id)

    def sample(self, plan_id: int, late: LateInput | None) -> None:
        if late is None:
            return
        result = next(r for r in self.results if r.plan_id == plan_id)
        assert set(late.indices.tolist()) <= set(self.late[plan_id]), "late input for rows that are not late"
        for i, mask in zip(late.indices.tolist(), late.mask, strict=True):
            prefix, state = self.late[plan_id][i]
            token = draw(prefix, state["start"].sample_index, mask)
            result.tokens[i, 0], result.counts[i] = token, 0 if result.failure else 1
            state["last"] = [token]

    def later(self) -> bool:
        return False

    def poll(self, wait: bool) -> StepResult | None:
        if not self.results:
            return None
        result = self.results.popleft()
        del self.late[result.plan_id]
        return result

    def close(self) -> None:
        self.results.clear()


class SlowConnector:
    """Brings blocks some polls after it was asked, sometimes fewer than promised; reads ended requests' blocks for a
    while. Checks that nobody else touches a block meanwhile."""

    def __init__(self, seed: int = 0, *, polls: int = 3, brings: float = 0.5, keeps: float = 0.5) -> None:
        self.random = np.random.default_rng(seed)
        self.polls, self.brings, self.keeps = polls, brings, keeps
        self.runner: SimulatedRunner | None = None
        self.prompts: dict[int, np.ndarray] = {}
        self.loads: dict[int, dict] = {}
        self.reads: dict[int, dict] = {}

    def match(self, request_id: int, digests: list[bytes], num_cached: int) -> int:
        if request_id % 10 >= 10 * self.brings or request_id not in self.prompts:
            return 0
        return len(self.prompts[request_id])

    def load(self, request_id: int, num_tokens: int, blocks: list[tuple[int, int, int]]) -> None:
        assert self.runner is not None
        assert request_id not in self.loads and blocks, "loaded twice, or nothing to fill"
        for group, _, block in blocks:
            for number, other in self.runner.lies_at(group, block):
                self.runner.forget(number, other)
            for offset in range(self.runner.groups[group].block_tokens):
                self.runner.slots[group][block, offset] = LOADING
        left = int(self.random.integers(self.polls + 1))
        self.loads[request_id] = {"left": left, "num": num_tokens, "blocks": list(blocks)}

    def finished(self, request_id: int, num_tokens: int, blocks: list[tuple[int, int, int]]) -> bool:
        assert self.runner is not None
        self.prompts.pop(request_id, None)
        if self.random.random() >= self.keeps:
            return False
        slots = self.runner.slots
        seen = {(g, b): {k: v for k, v in slots[g].items() if k[0] == b} for g, _, b in blocks}
        self.reads[request_id] = {"left": int(self.random.integers(self.polls + 1)), "seen": seen}
        return True

    def poll(self) -> ConnectorEvents:
        arrivals = [self._arrive(number) for number in self._due(self.loads)]
        released = self._due(self.reads)
        for number in released:
            for (group, block), seen in self.reads.pop(number)["seen"].items():
                now = {k: v for k, v in self.runner.slots[group].items() if k[0] == block}
                assert seen == now, "changed while it was read"
        return ConnectorEvents(arrivals=tuple(arrivals), released=tuple(released))

    def _due(self, table: dict[int, dict]) -> list[int]:
        due = [number for number, entry in table.items() if entry["left"] <= 0]
        for entry in table.values():
            entry["left"] -= 1
        return due

    def _arrive(self, number: int) -> Arrival:
        assert self.runner is not None
        entry = self.loads.pop(number)
        num = entry["num"] if self.random.random() < 0.7 else int(self.random.integers(entry["num"] + 1))
        prefixes, state = [], b""
        for token in self.prompts[number][:num]:
            state = digest(state, token)
            prefixes.append(state)
        for group, index, block in entry["blocks"]:
            size = self.runner.groups[group].block_tokens
            for offset in range(size):
                assert self.runner.slots[group][block, offset] == LOADING, "written while it was loading"
                position = index * size + offset
                if position < num:
                    self.runner.slots[group][block, offset] = prefixes[position]
        return Arrival(request_id=number, num_tokens=num)


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
    announce_freed: bool = True,
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
    sizes = {"max_rows": settings["max_num_seqs"], "max_tokens": max_tokens, "unit": unit}
    manager = CacheManager(plan, **sizes, announce_freed=announce_freed)
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
