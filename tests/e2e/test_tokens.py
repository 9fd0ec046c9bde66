"""Tokens equal Transformers' on tiny random checkpoints of awkward sizes, whatever way they are computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.errors import ConfigError
from drivetrain.params import SamplingParams
from tests.checkpoints import hf_greedy, hf_logits, random_ids, tiny_checkpoint
from tests.e2e.harness import Served
from tests.families import long_factors

FAMILIES = ("llama", "qwen3", "gemma3_text")
OTHERS = (
    "mistral",
    "qwen2",
    "llama-yarn",
    "phi3-partial",
    "phi3-window",
    "granite",
    "gemma2",
    "olmo2",
    "starcoder2",
    "granite_swa",
)  # families and variants: tokens from the cache and without it
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


@pytest.mark.parametrize(("prompt", "longest"), [(20, 48), (60, 160)])
def test_a_longrope_serves_all_requests_by_the_length_asked_for(
    prompt: int, longest: int, engine_device: str, tmp_path: Path
) -> None:
    """Of a model trained for 48 tokens: within, and beyond them from the prompt on, where Transformers agrees."""
    directory = tiny_checkpoint("llama", tmp_path / "model", rope_parameters=long_factors(20, 48))
    prompts = [random_ids(prompt, 1), random_ids(prompt + 3, 2)]
    served = Served(directory, engine_device, max_model_len=longest)
    for _ in range(2):
        assert served.greedy(prompts, 24) == hf_greedy(directory, prompts, 24)
    served.close()


def test_a_dynamic_rope_may_be_stretched_by_its_factor_and_no_further(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
    directory = tiny_checkpoint("llama", tmp_path / "model", max_position_embeddings=48, rope_parameters=rope)
    prompt = random_ids(100, 1)
    served = Served(directory, "cpu", max_model_len=101)
    number = served.submit(prompt, 1, SamplingParams(temperature=0.0, logprobs=5))
    served.run()
    wanted = hf_logits(directory, [*prompt, 5])[-2].log_softmax(-1)  # a forward of as many tokens as are served
    (line,) = served.open[number].logprobs
    for token, value in zip(line.top_ids, line.top_logprobs, strict=True):
        assert abs(value - float(wanted[token])) < 1e-4
    served.close()
    with pytest.raises(ConfigError, match="--max-model-len is 145, the model was made for 144"):
        Served(directory, "cpu", max_model_len=145)
