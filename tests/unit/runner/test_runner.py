"""The runner against a model whose tokens depend on every slot, length and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drivetrain.dist.executors import InlineExecutor
from drivetrain.ops import Ops
from drivetrain.ops.reference import REFERENCE
from drivetrain.runner.drafter import RandomDrafter
from drivetrain.runner.runner import Runner
from drivetrain.sched.plan import EmbedRun, LateInput, PositionRun, RowStart, StepPlan
from drivetrain_api.v1 import DrawSpec, SamplingInputs
from tests.unit.runner.devices import device, host
from tests.unit.runner.fakes import (
    FakeDecoder,
    Job,
    MiniScheduler,
    drive,
    expected_greedy,
    expected_hidden,
    expected_logits,
    runner_config,
)

VOCABULARY, WINDOW, BLOCKS = 97, 20, 120
MATRIX = [("cpu", 1), ("cpu", 2), ("cpu", 3), ("cpu-static", 2), ("mirage", 1), ("mirage", 3), ("mirage-static", 2)]
each_device_and_depth = pytest.mark.parametrize(("kind", "depth"), MATRIX)


def make(backend=None, *, drafter=None, vocabulary=VOCABULARY, **config):
    backend = backend or host()
    size = backend.storage.block_tokens[0]
    decoder = FakeDecoder(backend, vocabulary=vocabulary, window=WINDOW, block_tokens=size)
    caches = tuple(backend.storage.allocate(g.layout, BLOCKS) for g in decoder.groups)
    runner = Runner(backend, decoder, caches, runner_config(**config), Ops(backend, block_tokens=size), drafter)
    return runner, decoder


def jobs(count: int = 9, seed: int = 3, vocabulary: int = VOCABULARY, **start) -> list[Job]:
    rng = np.random.default_rng(seed)
    return [
        Job(
            prompt=rng.integers(0, vocabulary, int(rng.integers(1, 160))).tolist(),
            max_new=int(rng.integers(1, 30)),
            arrive=int(rng.integers(0, 12)),
            start=dict(start),
        )
        for _ in range(count)
    ]


def block_size(executor: InlineExecutor) -> int:
    return executor.runner.backend.storage.block_tokens[0]


def run(executor, todo: list[Job], *, depth=1, budget=48, rows=6, **more) -> int:
    sched_keys = {k: more.pop(k) for k in ("max_drafts", "seed") if k in more}
    sched = MiniScheduler(rows=rows, budget=budget, block_tokens=block_size(executor), num_blocks=BLOCKS, **sched_keys)
    for job in todo:
        sched.add(job)
    return drive(executor, sched, depth=depth, **more)


@each_device_and_depth
def test_mixed_batches_give_the_models_own_tokens(depth: int, kind: str) -> None:
    runner, _ = make(device(kind), depth=depth)
    todo = jobs()
    run(InlineExecutor(runner), todo, depth=depth)
    for job in todo:
        assert job.out == expected_greedy(job.prompt, job.max_new, VOCABULARY, WINDOW)


def sampling(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return dict(
        temperature=float(rng.uniform(20, 90)),
        top_k=int(rng.choice([0, 5, 40])),
        top_p=float(rng.choice([1.0, 0.8])),
        min_p=float(rng.choice([0.0, 0.01])),
        seed=int(rng.integers(-(2**62), 2**62)),
        sample_index=int(rng.integers(0, 4)),
    )


def expected_draws(job: Job, vocabulary: int = VOCABULARY) -> list[int]:
    """Draw token by token with the reference, from the host's own logits."""
    spec = DrawSpec(dtype="float32", vocabulary=vocabulary)
    draw = REFERENCE[DrawSpec.op].make(spec)
    tokens, p = list(job.prompt), job.start
    for _ in range(job.max_new):
        logits = torch.from_numpy(expected_logits(tokens, vocabulary, WINDOW))[None]
        inputs = SamplingInputs(
            temperature=torch.tensor([p["temperature"]], dtype=torch.float32),
            top_k=torch.tensor([p["top_k"]], dtype=torch.int32),
            top_p=torch.tensor([p["top_p"]], dtype=torch.float32),
            min_p=torch.tensor([p["min_p"]], dtype=torch.float32),
            seed=torch.tensor([p["seed"]]),
            position=torch.tensor([len(tokens)], dtype=torch.int32),
            sample=torch.tensor([p["sample_index"]], dtype=torch.int32),
            mask=None,
            all_greedy=False,
            any_top_k=True,
            any_top_p=True,
            any_min_p=True,
        )
        tokens.append(int(draw(logits, inputs, 0)[0]))
    return tokens[len(job.prompt) :]


