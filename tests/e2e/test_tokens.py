"""Tokens equal Transformers' on tiny random checkpoints of awkward sizes, whatever way they are computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.params import SamplingParams
from tests.checkpoints import hf_greedy, hf_logits, random_ids, tiny_checkpoint
from tests.e2e.harness import Served

FAMILIES = ("llama", "qwen3", "gemma3_text")
OTHERS = ("mistral", "qwen2")  # families and variants: tokens from the cache and without it
WAYS = {
    "one_shot": {"max_num_batched_tokens": 256},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "depth_1": {"depth": 1},
    "depth_3": {"depth": 3, "max_num_batched_tokens": 19},
}
PROMPTS = [random_ids(40, 1), random_ids(5, 2), random_ids(71, 3), random_ids(1, 4)]


@pytest.fixture(scope="module", params=[*FAMILIES, *OTHERS])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp("tiny") / request.param)


EVERY = [(family, way) for family in FAMILIES for way in WAYS]
EVERY += [(family, way) for family in OTHERS for way in ("chunked", "no_prefix_cache")]


@pytest.mark.parametrize(("checkpoint", "way"), EVERY, indirect=["checkpoint"])
def test_64_greedy_tokens_equal_transformers(checkpoint: Path, way: str, engine_device: str) -> None:
    want = hf_greedy(checkpoint, PROMPTS, 64)
    served = Served(checkpoint, engine_device, **WAYS[way])
    assert served.greedy(PROMPTS, 64) == want
    assert served.greedy(PROMPTS, 64) == want  # the second time, prompts may come from the cache
    served.close()


def test_logits_are_within_1e_4_of_transformers(checkpoint: Path, engine_device: str) -> None:
    served = Served(checkpoint, engine_device, max_num_batched_tokens=19)
    prompt = PROMPTS[0]
    want = hf_logits(checkpoint, prompt)[-1].log_softmax(-1)
    number = served.submit(prompt, 1, SamplingParams(temperature=0.0, logprobs=20))
    served.run()
    (line,) = served.open[number].logprobs
    assert len(line.top_ids) == 20
    for token, value in zip(line.top_ids, line.top_logprobs, strict=True):
        assert abs(value - float(want[token])) < 1e-4
    served.close()
