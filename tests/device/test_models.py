"""Tokens and logits of small checkpoints of every family against Transformers, computed on the host."""

from __future__ import annotations

import pytest

from drivetrain.params import SamplingParams
from tests.checkpoints import hf_greedy, hf_logits, random_ids
from tests.device.models import MODELS, checkpoint
from tests.e2e.harness import Served

pytestmark = pytest.mark.device
PROMPTS = [random_ids(40, 1), random_ids(5, 2), random_ids(71, 3), random_ids(1, 4)]
NEW = 64
REPORTED = SamplingParams(temperature=0.0, logprobs=20)
WITHIN = {"cpu": 1e-4}  # of log-probabilities in float32; an accelerator sums in another order
ELSEWHERE = 1e-3
# Largest and mean error of log-probabilities when Transformers itself computes in bfloat16 on the host. A device may be
# twice as far off at most and half as far again on average.
ROUNDED = {
    "gemma3": (0.081, 0.015),
    "gemma3-even": (0.158, 0.037),
    "llama": (0.266, 0.039),
    "llama-biases": (0.279, 0.032),
    "llama-even": (0.447, 0.088),
    "llama-rope3": (0.246, 0.034),
    "qwen3": (0.205, 0.030),
    "qwen3-even": (0.336, 0.061),
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request, tmp_path_factory):
    return checkpoint(request.param, tmp_path_factory.mktemp("device"))


def reports(served, prompts, new):
    """Tokens and reported alternatives of each prompt, all in one batch."""
    numbers = [served.submit(prompt, new, REPORTED) for prompt in prompts]
    served.run()
    return [(served.open[n].tokens, served.open[n].logprobs) for n in numbers]


def differences(model, prompt, tokens, lines) -> list[float]:
    """How far each reported log-probability is from Transformers' of the same tokens."""
    want = hf_logits(model, [*prompt, *tokens[:-1]])[len(prompt) - 1 :].log_softmax(-1)
    return [
        abs(value - float(row[token]))
        for row, line in zip(want, lines, strict=True)
        for token, value in zip(line.top_ids, line.top_logprobs, strict=True)
    ]


@pytest.mark.parametrize("tokens_a_step", [256, 19])
def test_float32_tokens_and_logits_equal_transformers(model, device, tokens_a_step):
    served = Served(model, device, max_num_batched_tokens=tokens_a_step)
    found = reports(served, PROMPTS, NEW)
    served.close()
    assert [tokens for tokens, _ in found] == hf_greedy(model, PROMPTS, NEW)
    worst = max(max(differences(model, p, *one)) for p, one in zip(PROMPTS, found, strict=True))
    assert worst < WITHIN.get(device, ELSEWHERE)


def test_bfloat16_logits_are_near_those_of_float32(model, device):
    served = Served(model, device, dtype="bfloat16")
    found = reports(served, PROMPTS, 24)
    served.close()
    off = [d for p, one in zip(PROMPTS, found, strict=True) for d in differences(model, p, *one)]
    print(f"bfloat16: up to {max(off):.4f} off, {sum(off) / len(off):.4f} on average")
    most, mean = ROUNDED[model.name]
    assert max(off) < 2 * most and sum(off) / len(off) < 1.5 * mean