@each_device_and_depth
def test_a_seeded_request_draws_what_it_draws_alone(depth: int, kind: str) -> None:
    runner, _ = make(device(kind), depth=depth)
    todo = jobs(8)
    for i, job in enumerate(todo[:6]):
        job.start = sampling(i)
    run(InlineExecutor(runner), todo, depth=depth)
    for job in todo[:6]:
        assert job.out == expected_draws(job)
    for job in todo[6:]:
        assert job.out == expected_greedy(job.prompt, job.max_new, VOCABULARY, WINDOW)
    assert any(job.out != expected_greedy(job.prompt, job.max_new, VOCABULARY, WINDOW) for job in todo[:6])


@each_device_and_depth
def test_random_drafts_change_no_token(depth: int, kind: str) -> None:
    vocabulary, k = 3, 3
    runner, _ = make(
        device(kind), depth=depth, vocabulary=vocabulary, max_drafts=k, drafter=RandomDrafter(vocabulary, k)
    )
    todo = jobs(10, vocabulary=vocabulary)
    for i, job in enumerate(todo):
        job.start = {**(sampling(i) if i % 2 else {}), "max_drafts": k if i % 3 else 0}
    steps = run(InlineExecutor(runner), todo, depth=depth, max_drafts=k)
    for job in todo:
        alone = expected_draws(job, vocabulary) if "seed" in job.start else None
        assert job.out == (alone or expected_greedy(job.prompt, job.max_new, vocabulary, WINDOW))
    if depth == 1:
        plain = [Job(prompt=j.prompt, max_new=j.max_new, arrive=j.arrive) for j in todo]
        other, _ = make(vocabulary=vocabulary)
        assert steps < run(InlineExecutor(other), plain), "some drafts must have been accepted"


