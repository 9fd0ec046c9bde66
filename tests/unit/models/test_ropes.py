"""Every rule of scaling against Transformers; those that depend on the length, at both sides of the trained one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drivetrain.models.families import read_spec
from drivetrain.models.rope import inverse_frequencies
from tests.checkpoints import hf_logits, random_ids, tiny_checkpoint
from tests.families import LLAMA3_ROPE, YARN, long_factors
from tests.unit.models.driving import loaded, run, small_spec

TRAINED = 48
RULES = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN,
    "yarn with a factor of its own": dict(YARN, attention_factor=1.3),
    "yarn, broken ends": dict(YARN, truncate=False, beta_fast=6, beta_slow=3),
    "yarn, equal ends": dict(YARN, beta_fast=1, beta_slow=1, original_max_position_embeddings=4096),
    "yarn, m scales": dict(YARN, mscale=0.8, mscale_all_dim=1.5),
    "longrope": long_factors(32, TRAINED),
    "longrope with a factor": long_factors(32, TRAINED, factor=5.0),
    "longrope, factor of attention": long_factors(32, TRAINED, attention_factor=1.25),
    "longrope, part of a head": long_factors(16, TRAINED, partial_rotary_factor=0.5),
}


def config_of(rule: dict) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 97,
        "hidden_size": 128,
        "intermediate_size": 28,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 160,
        "rope_parameters": {"rope_theta": 10000.0, **rule},
    }


@pytest.mark.parametrize("length", [7, 2000])
@pytest.mark.parametrize("name", RULES)
def test_frequencies_are_those_of_transformers(name: str, length: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = config_of(RULES[name])
    theirs = LlamaConfig(**{key: value for key, value in config.items() if key != "architectures"})
    wanted, factor = ROPE_INIT_FUNCTIONS[RULES[name]["rope_type"]](theirs, "cpu", seq_len=length)
    (rope,) = read_spec(config, "float32").ropes
    assert torch.allclose(inverse_frequencies(rope, length), wanted, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_the_old_style_is_read_too() -> None:
    old = config_of({})
    old["rope_scaling"] = {key: value for key, value in YARN.items() if key != "rope_theta"} | {"type": "yarn"}
    old["rope_scaling"].pop("rope_type")
    old["rope_theta"] = old.pop("rope_parameters")["rope_theta"]
    assert read_spec(old, "float32") == read_spec(config_of(YARN), "float32")
    top = config_of(long_factors(32, 9))
    top["original_max_position_embeddings"] = TRAINED  # the configuration's own key comes before the rope's
    wanted = read_spec(config_of(long_factors(32, TRAINED)), "float32")
    assert read_spec(top, "float32") == wanted


LENGTH_DEPENDENT = {
    "phi3": dict(
        family="phi3",
        hidden_size=96,
        original_max_position_embeddings=TRAINED,
        max_position_embeddings=192,
        rope_parameters=long_factors(12, TRAINED, partial_rotary_factor=0.75),
    ),
    "dynamic": dict(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, max_position_embeddings=TRAINED
    ),
    "longrope": dict(rope_parameters=long_factors(20, TRAINED), max_position_embeddings=192),
}


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
@pytest.mark.parametrize(("length", "reach"), [(40, TRAINED), (TRAINED, TRAINED), (101, 101)])
def test_logits_at_both_sides_of_the_trained_length(kind: str, length: int, reach: int, tmp_path) -> None:
    """Transformers chooses by a forward's longest sequence: one of just the reach is what all requests get here."""
    given = {"family": "llama", **LENGTH_DEPENDENT[kind]}
    directory = tiny_checkpoint(directory=tmp_path / "model", **given)
    decoder, _ = loaded(directory, reach=reach)
    ids = random_ids(length)
    wanted = hf_logits(directory, ids)
    for pieces in ([length], [3, 20, length - 23], [1] * length):
        assert float((run(decoder, ids, pieces) - wanted).abs().max()) < 1e-4
    other, _ = loaded(directory, reach=101 if reach == TRAINED else TRAINED)
    assert float((run(other, ids, [length]) - wanted).abs().max()) > 1e-2, "both sides would pass for each other"


def test_a_longrope_that_is_given_no_reach_serves_all_positions() -> None:
    spec = read_spec(config_of(long_factors(32, TRAINED)), "float32")
    assert spec.reach == 0 and spec.max_positions > TRAINED
    (rope,) = spec.ropes
    assert not torch.equal(inverse_frequencies(rope, TRAINED), inverse_frequencies(rope, spec.max_positions))


def test_only_dynamic_and_yarn_go_beyond_the_models_own_positions() -> None:
    most = {name: read_spec(config_of(rule), "float32").stretched_positions for name, rule in RULES.items()}
    assert most["dynamic"] == 480 and most["yarn"] == 256
    assert {most[name] for name in ("linear", "llama3", "longrope")} == {160}
    assert replace(small_spec(), reach=9).stretched_positions == 256
