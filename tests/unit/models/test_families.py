"""Configurations: old style equals new style, and what can't be served is refused by the key's name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drivetrain.errors import ModelError
from drivetrain.models.families import FAMILIES, naming_of, read_spec
from drivetrain.models.rope import inverse_frequencies
from drivetrain.models.spec import BandScaling, LinearScaling, LongScaling, Rope

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
QWEN = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "head_dim": 6}
PHI = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "head_dim": 6}
GRANITE = {**LLAMA, "architectures": ["GraniteForCausalLM"], "head_dim": 6}
OLMO = {**LLAMA, "architectures": ["Olmo2ForCausalLM"], "head_dim": 6}
STARCODER = {**LLAMA, "architectures": ["Starcoder2ForCausalLM"], "head_dim": 6}
SWA = {**GRANITE, "architectures": ["GraniteSWAForCausalLM"]}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "head_dim": 6}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 28,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 16,
    "max_position_embeddings": 256,
}
GEMMA2 = {**GEMMA, "architectures": ["Gemma2ForCausalLM"]}
BANDS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_every_listed_architecture_is_read_by_its_own_family():
    for architecture in FAMILIES:
        config = {**(GEMMA if "Gemma" in architecture else LLAMA), "head_dim": 6, "num_key_value_heads": 1}
        config["architectures"] = [architecture]
        if architecture.endswith("ConditionalGeneration"):
            config = {"architectures": [architecture], "text_config": config}
        assert read_spec(config, "float32").architecture == architecture


def test_llama_defaults():
    spec = read_spec({**LLAMA, "hidden_size": 24, "num_key_value_heads": None, "head_dim": None}, "bfloat16")
    mixer = spec.layers[0].mixer
    assert (mixer.num_kv_heads, mixer.head_dim, mixer.scale) == (4, 6, 6**-0.5)
    assert spec.ropes == (Rope(theta=10000.0, rotary_dim=6),)
    assert not spec.tied and spec.dtype == spec.cache_dtype == "bfloat16"


@pytest.mark.parametrize("base", [LLAMA, QWEN])
def test_old_and_new_rope_styles_agree(base):
    base = {**base, "head_dim": 6}
    old = {**base, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **BANDS}}
    new = {**base, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **BANDS}}
    assert read_spec(old, "float32") == read_spec(new, "float32")
    scaling = BandScaling(factor=8.0, low_factor=1.0, high_factor=4.0, original_positions=64)
    assert read_spec(old, "float32").ropes == (Rope(theta=5e5, rotary_dim=6, scaling=scaling),)


def test_gemma_old_and_new_styles_agree():
    old = {
        **GEMMA,
        "rope_theta": 1e6,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window_pattern": 3,
    }
    new = {
        **GEMMA,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
        "layer_types": ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(8)],
    }
    spec = read_spec(old, "float32")
    assert spec == read_spec(new, "float32")
    assert spec.ropes == (
        Rope(theta=1e6, rotary_dim=8, scaling=LinearScaling(factor=8.0)),
        Rope(theta=2e4, rotary_dim=8),
    )
    assert [layer.mixer.window for layer in spec.layers] == [16, 16, None, 16, 16, None, 16, 16]
    assert spec.tied and spec.embed_scale == 8.0 and spec.layers[0].mixer.scale == 1 / 16


def test_gemma_defaults_are_the_published_ones():
    spec = read_spec(GEMMA, "float32")
    assert [layer.mixer.window for layer in spec.layers].count(None) == 1 and spec.layers[5].mixer.window is None
    assert [rope.theta for rope in spec.ropes] == [1e6, 1e4]


def test_qwen_windows_begin_at_max_window_layers():
    spec = read_spec({**QWEN, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, "float32")
    assert [layer.mixer.window for layer in spec.layers] == [None, None, 4]
    off = read_spec({**QWEN, "sliding_window": 4, "max_window_layers": 2}, "float32")
    assert [layer.mixer.window for layer in off.layers] == [None] * 3
    assert off.layers[0].mixer.head_dim == 128


def test_mistral_has_a_window_unless_its_configuration_says_null():
    assert {layer.mixer.window for layer in read_spec(MISTRAL, "float32").layers} == {4096}
    assert {layer.mixer.window for layer in read_spec({**MISTRAL, "sliding_window": 7}, "float32").layers} == {7}
    assert {layer.mixer.window for layer in read_spec({**MISTRAL, "sliding_window": None}, "float32").layers} == {None}


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_calls_its_longrope_by_older_names(name):
    factors = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
    older = {**PHI, "original_max_position_embeddings": 64, "rope_scaling": {"type": name, **factors}}
    (rope,) = read_spec(older, "float32").ropes
    scaling = LongScaling(short=(1.0, 1.5, 2.0), long=(2.0, 3.0, 4.0), original_positions=64)
    assert rope.scaling == scaling
    assert rope.attention_factor == pytest.approx((1 + 1 / 3) ** 0.5)  # 256 is 4 times 64, and 64 is 4 ^ 3


def test_phi3_checkpoints_hold_joined_tensors():
    names = naming_of(read_spec(PHI, "float32")).names
    q, k, v = (f"layers.0.mixer.{part}.weight" for part in "qkv")
    assert names["model.layers.0.self_attn.qkv_proj.weight"] == (q, k, v)
    assert names["model.layers.0.mlp.gate_up_proj.weight"] == ("layers.0.ffn.gate.weight", "layers.0.ffn.up.weight")


def test_gemma2_has_caps_and_windows_unless_its_configuration_says_null():
    spec = read_spec(GEMMA2, "float32")
    assert (spec.logit_soft_cap, spec.layers[0].mixer.soft_cap, spec.tied) == (30.0, 50.0, True)
    assert [layer.mixer.window for layer in spec.layers] == [16, None] * 4
    null = {"final_logit_softcapping": None, "attn_logit_softcapping": None, "sliding_window": None}
    spec = read_spec({**GEMMA2, **null}, "float32")
    assert (spec.logit_soft_cap, spec.layers[0].mixer.soft_cap, spec.layers[0].mixer.window) == (None, None, None)


def test_granites_multipliers_are_1_where_they_are_left_out():
    spec = read_spec(GRANITE, "float32")
    layer = spec.layers[0]
    assert (spec.embed_scale, spec.logit_divisor, layer.residual.scale, layer.mixer.scale) == (1.0, 1.0, 1.0, 1.0)


def test_granite_swas_layers_have_a_theta_each_and_0_is_no_rope():
    count = {"num_hidden_layers": 6}
    spec = read_spec({**SWA, **count, "layer_rope_theta": [0, 1e4, 500, 0.0, 1e4, 0], "sliding_window": 5}, "float32")
    assert [layer.mixer.rope for layer in spec.layers] == [None, 1, 0, None, 1, None]
    assert [rope.theta for rope in spec.ropes] == [500.0, 1e4]
    assert [layer.mixer.window for layer in spec.layers] == [None, 5, 5, 5, None, 5]
    assert all(layer.mixer.sinks for layer in spec.layers) and spec.tied
    plain = read_spec({**SWA, **count, "rope_theta": 7e3}, "float32")
    assert [layer.mixer.rope for layer in plain.layers] == [0] * 6 and plain.ropes[0].theta == 7e3
    assert {layer.mixer.window for layer in plain.layers} == {None, 128}
    nowhere = read_spec({**SWA, **count, "layer_rope_theta": [0] * 6}, "float32")
    assert nowhere.ropes == () and {layer.mixer.rope for layer in nowhere.layers} == {None}


def test_qwen2_has_biases_on_q_k_and_v_alone():
    mixer = read_spec(QWEN2, "float32").layers[0].mixer
    assert (mixer.qkv_bias, mixer.out_bias, mixer.head_norm) == (True, False, None)


def test_frequencies_follow_the_definition():
    rope = Rope(theta=10000.0, rotary_dim=8)
    plain = [10000.0 ** (-2 * i / 8) for i in range(4)]
    assert torch.allclose(inverse_frequencies(rope), torch.tensor(plain))
    scaling = BandScaling(factor=8.0, low_factor=1.0, high_factor=4.0, original_positions=64)
    got = inverse_frequencies(Rope(theta=10000.0, rotary_dim=8, scaling=scaling)).tolist()
    for value, frequency in zip(got, plain, strict=True):
        turns = 64 * frequency / (2 * torch.pi)  # how often the angle goes round within the original context
        kept = min(1.0, max(0.0, (turns - 1.0) / 3.0))
        assert value == pytest.approx(frequency * (kept + (1 - kept) / 8), rel=1e-6)


def test_a_part_without_a_checkpoint_name_is_named():
    spec = read_spec({**LLAMA, "head_dim": 6}, "float32")
    layers = tuple(replace(layer, mixer=replace(layer.mixer, sinks=True)) for layer in spec.layers)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no checkpoint name for layers\.0\.mixer\.sinks"):
        naming_of(replace(spec, layers=layers))


REFUSED = [
    (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    (LLAMA, {"hidden_act": "relu"}, "hidden_act"),
    (LLAMA, {"vocab_size": None}, "vocab_size"),
    (LLAMA, {"num_attention_heads": 3}, "hidden_size 20 is no multiple of num_attention_heads 3"),
    (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads"),
    (LLAMA, {"rms_norm_eps": -1}, "rms_norm_eps"),
    (LLAMA, {"attention_bias": "yes"}, "attention_bias"),
    (LLAMA, {"head_dim": 5}, "even"),
    (LLAMA, {"head_dim": 6, "rope_scaling": {"type": "axial", "factor": 4}}, "rope_scaling.rope_type is 'axial'"),
    (LLAMA, {"head_dim": 6, "rope_scaling": {"type": "yarn", "truncate": 1}}, "rope_scaling.truncate"),
    (LLAMA, {"head_dim": 6, "rope_scaling": {"type": "yarn", "factor": 2, "rope_theta": 1}}, "rope_theta is 1"),
    (LLAMA, {"head_dim": 6, "rope_scaling": {"type": "dynamic"}}, "rope_scaling.factor"),
    (LLAMA, {"head_dim": 6, "rope_scaling": {"type": "dynamic", "factor": 0.5}}, "it must be 1 or more"),
    (LLAMA, {"head_dim": 6, "rope_scaling": {"type": "dynamic", "factor": 2, "alpha": 3}}, "rope_scaling.alpha"),
    (LLAMA, {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}}, "more than 2 elements"),
    (LLAMA, {"head_dim": 6, "rope_scaling": {"type": "longrope"}}, "lacks rope_scaling.short_factor"),
    (
        LLAMA,
        {"head_dim": 6, "rope_scaling": {"type": "longrope", "short_factor": [1] * 3, "long_factor": [1, -2, 3]}},
        "rope_scaling.long_factor is [1, -2, 3]; it must be a list of 3 positive numbers",
    ),
    (
        LLAMA,
        {"head_dim": 6, "rope_scaling": {"type": "longrope", "long_mscale": 1.2}},
        "rope_scaling.long_mscale is 1.2",
    ),
    (LLAMA, {"head_dim": 6, "rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
    (LLAMA, {"head_dim": 6, "rope_parameters": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor"),
    (QWEN, {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
    (QWEN, {"use_sliding_window": True, "layer_types": ["linear_attention"] * 3}, "'linear_attention'"),
    (MISTRAL, {"attention_bias": True}, "attention_bias"),
    (MISTRAL, {"mlp_bias": True}, "mlp_bias"),
    (MISTRAL, {"layer_types": ["full_attention"] * 3}, "layer_types"),
    (MISTRAL, {"sliding_window": "wide"}, "sliding_window"),
    (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (GEMMA2, {"attn_logit_softcapping": -1}, "attn_logit_softcapping"),
    (GEMMA2, {"hidden_activation": "relu2"}, "hidden_activation"),
    (OLMO, {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    (OLMO, {"mlp_bias": True}, "mlp_bias"),
    (OLMO, {"layer_types": ["full_attention"] * 3}, "layer_types"),
    (STARCODER, {"norm_epsilon": 0}, "norm_epsilon"),
    (STARCODER, {"use_bias": "no"}, "use_bias"),
    (STARCODER, {"norm_type": "rms_norm"}, "norm_type is 'rms_norm'; it must be layer_norm"),
    (STARCODER, {"mlp_type": "gated"}, "mlp_type"),
    (STARCODER, {"hidden_act": "relu"}, "hidden_act"),
    (SWA, {"layer_rope_theta": [0, 1e4]}, "layer_rope_theta"),
    (SWA, {"layer_rope_theta": [0, -1, 1e4]}, "layer_rope_theta is -1; it must be a positive number"),
    (SWA, {"layer_rope_theta": [False, 1e4, 1e4]}, "layer_rope_theta is False"),
    (SWA, {"sliding_window": None}, "lacks sliding_window"),
    (SWA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters has full_attention"),
    (GRANITE, {"layer_types": ["full_attention"] * 3}, "layer_types"),
    (GRANITE, {"logits_scaling": 0}, "logits_scaling is 0; it must be a positive number"),
    (GRANITE, {"residual_multiplier": "big"}, "residual_multiplier"),
    (PHI, {"attention_bias": True}, "attention_bias"),
    (PHI, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.rope_type is 'linear'"),
    (PHI, {"rope_scaling": {"type": "su", "short_factor": [1, 1]}}, "short_factor"),
    (QWEN2, {"mlp_bias": True}, "mlp_bias"),
    (QWEN2, {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
    (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (GEMMA, {"hidden_activation": "relu2"}, "hidden_activation"),
    (GEMMA, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
    (GEMMA, {"rope_scaling": {"rope_type": "proportional", "factor": 2}}, "rope_scaling.rope_type"),
    (GEMMA, {"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config"),
    (
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**GEMMA, "head_dim": "big"}},
        {},
        "text_config.head_dim",
    ),
    (LLAMA, {"architectures": []}, "architectures"),
    (LLAMA, {"architectures": ["LlamaForCausalLLM"]}, "the nearest is LlamaForCausalLM"),
    (LLAMA, {"architectures": ["Wav2Vec2Model"]}, "supported: LlamaForCausalLM"),
]


@pytest.mark.parametrize(("base", "change", "named"), REFUSED, ids=[named for _, _, named in REFUSED])
def test_refused_by_name(base, change, named):
    with pytest.raises(ModelError) as caught:
        read_spec({**base, **change}, "float32")
    assert named in str(caught.value)


@pytest.mark.parametrize("base", [{**LLAMA, "head_dim": 6}, {**QWEN, "head_dim": 6}, GEMMA])
@pytest.mark.parametrize(
    "key,value",
    [
        ("hidden_size", 10**12),
        ("hidden_size", float("inf")),
        ("hidden_size", float("nan")),
        ("intermediate_size", 10**400),
        ("vocab_size", 10**12),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 10**12),
        ("head_dim", 10**12),
        ("max_position_embeddings", 10**12),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", 10**400),
        ("rope_theta", float("nan")),
        ("bos_token_id", "first"),
        ("eos_token_id", [1, 10**12]),
    ],
)
def test_an_absurd_value_is_refused_by_its_name(base, key, value):
    with pytest.raises(ModelError, match=key):
        read_spec({**base, key: value}, "float32")


def test_a_value_of_another_kind_is_refused_by_its_name():
    for key, value in (("hidden_act", ["silu"]), ("partial_rotary_factor", 1e9)):
        with pytest.raises(ModelError, match=key if key == "hidden_act" else "would be rotated"):
            read_spec({**LLAMA, "head_dim": 6, key: value}, "float32")
    with pytest.raises(ModelError, match="layer_types"):
        read_spec({**QWEN, "use_sliding_window": True, "layer_types": 5}, "float32")
