"""Seam probes: what the core must carry without being changed for it, on two very different devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from drivetrain.cache.connector import Arrival, ConnectorEvents
from drivetrain.cache.manager import CacheManager
from drivetrain.cache.sizing import GroupNeed, plan_cache
from drivetrain.config import EngineConfig
from drivetrain.dist.executors import InlineExecutor, StagedExecutor
from drivetrain.launch import Parts, describe, make_loop
from drivetrain.loop import Loop
from drivetrain.models import families
from drivetrain.models.build import build, load
from drivetrain.models.families import read_spec
from drivetrain.ops import Ops
from drivetrain.params import GenerateRequest, SamplingParams
from drivetrain.runner.caches import allocate_caches
from drivetrain.runner.drafter import RandomDrafter
from drivetrain.runner.runner import Runner
from drivetrain.runner.sizes import RunnerConfig
from drivetrain.sched.scheduler import Scheduler, SchedulerConfig
from drivetrain.starting import memory_of
from tests.checkpoints import VOCABULARY, hf_greedy, random_ids, tiny_checkpoint
from tests.e2e.harness import GREEDY, Served, choice_of
from tests.unit.runner.devices import device as bare_device
from tests.unit.runner.fakes import runner_config
from tests.unit.runner.test_states import StateDecoder, expected

PROMPTS = [random_ids(40, 1), random_ids(5, 2), random_ids(71, 3), random_ids(33, 4), random_ids(150, 5)]
DRAWN = SamplingParams(temperature=0.8, top_p=0.95)


@pytest.fixture(params=["cpu", "mirage"])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("gemma3_text", tmp_path_factory.mktemp("probe") / "gemma")


def outputs(
    served: Served, sampling: SamplingParams = GREEDY, count: int = 24, disturb: bool = False
) -> list[list[int]]:
    """Tokens of all prompts, twice over; ``disturb`` preempts a running row every few steps."""

    def between(step: int) -> None:
        state = served.loop.scheduler._state
        if disturb and step % 5 == 3 and state.decoding:
            state.preempt(next(iter(state.decoding)))

    tokens = []
    for _ in range(2):
        numbers = [served.submit(p, count, sampling, seed=9 + i) for i, p in enumerate(PROMPTS)]
        served.run(between)
        tokens += [served.open[n].tokens for n in numbers]
    return tokens


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_random_drafts_change_no_token(checkpoint: Path, device: str, sampling: SamplingParams) -> None:
    plain = Served(checkpoint, device)
    want = outputs(plain, sampling)
    plain.close()
    drafting = Parts(drafter=RandomDrafter(VOCABULARY, 3), max_drafts=3)
    drafted = Served(checkpoint, device, drafting, depth=2)
    assert outputs(drafted, sampling) == want
    assert outputs(drafted, sampling, disturb=True) == want
    stats = drafted.loop.stats()
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    drafted.close()


class OddThenEven:
    """Allows odd token ids after an even one and the other way round, and says which token it saw last."""

    def __init__(self) -> None:
        self.last = 0
        self.seen: list[int] = []

    def accept(self, token: int) -> bool:
        allowed = token % 2 != self.last % 2
        self.last = token
        self.seen.append(token)
        return allowed

    def mask(self) -> np.ndarray:
        words = np.zeros(-(-VOCABULARY // 32), np.uint32)
        for token in range(1 - self.last % 2, VOCABULARY, 2):
            words[token // 32] |= np.uint32(1 << (token % 32))
        return words.view(np.int32)


def test_b_masks_that_arrive_late_give_what_depth_1_gives(checkpoint: Path, device: str) -> None:
    found = []
    for depth in (1, 2, 3):
        served = Served(checkpoint, device, depth=depth)
        sessions = [OddThenEven() if i % 2 else None for i in range(len(PROMPTS))]
        numbers = [served.submit(p, 20, grammar=s) for p, s in zip(PROMPTS, sessions, strict=True)]
        served.run()
        found.append([served.open[n].tokens for n in numbers])
        for number, session in zip(numbers, sessions, strict=True):
            if session is not None:
                tokens = served.open[number].tokens
                assert session.seen == tokens
                assert all(a % 2 != b % 2 for a, b in zip([0, *tokens], tokens, strict=False))
        served.close()
    assert found[0] == found[1] == found[2]
    free = hf_greedy(checkpoint, PROMPTS[::2], 20)
    assert found[0][::2] == free  # rows without a grammar are not touched by it


class SlowConnector:
    """Brings blocks from requests that ended, some polls late, and lets go of those later still."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[list[bytes], int, list[tuple[int, int, int]]]] = {}
        self.digests: dict[int, list[bytes]] = {}
        self.loads: list[list] = []
        self.releases: list[list[int]] = []
        self.num_loaded = 0
        self.served: Served | None = None

    def match(self, request_id: int, digests: list[bytes], num_cached: int) -> int:
        self.digests[request_id] = list(digests)
        best = 0
        for known, tokens, _ in self.kept.values():
            pairs = enumerate(zip(known, digests, strict=False))
            same = next((i for i, (a, b) in pairs if a != b), min(len(known), len(digests)))
            best = max(best, min(same * 32, tokens))
        return best if best > num_cached else 0

    def load(self, request_id: int, num_tokens: int, blocks: list[tuple[int, int, int]]) -> None:
        self.loads.append([3, request_id, num_tokens, list(blocks)])

    def finished(self, request_id: int, num_tokens: int, blocks: list[tuple[int, int, int]]) -> bool:
        self.kept[request_id] = (self.digests.get(request_id, []), num_tokens, list(blocks))
        return True

    def poll(self) -> ConnectorEvents:
        arrivals = []
        for under_way in list(self.loads):
            under_way[0] -= 1
            if under_way[0] <= 0:
                self.loads.remove(under_way)
                arrivals.append(self._arrive(*under_way[1:]))
        for release in self.releases:
            release[0] -= 1
        released = [request_id for left, request_id in self.releases if left <= 0]
        self.releases = [r for r in self.releases if r[0] > 0]
        for request_id in released:
            self.kept.pop(request_id)
        return ConnectorEvents(arrivals=tuple(arrivals), released=tuple(released))

    def let_go(self) -> None:
        self.releases = [[4, request_id] for request_id in self.kept]

    def _arrive(self, request_id: int, num_tokens: int, blocks: list[tuple[int, int, int]]) -> Arrival:
        """Copy the blocks of the kept request with the same tokens, layer by layer, as bytes."""
        runner = self.served.opened.runner
        _, _, source = max(self.kept.values(), key=lambda kept: kept[1])
        for number, group in enumerate(runner.decoder.groups):
            here = [b for g, _, b in blocks if g == number]
            there = [b for g, _, b in source if g == number][: len(here)]
            dtype = group.layout.slot_dtype
            for layer in group.layers:
                handle = runner.caches[layer]
                moved = handle.export_blocks(runner.runtime.from_host(np.array(there, dtype)))
                handle.import_blocks(runner.runtime.from_host(np.array(here, dtype)), moved)
        self.num_loaded += num_tokens
        return Arrival(request_id=request_id, num_tokens=num_tokens)


