"""What a request may rely on: its tokens do not depend on what else happens, and the host waits at most once a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.params import SamplingParams
from tests.checkpoints import hf_greedy, random_ids, tiny_checkpoint
from tests.e2e.harness import GREEDY, Served

PROMPTS = [random_ids(40, 1), random_ids(5, 2), random_ids(71, 3), random_ids(33, 4), random_ids(50, 5)]
DRAWN = SamplingParams(temperature=1.1, top_k=40, top_p=0.9, min_p=0.01)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("behaviour") / "qwen3")


@pytest.fixture(scope="module")
def drawn_alone(checkpoint: Path) -> list[list[int]]:
    """Seeded tokens of each prompt, alone, on the CPU, one step in flight."""
    served = Served(checkpoint, "cpu", depth=1, max_num_seqs=1, enable_prefix_caching=False)
    tokens = []
    for i, prompt in enumerate(PROMPTS):
        number = served.submit(prompt, 24, DRAWN, seed=2**63 + i)
        served.run()
        tokens.append(served.open[number].tokens)
    served.close()
    return tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_seeded_tokens_do_not_depend_on_batch_depth_preemption_or_device(
    checkpoint: Path, drawn_alone: list[list[int]], engine_device: str, depth: int
) -> None:
    served = Served(checkpoint, engine_device, depth=depth, max_num_batched_tokens=32)

    def between(step: int) -> None:
        state = served.loop.scheduler._state
        if step % 9 == 8 and state.decoding:
            state.preempt(next(iter(state.decoding)))

    numbers = [served.submit(p, 24, DRAWN, seed=2**63 + i) for i, p in enumerate(PROMPTS)]
    served.run(between)
    assert [served.open[n].tokens for n in numbers] == drawn_alone
    assert served.loop.stats().preemptions > 0
    served.close()


def test_samples_of_one_prompt_share_its_blocks(checkpoint: Path, engine_device: str) -> None:
    prompt = random_ids(150, 8)
    for caching in (True, False):
        served = Served(checkpoint, engine_device, enable_prefix_caching=caching)
        numbers = [served.submit(prompt, 8, DRAWN, seed=4, sample_index=i, fanout=77) for i in range(4)]
        served.run()
        assert [served.open[n].num_cached for n in numbers] == [0, 128, 128, 128]
        assert len({tuple(served.open[n].tokens) for n in numbers}) > 1
        later = served.submit(prompt, 8)
        served.run()
        assert served.open[later].num_cached == (128 if caching else 0)
        served.close()


def test_aborts_in_prompt_and_in_decode_change_nobody_else(checkpoint: Path, engine_device: str) -> None:
    want = hf_greedy(checkpoint, PROMPTS, 32)
    served = Served(checkpoint, engine_device, max_num_batched_tokens=16, enable_prefix_caching=False)
    numbers = [served.submit(p, 32) for p in PROMPTS]
    in_prompt = served.submit(random_ids(200, 9), 8)
    in_decode = served.submit(random_ids(4, 10), 64)

    def between(step: int) -> None:
        state = served.loop.scheduler._state
        asked = {r.request_id: r for r in state.requests.values()}
        if in_prompt in asked and asked[in_prompt].row >= 0 and state.table.reserved[asked[in_prompt].row] > 0:
            served.loop.abort(in_prompt)
        if in_decode in asked and len(served.open[in_decode].tokens) > 5:
            served.loop.abort(in_decode)

    served.run(between)
    assert [served.open[n].tokens for n in numbers] == want
    assert [served.open[n].end.reason for n in (in_prompt, in_decode)] == ["abort", "abort"]
    assert 5 < len(served.open[in_decode].tokens) < 64 and not served.open[in_prompt].tokens
    many = [served.submit(random_ids(20, 50 + i), 64) for i in range(30)]
    for _ in range(4):
        served.step()
    for number in many:
        served.loop.abort(number)
    served.run()  # checks gauges and integrity
    served.close()


def test_a_repeated_prompt_comes_from_the_cache(tmp_path: Path, engine_device: str) -> None:
    if engine_device == "mirage-static":
        pytest.skip("its buckets end below 1,000 tokens a row; shorter prompts above cover it")
    long = tiny_checkpoint("qwen3", tmp_path / "qwen3", max_position_embeddings=2048)
    served = Served(long, engine_device, max_model_len=1100, cache_bytes=64 << 20, depth=1)
    prompt = random_ids(1000, 11)
    computed, tokens = [], []
    for _ in range(2):
        steps = served.loop.steps
        number = served.submit(prompt, 4)
        served.run()
        computed.append(served.open[number].first_step - steps)
        tokens.append(served.open[number].tokens)
        cached = served.open[number].num_cached
    assert cached >= 896 and tokens[0] == tokens[1]
    assert computed[0] >= 5 * computed[1], f"steps to the first token: {computed}"
    served.close()


def test_one_wait_a_step_and_the_next_step_is_submitted_first(checkpoint: Path) -> None:
    served = Served(checkpoint, "mirage", depth=2)
    numbers = [served.submit(p, 40) for p in PROMPTS]
    while any(len(served.open[n].tokens) < 3 for n in numbers):
        served.step()
    runner, events = served.opened.runner, []
    forward, poll = served.loop.executor.forward, served.loop.executor.poll
    served.loop.executor.forward = lambda plan: (events.append(("submit", plan.plan_id)), forward(plan))[1]

    def polled(wait: bool):
        result = poll(wait)
        events.append(("tokens", result.plan_id))
        return result

    served.loop.executor.poll = polled
    before = runner.runtime.counters()
    for _ in range(20):
        served.step()
    after = runner.runtime.counters()
    assert after.waits - before.waits <= 20, "more than one wait a step"
    assert after.copies_to_host - before.copies_to_host == 20
    order = {event: i for i, event in enumerate(events)}
    ids = [plan_id for kind, plan_id in events if kind == "tokens"]
    assert all(order["submit", n + 1] < order["tokens", n] for n in ids[1:-1])
    served.run()
    served.close()


def test_deterministic_results_have_the_same_bits_in_any_batch(checkpoint: Path) -> None:
    reported = SamplingParams(temperature=0.0, logprobs=5)
    settings = {"deterministic": True, "dtype": "bfloat16", "max_model_len": 512, "max_num_batched_tokens": 512}
    found = []
    for company in (0, 3, 7):
        served = Served(checkpoint, "cpu", **settings)
        others = [served.submit(random_ids(11 * i + 3, 30 + i), 20) for i in range(company)]
        number = served.submit(PROMPTS[2], 20, reported)
        served.run()
        assert len(others) == company
        done = served.open[number]
        found.append((done.tokens, [(line.logprob, line.top_ids, line.top_logprobs) for line in done.logprobs]))
        served.close()
    assert found[0] == found[1] == found[2]


def test_refusals_leave_everyone_else_alone(checkpoint: Path, engine_device: str) -> None:
    from drivetrain.errors import RequestError

    served = Served(checkpoint, engine_device)
    number = served.submit(PROMPTS[0], 8)
    for prompt, words in (([], "empty"), (random_ids(256, 1), "no room")):
        with pytest.raises(RequestError, match=words):
            served.submit(prompt, 8)
        served.open.pop(served.next - 1)
    served.run()
    assert served.open[number].tokens == hf_greedy(checkpoint, [PROMPTS[0]], 8)[0]
    assert GREEDY.temperature == 0.0
    served.close()
