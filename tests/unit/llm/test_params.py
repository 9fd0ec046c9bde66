"""Sampling parameters refuse what they are not made for, field by field."""

import pytest

from drivetrain.errors import RequestError
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
