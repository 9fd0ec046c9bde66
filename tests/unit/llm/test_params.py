"""Sampling parameters refuse what they are not made for, field by field."""

import pytest

from drivetrain.config import EngineConfig
from drivetrain.errors import ConfigError, RequestError
from drivetrain.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", "2"),
        ("n", True),
        ("temperature", None),
        ("temperature", "1"),
        ("top_k", 2**40),
        ("top_k", 1.5),
        ("max_tokens", 1.5),
        ("seed", "x"),
        ("logprobs", True),
        ("ignore_eos", 1),
        ("stop", 5),
        ("stop", "text"),
        ("stop", (1,)),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", (True,)),
    ],
)
def test_a_value_of_another_kind_is_named(field, value):
    with pytest.raises(RequestError, match=f"{field} is") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 5),
        ("device", None),
        ("tokenizer", 5),
        ("enable_prefix_caching", "no"),
        ("strict", 1),
        ("memory_utilization", "x"),
        ("memory_utilization", True),
        ("probe_timeout", None),
        ("backend_options", 5),
        ("backend_options", {"a": 5}),
        ("max_model_len", 2.5),
        ("dtype", None),
    ],
)
def test_a_setting_of_another_kind_is_named(field, value):
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
        EngineConfig(**{"model": "m"} | {field: value})
