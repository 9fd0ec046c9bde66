"""Chunks of prompts under --deterministic: whole blocks that fit a step."""

import pytest

from drivetrain.errors import ConfigError
from drivetrain.launch import fixed_chunk


@pytest.mark.parametrize(
    ("tokens", "granule", "chunk"), [(8192, 16, 256), (48, 32, 32), (100, 16, 96), (4096, 512, 512), (300, 256, 256)]
)
def test_a_chunk_is_whole_blocks_that_fit(tokens, granule, chunk):
    assert fixed_chunk(tokens, granule) == chunk


def test_a_step_smaller_than_a_block_is_refused_with_the_fix():
    with pytest.raises(ConfigError, match=r"steps of 31 tokens.*block of 32") as refused:
        fixed_chunk(31, 32)
    assert "--max-num-batched-tokens to 32" in str(refused.value)