def test_c_blocks_that_arrive_and_leave_late(tmp_path: Path, device: str) -> None:
    llama = tiny_checkpoint("llama", tmp_path / "llama")
    connector = SlowConnector()
    served = Served(llama, device, Parts(connector=connector), max_model_len=512, cache_bytes=8 << 20)
    connector.served = served
    prompt = random_ids(300, 7)
    (want,) = hf_greedy(llama, [prompt], 12)
    first = served.submit(prompt, 12)
    while served.open[first].end is None:
        served.step()
    assert served.loop.stats().pinned == 1 and served.loop.stats().cache_used > 0
    served.loop.scheduler.reset_prefix_cache()
    second, other = served.submit(prompt, 12), served.submit(PROMPTS[0], 12)
    served.step()
    assert served.loop.stats().waiting_remote == 1
    while served.open[second].end is None or served.open[other].end is None:
        served.step()
    connector.let_go()
    served.run()
    assert connector.num_loaded >= 256 and served.open[second].num_cached == connector.num_loaded
    assert served.open[first].tokens == served.open[second].tokens == want
    served.close()


def test_d_recurrent_state_beside_kv_in_one_pool(device: str) -> None:
    backend = bare_device(device)
    decoder = StateDecoder(backend)
    size = backend.storage.block_tokens[0]
    needs = [
        GroupNeed(
            kind=group.spec.kind,
            layer_bytes=group.layout.bytes_per_block,
            num_layers=1,
            block_tokens=size,
            alignment=group.layout.alignment,
        )
        for group in decoder.groups
    ]
    shared = all(group.layout.strided for group in decoder.groups)
    plan = plan_cache(needs, 96 << 10 if shared else 512 << 10, shared=shared, max_tokens=200, chunk=48)
    assert plan.shared == (device == "cpu")
    runner = Runner(
        backend, decoder, allocate_caches(backend, decoder, plan), runner_config(), Ops(backend, block_tokens=size)
    )
    manager = CacheManager(plan, max_rows=6, max_tokens=200, unit=16)
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, max_model_len=200, checkpoint_tokens=16)
    loop = Loop(Scheduler(config, manager), InlineExecutor(runner), depth=2)
    prompt = [int(t) for t in np.random.default_rng(5).integers(0, 97, 140)]
    got: dict[int, list[int]] = {}
    cached: dict[int, int] = {}

    def drive(number: int, ids: list[int]) -> list[int]:
        request = GenerateRequest(
            request_id=number, prompt_ids=np.array(ids, np.int32), sampling=GREEDY, max_tokens=8, seed=0
        )
        loop.submit(request)
        while loop.has_work():
            for out in loop.step():
                got.setdefault(number, []).extend(out.tokens.tolist())
                cached.update({start.request_id: start.num_cached for start in out.started})
                assert all(end.reason == "length" for end in out.finished), out.finished
        loop.check_integrity()
        return got[number]

    assert drive(1, prompt) == expected(prompt, 8)
    assert drive(2, prompt) == expected(prompt, 8)
    branch = [*prompt[:70], *prompt[:30]]
    assert drive(3, branch) == expected(branch, 8)
    unit = max(16, size)
    assert cached == {1: 0, 2: 139 // unit * unit, 3: 70 // unit * unit}
    assert any(export.offset % 48 for export in _exports(loop)), "no checkpoint inside a chunk"


def _exports(loop: Loop) -> list:
    """Nothing keeps old plans: a fresh prompt is planned, chunk by chunk, to look at its checkpoints."""
    ids = np.random.default_rng(6).integers(0, 97, 190).astype(np.int32)
    loop.submit(GenerateRequest(request_id=9, prompt_ids=ids, sampling=GREEDY, max_tokens=1, seed=0))
    plans = iter(loop.scheduler.schedule, None)
    return [export for plan in plans for export in plan.exports]


def test_e_a_request_that_returns_a_pooled_vector(checkpoint: Path, device: str) -> None:
    from transformers import AutoModelForCausalLM

    served = Served(checkpoint, device, max_num_batched_tokens=19)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        hidden = model.model(torch.tensor([PROMPTS[0]])).last_hidden_state[0].numpy()
    for kind, want in (("last", hidden[-1]), ("mean", hidden.mean(0)), ("cls", hidden[0])):
        beside = served.submit(PROMPTS[1], 8)
        assert np.abs(served.pooled(PROMPTS[0], kind) - want).max() < 1e-4
        assert served.open[beside].tokens == hf_greedy(checkpoint, [PROMPTS[1]], 8)[0]
    served.close()


def test_f_two_stages_at_depth_3(checkpoint: Path, device: str) -> None:
    config = EngineConfig(
        model=str(checkpoint),
        device=device,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        cache_bytes=4 << 20,
    )
    described = describe(config, choice_of(device))
    memory = memory_of(config, described)
    split = len(described.spec.layers) // 2
    whole = [(group.spec, group.layers) for group in described.decoder.groups]
    stages = []
    for layers in (range(split), range(split, len(described.spec.layers))):
        decoder = build(described.spec, described.ops, layers=layers)
        source = described.source.open_checkpoint()
        load(decoder, source, described.backend.device)
        ids = tuple(next(i for i, (spec, _) in enumerate(whole) if spec == group.spec) for group in decoder.groups)
        caches = allocate_caches(described.backend, decoder, memory.cache, ids)
        sizes = RunnerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=256,
            depth=3,
            group_ids=ids,
            first=layers.start == 0,
            last=layers.stop == len(described.spec.layers),
        )
        stages.append(Runner(described.backend, decoder, caches, sizes, described.ops))
    loop = make_loop(config, described, StagedExecutor(stages, 3), memory, Parts())
    served = Served.__new__(Served)
    served.loop, served.next, served.open = loop, 0, {}
    assert loop.depth == 3
    assert served.greedy(PROMPTS, 24) == hf_greedy(checkpoint, PROMPTS, 24)
    served.close()


