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
        ("repetition_penalty", "1"),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("-inf")),
        ("min_tokens", -1),
        ("min_tokens", 1.0),
        ("bad_words", "text"),
        ("bad_words", ("",)),
        ("bad_words", ("a",) * 129),
        ("logit_bias", 5),
    ],
)
def test_a_value_of_another_kind_is_named(field, value):
    with pytest.raises(RequestError, match=f"{field} is") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {5: 100.5}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": ((5, 1.0), (5, 2.0))},
        {"logit_bias": dict.fromkeys(range(513), 1.0)},
        {"bad_word_ids": ((),)},
        {"bad_word_ids": ((1,) * 17,)},
        {"bad_word_ids": ((1, -2),)},
        {"bad_word_ids": (5,)},
        {"min_tokens": 9, "max_tokens": 8},
    ],
)
def test_what_cannot_change_logits_is_named(fields):
    name = next(iter(fields))
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**fields)
    assert caught.value.param == name


def test_a_bias_is_a_mapping_or_pairs():
    assert SamplingParams(logit_bias={5: 1}).logit_bias == ((5, 1),)
    assert SamplingParams().adjusts is False
    assert all(SamplingParams(**{name: 1}).adjusts for name in ("presence_penalty", "frequency_penalty", "min_tokens"))


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
