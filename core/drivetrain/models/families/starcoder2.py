"""StarCoder 2: layer norms, a feed-forward without a gate, biases everywhere, and one window for all layers or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.models.families import llama
from drivetrain.models.families.config import Fields, check_heads, head_dim_of
from drivetrain.models.families.ropes import read_rope
from drivetrain.models.naming import Naming, named
from drivetrain.models.spec import AttentionMixer, LayerNorm, LayerSpec, ModelSpec, PlainMlp

ARCHITECTURES = ("Starcoder2ForCausalLM",)
TABLE = llama.TABLE | {"ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"}


def spec(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Read a StarCoder 2 configuration. ModelError naming the key that is missing or not supported."""
    fields = Fields(config)
    fields.refuse("layer_types", "all layers of the family have the same window")
    for key, served in (("norm_type", "layer_norm"), ("mlp_type", "default")):
        if fields.has(key) and fields.raw(key) != served:
            raise fields.wrong(key, served)
    hidden, heads = fields.whole("hidden_size", 3072), fields.whole("num_attention_heads", 24)
    head_dim = head_dim_of(fields, hidden, heads)
    norm = LayerNorm(eps=fields.number("norm_epsilon", 1e-5))
    layer = LayerSpec(
        mixer=_attention(fields, heads, head_dim),
        ffn=PlainMlp(
            intermediate=fields.whole("intermediate_size", 12288),
            activation=fields.activation("hidden_act", "gelu_pytorch_tanh"),
            bias=fields.flag("use_bias", True),
        ),
        mixer_norm=norm,
        ffn_norm=norm,
    )
    return ModelSpec(
        architecture="Starcoder2ForCausalLM",
        dtype=dtype,
        cache_dtype=dtype,
        vocabulary=fields.whole("vocab_size", 49152),
        hidden=hidden,
        max_positions=fields.whole("max_position_embeddings", 4096),
        layers=(layer,) * fields.whole("num_hidden_layers", 30),
        ropes=(read_rope(fields, head_dim),),
        final_norm=norm,
        tied=fields.flag("tie_word_embeddings", True),
        bos_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_ids=fields.token_ids("eos_token_id"),
    )


def naming(spec: ModelSpec) -> Naming:
    """Name the parameters as Hugging Face checkpoints do."""
    return Naming(names=named(spec, TABLE), ignored=(".rotary_emb.inv_freq",))


def _attention(fields: Fields, heads: int, head_dim: int) -> AttentionMixer:
    kv_heads = fields.whole("num_key_value_heads", 2)
    check_heads(heads, kv_heads)
    bias = fields.flag("use_bias", True)
    return AttentionMixer(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scale=head_dim**-0.5,
        window=fields.whole("sliding_window") if fields.has("sliding_window") else None,
        qkv_bias=bias,
        out_bias=bias,
    )
