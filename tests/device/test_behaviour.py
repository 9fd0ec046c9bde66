"""Tokens do not depend on how they are computed: prefix cache, chunks, company, steps in flight."""

from __future__ import annotations

import pytest

from drivetrain.params import SamplingParams
from tests.checkpoints import random_ids
from tests.device.models import checkpoint
from tests.e2e.harness import Served

pytestmark = pytest.mark.device
PROMPTS = [random_ids(40, 1), random_ids(5, 2), random_ids(71, 3), random_ids(33, 4), random_ids(150, 5)]
DRAWN = SamplingParams(temperature=1.1, top_k=40, top_p=0.9, min_p=0.01)
PLAIN = SamplingParams(temperature=0.8)
NEW = 24


@pytest.fixture(scope="module", params=["llama-even", "qwen3-even", "gemma3-even"])
def model(request, tmp_path_factory):
    return checkpoint(request.param, tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="module")
def alone(model, device):
    """Greedy tokens of each prompt alone: one shot, one step in flight, nothing cached."""
    served = Served(model, device, depth=1, max_num_batched_tokens=256, enable_prefix_caching=False)
    found = [served.greedy([prompt], NEW)[0] for prompt in PROMPTS]
    served.close()
    return found


def drawn(served, sampling, prompts=PROMPTS) -> list[list[int]]:
    numbers = [served.submit(p, NEW, sampling, seed=2**63 + PROMPTS.index(p)) for p in prompts]
    served.run()
    return [served.open[n].tokens for n in numbers]


@pytest.mark.parametrize("caching", [True, False])
def test_prefix_cache(model, device, alone, caching):
    served = Served(model, device, enable_prefix_caching=caching, cache_bytes=16 << 20)
    for _ in range(3):
        assert served.greedy(PROMPTS, NEW) == alone
    longer = [*PROMPTS[-1], *alone[-1][:9]]
    number = served.submit(longer, NEW - 9)
    served.run()
    assert served.open[number].tokens == alone[-1][9:]
    assert (served.open[number].num_cached > 0) is caching
    served.close()


@pytest.mark.parametrize("tokens", [7, 16, 33, 64])
def test_chunks(model, device, alone, tokens):
    served = Served(model, device, max_num_batched_tokens=tokens, max_num_seqs=min(8, tokens))
    assert served.greedy(PROMPTS, NEW) == alone
    served.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight(model, device, alone, depth):
    served = Served(model, device, depth=depth)
    assert served.greedy(PROMPTS, NEW) == alone
    served.close()


@pytest.mark.parametrize("sampling", [DRAWN, PLAIN], ids=["filtered", "plain"])
def test_seeded_draws_in_any_company(model, device, sampling):
    served = Served(model, device, max_num_seqs=8, enable_prefix_caching=False)
    want = [drawn(served, sampling, [prompt])[0] for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in want}) == len(want)
    for company in (0, 1, 3):
        others = [served.submit(random_ids(11 * i + 3, 30 + i), 20) for i in range(company)]
        assert drawn(served, sampling) == want
        assert all(served.open[n].end is not None for n in others)
    served.close()


def test_seeded_draws_are_those_of_the_host(model, device):
    """The noise is the same everywhere; logits agree closely enough in float32 that the tokens do."""
    served, host = Served(model, device), Served(model, "cpu")
    assert drawn(served, DRAWN) == drawn(host, DRAWN)
    served.close()
    host.close()
