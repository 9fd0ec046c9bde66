"""Penalties, biases, bad words and minimum lengths: tokens equal a plain loop that computes everything anew for each
token, in float64, over Transformers' model; whatever way they are served."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from drivetrain.errors import RequestError
from drivetrain.launch import Parts
from drivetrain.ops.reference.philox import philox_words
from drivetrain.params import SamplingParams
from drivetrain.runner.drafter import RandomDrafter
from tests.checkpoints import random_ids, tiny_checkpoint
from tests.e2e.harness import Served
from tests.families import VOCABULARY

LENGTH, ENDS = 24, (7, 11)
SEED = 0x123456789ABCDEF0
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8)
ASKED = {
    "plain": GREEDY,
    "repetition": replace(GREEDY, repetition_penalty=1.7),
    "below_one": replace(GREEDY, repetition_penalty=0.6),
    "presence": replace(GREEDY, presence_penalty=1.9),
    "frequency": replace(GREEDY, frequency_penalty=-1.5),
    "bias": replace(GREEDY, logit_bias=((3, 4.0), (9, -100.0), (40, 3.5))),
    "all": replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4, logit_bias=((5, 6.0),)),
    "drawn": DRAWN,
    "drawn_repetition": replace(DRAWN, repetition_penalty=1.5),
    "drawn_all": replace(DRAWN, repetition_penalty=1.2, presence_penalty=-1.0, frequency_penalty=0.3, min_p=0.02),
    "drawn_top_k": replace(DRAWN, frequency_penalty=2.0, top_k=5),
    "held": replace(GREEDY, stop_token_ids=ENDS, min_tokens=9, logit_bias=tuple((end, 50.0) for end in ENDS)),
}
PROMPTS = [random_ids(23, 1), random_ids(5, 2), [*random_ids(6, 3)] * 4]
WAYS: dict[str, dict[str, object]] = {
    "one_shot": {"max_num_batched_tokens": 256},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "depth_1": {"depth": 1},
    "depth_3": {"depth": 3, "max_num_batched_tokens": 19},
    "few_slots": {"max_adjusted_seqs": 2},
    "deterministic": {"deterministic": True, "max_num_batched_tokens": 128},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny") / "llama")


@functools.cache
def model_of(directory: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()


@functools.cache
def noise(position: int, sample: int) -> np.ndarray:
    key = SEED & 0xFFFFFFFF, SEED >> 32
    words = [word for four in range(-(-VOCABULARY // 4)) for word in philox_words((four, position, sample, 0), key)]
    return -np.log(-np.log1p(-(np.array(words[:VOCABULARY], np.float64) + 0.5) * 2.0**-32))


def changed(logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], asked: SamplingParams) -> np.ndarray:
    x = logits.tolist()
    for token, value in asked.logit_bias:
        x[token] += value
    for token in {*prompt, *output}:
        x[token] = x[token] / asked.repetition_penalty if x[token] > 0 else x[token] * asked.repetition_penalty
    for token in set(output):
        x[token] -= asked.frequency_penalty * output.count(token) + asked.presence_penalty
    for *before, last in asked.bad_word_ids:
        if list(output)[len(output) - len(before) :] == before and len(output) >= len(before):
            x[last] = -math.inf
    if len(output) < asked.min_tokens:
        for token in asked.stop_token_ids:
            x[token] = -math.inf
    return np.array(x)


def pick(x: np.ndarray, asked: SamplingParams, position: int, sample: int) -> int:
    if asked.temperature == 0:
        return int(x.argmax())
    x = x / asked.temperature
    if asked.top_k:
        x = np.where(x >= np.sort(x)[-asked.top_k], x, -math.inf)
    x = np.where(np.exp(x - x.max()) >= asked.min_p, x, -math.inf)
    return int((x + noise(position, sample)).argmax())


def slow(
    directory: Path, prompt: Sequence[int], asked: SamplingParams, sample: int = 0, allowed: int | None = None
) -> list[int]:
    """Every token by a forward over all tokens before it. ``allowed``: what ids are modulo 2."""
    output: list[int] = []
    while len(output) < LENGTH:
        with torch.no_grad():
            logits = model_of(directory)(torch.tensor([[*prompt, *output]])).logits[0, -1].numpy()
        logits = changed(logits, prompt, output, asked)
        if allowed is not None:
            logits[1 - allowed :: 2] = -math.inf
        token = pick(logits, asked, len(prompt) + len(output), sample)
        if token in asked.stop_token_ids and not (asked.min_tokens and len(output) < asked.min_tokens):
            break
        output.append(token)
    return output


@functools.cache
def wanted(directory: Path) -> dict[tuple[str, int], list[int]]:
    found = {(name, n): slow(directory, p, asked) for name, asked in ASKED.items() for n, p in enumerate(PROMPTS)}
    plain = [found["plain", n] for n in range(len(PROMPTS))]
    for name in ASKED:
        if name not in ("plain", "drawn", "drawn_top_k"):
            base = plain if "drawn" not in name else [found["drawn", n] for n in range(len(PROMPTS))]
            assert [found[name, n] for n in range(len(PROMPTS))] != base, f"{name} changes nothing here"
    return found


def bad_words_of(directory: Path) -> SamplingParams:
    """Words of one, two and three tokens out of what would be said without them."""
    a, b, c = (wanted(directory)["plain", n] for n in range(3))
    return replace(GREEDY, bad_word_ids=((a[2],), tuple(b[3:5]), tuple(c[1:4]), (1, 2, 3, 4)))


def serve_all(served: Served, directory: Path) -> None:
    want = wanted(directory)
    numbers = {served.submit(PROMPTS[n], LENGTH, ASKED[name], seed=SEED): (name, n) for name, n in want}
    served.run()
    for number, key in numbers.items():
        assert served.open[number].tokens == want[key], key


@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_a_plain_loop(checkpoint: Path, way: str, engine_device: str) -> None:
    served = Served(checkpoint, engine_device, **WAYS[way])
    serve_all(served, checkpoint)
    serve_all(served, checkpoint)  # prompts may come from the cache now
    served.close()


def test_bad_words_of_several_tokens(checkpoint: Path, engine_device: str) -> None:
    asked = bad_words_of(checkpoint)
    served = Served(checkpoint, engine_device)
    numbers = [served.submit(prompt, LENGTH, asked, seed=SEED) for prompt in PROMPTS]
    served.run()
    for number, prompt, plain in zip(numbers, PROMPTS, (0, 1, 2), strict=True):
        tokens = served.open[number].tokens
        assert tokens == slow(checkpoint, prompt, asked)
        assert tokens != wanted(checkpoint)["plain", plain]
    served.close()


def test_preempted_requests_go_on_as_if_nothing_had_been(checkpoint: Path, engine_device: str) -> None:
    """Rows lose their slots, and others take them."""
    served, count = Served(checkpoint, engine_device, max_adjusted_seqs=3), 0

    def between(step: int) -> None:
        nonlocal count
        state = served.loop.scheduler._state
        if step % 9 == 5 and state.decoding:
            state.preempt(next(iter(state.decoding)))
            count += 1

    want = wanted(checkpoint)
    keys = [key for key in want if key[0] != "plain"]
    numbers = [served.submit(PROMPTS[n], LENGTH, ASKED[name], seed=SEED) for name, n in keys]
    served.run(between)
    assert count > 5
    for number, key in zip(numbers, keys, strict=True):
        assert served.open[number].tokens == want[key], key
    served.close()


def test_samples_of_one_prompt_are_counted_apart(checkpoint: Path, engine_device: str) -> None:
    served, asked = Served(checkpoint, engine_device, enable_prefix_caching=False), ASKED["drawn_all"]
    numbers = [
        served.submit(PROMPTS[0], LENGTH, asked, seed=SEED, sample_index=sample, fanout=1) for sample in range(4)
    ]
    served.run()
    tokens = [served.open[number].tokens for number in numbers]
    assert tokens == [slow(checkpoint, PROMPTS[0], asked, sample) for sample in range(4)]
    assert len({tuple(one) for one in tokens}) == 4
    served.close()


def test_log_probabilities_are_those_before(checkpoint: Path, engine_device: str) -> None:
    served = Served(checkpoint, engine_device)
    number = served.submit(PROMPTS[1], 3, replace(ASKED["all"], logprobs=3), seed=SEED)
    served.run()
    done = served.open[number]
    before = list(PROMPTS[1])
    for token, line in zip(done.tokens, done.logprobs, strict=True):
        with torch.no_grad():
            logs = model_of(checkpoint)(torch.tensor([before])).logits[0, -1].log_softmax(-1)
        assert line.token == token and abs(line.logprob - float(logs[token])) < 1e-4
        assert list(line.top_ids) == logs.topk(3).indices.tolist()
        before.append(token)
    served.close()


def test_who_finds_no_slot_waits_and_others_pass(checkpoint: Path, engine_device: str) -> None:
    served = Served(checkpoint, engine_device, max_adjusted_seqs=1)
    holders = [served.submit(PROMPTS[0], LENGTH, ASKED["presence"], seed=SEED) for _ in range(3)]
    plain = served.submit(PROMPTS[1], LENGTH, ASKED["plain"], seed=SEED)
    ended: list[int] = []

    def between(step: int) -> None:
        state = served.loop.scheduler._state
        assert sum(int(slot) >= 0 for slot in state.table.slot) <= 1
        served.loop.check_integrity()
        ended.extend(n for n, done in served.open.items() if done.end is not None and n not in ended)

    served.run(between)
    order = [*ended, *(n for n in served.open if n not in ended)]
    assert set(order[:2]) == {holders[0], plain} and order[2:] == holders[1:]
    assert all(served.open[n].tokens == wanted(checkpoint)["presence", 0] for n in holders)
    assert served.open[plain].tokens == wanted(checkpoint)["plain", 1]
    served.close()


def test_an_aborted_request_gives_its_slot_back(checkpoint: Path) -> None:
    served = Served(checkpoint, "cpu", max_adjusted_seqs=1)
    first = served.submit(PROMPTS[0], LENGTH, ASKED["all"], seed=SEED)
    second = served.submit(PROMPTS[1], LENGTH, ASKED["presence"], seed=SEED)
    served.run(lambda step: served.loop.abort(first) if step == 4 else None)
    assert served.open[first].end.reason == "abort"
    assert served.open[second].tokens == wanted(checkpoint)["presence", 1]
    served.close()


def test_what_cannot_be_is_refused_and_the_next_request_is_served(checkpoint: Path) -> None:
    served = Served(checkpoint, "cpu")
    for asked, name in (
        (replace(GREEDY, logit_bias=((VOCABULARY, 1.0),)), "logit_bias names token"),
        (replace(GREEDY, bad_word_ids=((1, VOCABULARY + 3),)), "bad_words names token"),
        (replace(GREEDY, min_tokens=LENGTH + 1), "min_tokens is 25"),
        (replace(GREEDY, min_tokens=1, stop_token_ids=tuple(range(200))), "at most 128 end and stop tokens"),
    ):
        with pytest.raises(RequestError, match=name):
            served.submit(PROMPTS[0], LENGTH, asked)
        del served.open[served.next - 1]
    assert served.greedy([PROMPTS[0]], LENGTH) == [wanted(checkpoint)["plain", 0]]
    served.close()
    off = Served(checkpoint, "cpu", max_adjusted_seqs=0)
    with pytest.raises(RequestError, match="max-adjusted-seqs"):
        off.submit(PROMPTS[0], LENGTH, ASKED["presence"])
    off.close()


def test_rows_with_a_slot_go_without_drafts(checkpoint: Path, engine_device: str) -> None:
    """Others beside them are given drafts, and nobody's tokens change."""
    served = Served(checkpoint, engine_device, Parts(drafter=RandomDrafter(VOCABULARY, 3), max_drafts=3))
    serve_all(served, checkpoint)
    served.close()