def test_g_positions_of_three_rows_and_embeddings_in_place_of_ids(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = tiny_checkpoint("llama", tmp_path / "llama")

    def sectioned(config: dict, dtype: str):
        """The same model with frequencies driven by three rows of positions, as models of images have them."""
        spec = read_spec(config, dtype)
        half = spec.ropes[0].rotary_dim // 2
        sections = (half // 2, half // 4, half - half // 2 - half // 4)
        return replace(spec, ropes=tuple(replace(rope, sections=sections) for rope in spec.ropes))

    monkeypatch.setattr(families, "read_spec", sectioned)
    served = Served(llama, device, max_num_batched_tokens=19)
    prompt = PROMPTS[0]
    (want,) = hf_greedy(llama, [prompt], 16)
    table = torch.cat([w for name, w in _tensors(llama) if name == "model.embed_tokens.weight"])
    vectors = table[prompt].numpy().astype(np.float32)
    steps = np.arange(len(prompt), dtype=np.int32)
    rows = np.broadcast_to(steps, (3, len(prompt))).copy()
    blank = [0] * len(prompt)
    by_vectors = served.submit(blank, 16, embeds=vectors)
    by_rows = served.submit(prompt, 16, positions=rows)
    beside = served.submit(prompt, 16)
    served.run()
    assert [served.open[n].tokens for n in (by_vectors, by_rows, beside)] == [want] * 3
    spread = served.submit(prompt, 16, positions=rows * 3)
    served.run()
    assert served.open[spread].tokens != want, "positions must matter"
    served.close()


def _tensors(directory: Path):
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())
