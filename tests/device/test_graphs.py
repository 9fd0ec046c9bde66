"""Tokens with captured graphs equal those without, in float32: every small batch, and batches that change under way.

Where the backend has no option that switches graphs off, the second opinion is Transformers' alone.
"""

from __future__ import annotations

import pytest

from tests.checkpoints import hf_greedy, random_ids
from tests.device.models import checkpoint
from tests.e2e.harness import Served

pytestmark = pytest.mark.device
PROMPTS = [random_ids(3 + 7 * i, 100 + i) for i in range(9)]
LATE = [random_ids(11 + i, 200 + i) for i in range(4)]
NEW = 24
SETTINGS = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "enable_prefix_caching": False}


@pytest.fixture(scope="module", params=["llama-even", "qwen3-even", "gemma3-even", "qwen3"])
def model(request, tmp_path_factory):
    return checkpoint(request.param, tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="module")
def eager(model, device, without_graphs):
    """Tokens of every prompt, all in one batch, without graphs."""
    served = Served(model, device, **SETTINGS, **without_graphs)
    found = served.greedy([*PROMPTS, *LATE], NEW)
    served.close()
    assert found == hf_greedy(model, [*PROMPTS, *LATE], NEW)
    return found


def test_batches_of_one_to_nine(model, device, eager):
    served = Served(model, device, **SETTINGS)
    for rows in range(1, len(PROMPTS) + 1):
        assert served.greedy(PROMPTS[:rows], NEW) == eager[:rows], f"a batch of {rows}"
    served.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_arrivals_aborts_and_preemption(model, device, eager, depth):
    served = Served(model, device, depth=depth, **SETTINGS)
    numbers = [served.submit(prompt, NEW) for prompt in PROMPTS]
    gone = served.submit(random_ids(9, 300), 200)
    late: list[int] = []

    def between(step: int) -> None:
        state = served.loop.scheduler._state
        if step % 5 == 4 and len(late) < len(LATE):
            late.append(served.submit(LATE[len(late)], NEW))
        if step % 7 == 6 and state.decoding:
            state.preempt(next(iter(state.decoding)))
        if step == 9:
            served.loop.abort(gone)

    served.run(between)
    assert [served.open[n].tokens for n in (*numbers, *late)] == eager
    assert served.open[gone].end.reason == "abort"
    assert served.loop.stats().preemptions > 0
    served.close()


def test_a_cache_that_is_too_small_for_all(model, device, eager):
    """Blocks run out in decode: the scheduler itself preempts, and rows leave and come back."""
    for fraction in (1, 2, 4, 8, 16, 32, 64):
        served = Served(model, device, **{**SETTINGS, "max_model_len": 128, "cache_bytes": (8 << 20) // fraction})
        needed = sum(-(-(len(p) + NEW) // served.opened.memory.cache.groups[0].block_tokens) for p in PROMPTS)
        if served.opened.memory.cache.groups[0].num_blocks < needed:
            break
        served.close()
    else:
        pytest.skip("no cache that a sequence fits in is too small for nine")
    assert served.greedy(PROMPTS, NEW) == eager[: len(PROMPTS)]
    served.close()