def mask_rows(allowed: list[int], vocabulary: int = VOCABULARY) -> np.ndarray:
    bits = np.zeros(-(-vocabulary // 32) * 32, bool)
    bits[allowed] = True
    return np.packbits(bits.reshape(-1, 8), axis=1, bitorder="little").reshape(-1).view(np.int32).copy()


def allowed_after(job: Job) -> list[int]:
    """An automaton: the next token must equal the last one plus 1 or 2, modulo 7, modulo the vocabulary's end."""
    last = job.out[-1] if job.out else 0
    return [t for t in range(VOCABULARY) if t % 7 in ((last + 1) % 7, (last + 2) % 7)]


def expected_masked(job: Job) -> list[int]:
    shadow = Job(prompt=job.prompt, max_new=job.max_new)
    for _ in range(job.max_new):
        logits = expected_logits(job.prompt + shadow.out, VOCABULARY, WINDOW)
        allowed = np.full(VOCABULARY, -np.inf)
        allowed[allowed_after(shadow)] = 0
        shadow.out.append(int((logits + allowed).argmax()))
    return shadow.out


@each_device_and_depth
def test_masks_that_arrive_late_bind_only_their_rows(depth: int, kind: str) -> None:
    runner, _ = make(device(kind), depth=depth)
    todo = jobs(8)
    for job in todo[::2]:
        job.late = True
    run(InlineExecutor(runner), todo, depth=depth, late=lambda job: mask_rows(allowed_after(job)))
    for i, job in enumerate(todo):
        if i % 2:
            assert job.out == expected_greedy(job.prompt, job.max_new, VOCABULARY, WINDOW)
        else:
            assert job.out == expected_masked(job)


def test_late_input_for_a_reused_row_does_not_touch_its_new_request() -> None:
    runner, _ = make(depth=2)
    first = plan_of(0, prompt=[5, 6, 7], row=0, late=True)
    runner.forward(first)
    runner.sample(0, None)
    assert runner.poll(False) is None, "its late row has not been sampled"
    second = plan_of(1, prompt=[9, 1], row=0, ends=(0,))
    runner.forward(second)
    runner.sample(1, None)
    late = LateInput(indices=np.array([0], np.int32), mask=mask_rows([3])[None])
    runner.sample(0, late)
    assert runner.poll(True).counts.tolist() == [0]
    assert runner.poll(True).tokens.tolist() == [expected_greedy([9, 1], 1, VOCABULARY, WINDOW)]
    assert int(runner.tables.last_tokens[0, 0]) == expected_greedy([9, 1], 1, VOCABULARY, WINDOW)[0]


def test_a_plan_whose_late_rows_have_all_ended_completes_without_input() -> None:
    runner, _ = make(depth=2)
    runner.forward(plan_of(0, prompt=[5, 6, 7], row=0, late=True))
    runner.sample(0, None)
    runner.forward(plan_of(1, prompt=[9, 1], row=1, ends=(0,)))
    runner.sample(1, None)
    assert runner.poll(True).counts.tolist() == [0]
    assert runner.poll(True).counts.tolist() == [1]


def plan_of(plan_id: int, *, prompt: list[int], row: int, late=False, ends=(), start=None, **more) -> StepPlan:
    """One prefill row whose blocks are 2 * row + 1 and 2 * row + 2 in both groups."""
    base = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, sample_index=0)
    blocks = [(row, g, i, 2 * row + 1 + i) for g in (0, 1) for i in range(-(-len(prompt) // 16))]
    values = dict(
        plan_id=plan_id,
        rows=np.array([row], np.int32),
        epochs=np.zeros(1, np.int32),
        num_new=np.array([len(prompt)], np.int32),
        start=np.zeros(1, np.int32),
        bounds=np.array([len(prompt)], np.int32),
        sample=np.ones(1, bool),
        num_decode=0,
        prompt_ids=np.array(prompt, np.int32),
        starts=(RowStart(row=row, request_id=row, epoch=0, computed=0, late=late, **{**base, **(start or {})}),),
        ends=ends,
        blocks=np.array(blocks, np.int32),
        late_rows=(0,) if late else (),
    )
    return StepPlan(**{**values, **more})


def decode_of(plan_id: int, row: int, bound: int, **more) -> StepPlan:
    return StepPlan(
        plan_id=plan_id,
        rows=np.array([row], np.int32),
        epochs=np.zeros(1, np.int32),
        num_new=np.ones(1, np.int32),
        start=np.full(1, -1, np.int32),
        bounds=np.array([bound], np.int32),
        sample=np.ones(1, bool),
        num_decode=1,
        **more,
    )


def step(runner: Runner, plan: StepPlan):
    runner.forward(plan)
    runner.sample(plan.plan_id, None)
    return runner.poll(True)


@pytest.mark.parametrize("depth", [1, 2])
def test_log_probabilities_are_torchs_of_the_raw_logits(depth: int) -> None:
    runner, _ = make(depth=depth)
    todo = jobs(6)
    for i, job in enumerate(todo[:4]):
        job.start = {**(sampling(i) if i % 2 else {}), "logprobs": [0, 3, 5, 1][i]}
    run(InlineExecutor(runner), todo, depth=depth)
    for job in todo[:4]:
        assert len(job.logprobs) == len(job.out) == job.max_new
        for i, (place, logprob, rank, ids, values) in enumerate(job.logprobs):
            raw = expected_logits(job.prompt + job.out[:i], VOCABULARY, WINDOW)
            logs = torch.from_numpy(raw).to(torch.float32).log_softmax(0)
            assert place == 0 and abs(logprob - float(logs[job.out[i]])) < 1e-4
            order = logs.sort(descending=True, stable=True)
            assert rank == 1 + order.indices.tolist().index(job.out[i])
            asked = job.start["logprobs"]
            assert ids[:asked].tolist() == order.indices[:asked].tolist()
            assert np.allclose(values[:asked], order.values[:asked], atol=1e-4)
    assert all(not job.logprobs for job in todo[4:])


def test_log_probabilities_of_verified_tokens_keep_only_what_was_kept() -> None:
    vocabulary, k = 3, 3
    runner, _ = make(vocabulary=vocabulary, max_drafts=k, drafter=RandomDrafter(vocabulary, k))
    todo = jobs(5, vocabulary=vocabulary, logprobs=2, max_drafts=k)
    run(InlineExecutor(runner), todo, max_drafts=k)
    for job in todo:
        assert len(job.logprobs) == len(job.out)
        for i, (_, logprob, _, _, _) in enumerate(job.logprobs):
            logs = torch.from_numpy(expected_logits(job.prompt + job.out[:i], vocabulary, WINDOW))
            assert abs(logprob - float(logs.to(torch.float32).log_softmax(0)[job.out[i]])) < 1e-4


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_a_pooled_vector_covers_all_chunks_of_the_prompt(kind: str) -> None:
    runner, _ = make()
    todo = [Job(prompt=list(range(3, 73)), max_new=1, start={"pooling": kind}), *jobs(4)]
    run(InlineExecutor(runner), todo, budget=20)
    prompt = todo[0].prompt
    states = np.stack([expected_hidden(prompt[: i + 1], VOCABULARY, WINDOW) for i in range(len(prompt))])
    wanted = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[kind]
    assert todo[0].out == [] and np.allclose(todo[0].pooled, wanted, rtol=1e-5)
    for job in todo[1:]:
        assert job.out == expected_greedy(job.prompt, job.max_new, VOCABULARY, WINDOW)


def test_positions_of_three_rows_and_the_delta_of_generated_tokens() -> None:
    runner, decoder = make()
    prompt = [4, 9, 2, 8]
    grid = np.array([[0, 0, 0, 9], [0, 1, 2, 9], [5, 6, 7, 9]], np.int32)
    start = {"position_delta": 6}
    first = step(runner, plan_of(0, prompt=prompt, row=2, start=start, positions=(PositionRun(offset=0, values=grid),)))
    assert decoder.positions_seen[-1].tolist() == grid.tolist()
    drawn = [int(first.tokens[0, 0])]
    for i in range(3):
        result = step(runner, decode_of(1 + i, 2, len(prompt) + 1 + i))
        assert decoder.positions_seen[-1].tolist() == [len(prompt) + i + 6]
        wanted = expected_greedy(prompt + drawn, 1, VOCABULARY, WINDOW, shift=6)
        drawn.append(int(result.tokens[0, 0]))
        assert drawn[-1:] == wanted


def test_embeddings_in_place_of_ids() -> None:
    runner, _ = make()
    prompt = [4, 9, 2, 8, 1]
    values = np.random.default_rng(0).integers(0, 50, (5, 16)).astype(np.float32)
    result = step(runner, plan_of(0, prompt=prompt, row=1, embeds=(EmbedRun(offset=0, values=values),)))
    assert result.tokens[0].tolist() == expected_greedy(prompt, 1, VOCABULARY, WINDOW, embeds=values)
    assert result.tokens[0].tolist() != expected_greedy(prompt, 1, VOCABULARY, WINDOW)


def test_a_failed_step_ends_as_a_result_and_others_go_on() -> None:
    runner, decoder = make(depth=2)
    step(runner, plan_of(0, prompt=[1, 2, 3], row=0))
    decoder.fail_on = 7
    failed = step(runner, plan_of(1, prompt=[7, 7], row=1))
    assert "planted failure 7" in failed.failure and failed.failure_class == "unknown"
    assert failed.counts.tolist() == [0]
    decoder.fail_on = None
    wanted = expected_greedy([1, 2, 3], 2, VOCABULARY, WINDOW)
    assert step(runner, decode_of(2, 0, 4)).tokens.tolist() == [wanted[1:]]
    again = step(runner, plan_of(3, prompt=[7, 7], row=1))
    assert again.tokens.tolist() == [expected_greedy([7, 7], 1, VOCABULARY, WINDOW)]


def test_a_plan_that_fits_no_bucket_fails_but_its_row_changes_hold() -> None:
    runner, _ = make(device("cpu-static"))
    long = [1] * 70
    failed = step(runner, plan_of(0, prompt=long, row=0))
    assert "step_limits" in failed.failure
    assert runner.tables.tables[0][0, :5].tolist() == [1, 2, 3, 4, 5]


def test_non_finite_states_are_told_by_row() -> None:
    runner, decoder = make(depth=2)
    decoder.spoil = 13
    todo = [Job(prompt=[1, 2, 13], max_new=4), Job(prompt=[1, 2, 12], max_new=1), Job(prompt=[13, 4], max_new=1)]
    run(InlineExecutor(runner), todo, depth=2)
    assert [job.error for job in todo] == ["non-finite", "", ""]


def test_log_probabilities_need_no_other_copy_and_steady_decode_copies_once_each_way() -> None:
    runner, _ = make(depth=2)
    step(runner, plan_of(0, prompt=[1, 2, 3], row=0, start={"logprobs": 2}))
    before = runner.runtime.counters()
    step(runner, decode_of(1, 0, 4))
    after = runner.runtime.counters()
    assert after.copies_to_host - before.copies_to_host == 1
    assert after.copies_to_device - before.copies_to_device == 1


def test_a_restart_of_a_row_in_the_plan_that_ends_it_takes_the_last_blocks() -> None:
    runner, _ = make()
    step(runner, plan_of(0, prompt=list(range(40)), row=0))
    blocks = np.array([(0, g, i, b) for g in (0, 1) for i, b in ((0, 0), (1, 0), (2, 0), (0, 7), (1, 8))], np.int32)
    result = step(runner, plan_of(1, prompt=list(range(20)), row=0, ends=(0,), blocks=blocks))
    assert runner.tables.tables[1][0, :3].tolist() == [7, 8, 0]
    assert result.tokens.tolist() == [expected_greedy(list(range(20)), 1, VOCABULARY, WINDOW)]
