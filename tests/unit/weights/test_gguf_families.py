"""A GGUF file of every family: its values, its configuration, and logits equal to Transformers' of the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from drivetrain.errors import ModelError
from drivetrain.models.families import read_spec
from drivetrain.models.source import resolve
from tests.checkpoints import random_ids
from tests.families import FAMILIES, YARN, long_factors
from tests.unit.models.driving import loaded, run
from tests.unit.weights.ggufs import tiny_gguf

K = gguf.GGMLQuantizationType
LONG = {
    "hidden_size": 96,
    "original_max_position_embeddings": 40,
    "rope_parameters": long_factors(12, 40, partial_rotary_factor=0.75),
}
EVEN: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama yarn": ("llama", dict(rope_parameters=YARN)),
    "mistral": ("mistral", dict(sliding_window=None)),
    "mistral, window": ("mistral", dict(metadata={"attention.sliding_window": 8})),
    "qwen2": ("qwen2", {}),
    "qwen2 packed": ("qwen2", dict(EVEN, kinds={"blk.0.attn_q.w": K.Q8_0, "blk.1.ffn_up": K.Q4_0})),
    "phi3": ("phi3", {}),
    "phi3, window, packed": (
        "phi3",
        dict(EVEN, sliding_window=8, kinds={"blk.0.attn_qkv": K.Q8_0, "blk.1.ffn_up": K.Q5_0}),
    ),
    "phi3, long": ("phi3", LONG),
    "granite": ("granite", {}),
    "granite, biases": ("granite", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "gemma2": ("gemma2", dict(query_pre_attn_scalar=24)),
    "olmo2": ("olmo2", {}),
    "starcoder2": ("starcoder2", dict(sliding_window=None)),
    "starcoder2, no biases": ("starcoder2", dict(sliding_window=None, use_bias=False, tie_word_embeddings=True)),
}


def transformers_logits(family: str, options: dict[str, Any], truth: dict[str, torch.Tensor], ids: list[int]):
    """What Transformers computes with the values that the file stands for."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = FAMILIES[family]
    given = {key: value for key, value in options.items() if key not in ("kinds", "metadata")}
    config = AutoConfig.for_model(kind, **{**fields, **given})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    missing, unexpected = model.load_state_dict(truth, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    family, options = CASES[case]
    truth = tiny_gguf(family, tmp_path / "m.gguf", **options)
    checkpoint = resolve(str(tmp_path / "m.gguf")).open_checkpoint()
    assert set(checkpoint.infos()) == set(truth)
    for name, value in truth.items():
        found = checkpoint.read(name, torch.float32)
        rounded = family == "gemma2" and name.endswith("norm.weight")  # stored as 1 + w
        assert torch.allclose(found, value, rtol=0, atol=1e-6 if rounded else 0), name
    checkpoint.close()
    ids = random_ids(53)
    decoder, _ = loaded(tmp_path / "m.gguf")
    wanted = transformers_logits(family, options, truth, ids)
    assert float(wanted.abs().max()) > 1.0
    assert float((run(decoder, ids, [20, 33]) - wanted).abs().max()) < 1e-4


def test_what_a_file_leaves_implied(tmp_path: Path) -> None:
    tiny_gguf("gemma2", tmp_path / "g.gguf", num_hidden_layers=46, hidden_size=64)
    config = resolve(str(tmp_path / "g.gguf")).config
    assert (config["query_pre_attn_scalar"], config["sliding_window"]) == (16, 8)  # 64 / 4, of the 27B model alone
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (2.0, 6.0)
    tiny_gguf("phi3", tmp_path / "p.gguf", **LONG)
    spec = read_spec(resolve(str(tmp_path / "p.gguf")).config, "float32")
    (rope,) = spec.ropes
    assert (rope.rotary_dim, rope.scaling.original_positions, len(rope.scaling.long)) == (12, 40, 6)
    assert spec.layers[0].mixer.window is None


def test_a_granite_file_without_a_scale_of_attention_means_the_usual_one(tmp_path: Path) -> None:
    tiny_gguf("granite", tmp_path / "m.gguf")
    source = resolve(str(tmp_path / "m.gguf"))
    metadata = {key: value for key, value in source.header.metadata.items() if key != "granite.attention.scale"}
    source.header.metadata.clear()
    source.header.metadata.update(metadata)
    from drivetrain.models.weights.gguf_config import config_of

    source.header.reopen()
    assert config_of(source.header)["attention_multiplier"] == pytest.approx(10**-0.5)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("olmo2", dict(metadata={"attention.sliding_window": 8}), "olmo2.attention.sliding_window: it is an OLMo 3"),
        ("llama", dict(metadata={"rope.scaling.type": "longrope"}), "lacks rope_factors_short.weight"),
        ("llama", dict(metadata={"rope.scaling.type": "dynamic"}), "rope scaling 'dynamic'"),
        (
            "llama",
            dict(rope_parameters=YARN, metadata={"rope.scaling.yarn_log_multiplier": 0.2}),
            "rope.scaling.yarn_log_multiplier",
        ),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, family: str, options: dict[str, Any], message: str) -> None:
    tiny_gguf(family, tmp_path / "m.gguf", **options)
    with pytest.raises(ModelError, match=message) as caught:
        resolve(str(tmp_path / "m.gguf"))
    assert "m.gguf" in str(caught.value)