class Odd:
    """Allows odd tokens only."""

    def accept(self, token: int) -> bool:
        return token % 2 == 1

    def mask(self) -> np.ndarray:
        return np.full(-(-VOCABULARY // 32), -0x55555556, np.int32)


@pytest.mark.parametrize("depth", [1, 2])
def test_late_masks_and_penalties_go_together(checkpoint: Path, engine_device: str, depth: int) -> None:
    """Some requests are aborted while their masks are awaited, and others take their rows and slots."""
    served, asked = Served(checkpoint, engine_device, depth=depth, max_num_seqs=4, max_adjusted_seqs=3), ASKED["all"]
    want = [slow(checkpoint, prompt, asked, allowed=1) for prompt in PROMPTS]
    doomed = [served.submit(PROMPTS[n % 3], LENGTH, asked, Odd(), seed=SEED) for n in range(4)]
    numbers = [served.submit(PROMPTS[n % 3], LENGTH, asked, Odd(), seed=SEED) for n in range(6)]
    plain = served.submit(PROMPTS[1], LENGTH, ASKED["presence"], seed=SEED)

    def between(step: int) -> None:
        if step > 3 and step % 3 == 0 and doomed:
            served.loop.abort(doomed.pop())

    served.run(between)
    assert not doomed
    assert [served.open[number].tokens for number in numbers] == want * 2
    assert served.open[plain].tokens == wanted(checkpoint)["presence", 1]
    served.close()
