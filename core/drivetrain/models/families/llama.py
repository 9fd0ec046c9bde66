"""Llama 2 and 3.x: pre-norms, grouped-query attention, gated SiLU; and what decoders of that shape share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from drivetrain.models.families.config import Fields, check_heads, head_dim_of
from drivetrain.models.families.ropes import read_rope
from drivetrain.models.naming import Naming, named
from drivetrain.models.spec import AttentionMixer, GatedMlp, LayerSpec, ModelSpec, RmsNorm

ARCHITECTURES = ("LlamaForCausalLM",)
TABLE = {
    "mixer_norm": "input_layernorm",
    "mixer.q": "self_attn.q_proj",
    "mixer.k": "self_attn.k_proj",
    "mixer.v": "self_attn.v_proj",
    "mixer.q_norm": "self_attn.q_norm",
    "mixer.k_norm": "self_attn.k_norm",
    "mixer.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


class Biases(NamedTuple):
    """Which linears have one."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


def attention_biases(fields: Fields, *, mlp: bool = False) -> Biases:
    """All of attention's as ``attention_bias`` says."""
    bias = fields.flag("attention_bias")
    return Biases(qkv=bias, out=bias, mlp=mlp)


def spec(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Read a Llama configuration. ModelError naming the key that is missing or not supported."""
    fields = Fields(config)
    count = fields.whole("num_hidden_layers")
    return decoder(
        fields,
        dtype,
        architecture="LlamaForCausalLM",
        windows=(None,) * count,
        biases=attention_biases(fields, mlp=fields.flag("mlp_bias")),
    )


def naming(spec: ModelSpec) -> Naming:
    """Name the parameters as Hugging Face checkpoints do."""
    return Naming(names=named(spec, TABLE), ignored=(".rotary_emb.inv_freq",))


def decoder(
    fields: Fields,
    dtype: str,
    *,
    architecture: str,
    windows: tuple[int | None, ...],
    biases: Biases,
    head_norms: bool = False,
) -> ModelSpec:
    """A pre-norm decoder. ``windows``: one a layer, None for full attention; ``head_norms``: norms on q's and k's
    heads."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", heads)
    check_heads(heads, kv_heads)
    head_dim = head_dim_of(fields, hidden, heads)
    norm = RmsNorm(eps=fields.number("rms_norm_eps", 1e-6), round_before_weight=True)
    ffn = GatedMlp(
        intermediate=fields.whole("intermediate_size"),
        activation=fields.activation("hidden_act", "silu"),
        bias=biases.mlp,
    )

    def layer(window: int | None) -> LayerSpec:
        mixer = AttentionMixer(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            scale=head_dim**-0.5,
            window=window,
            head_norm=norm if head_norms else None,
            qkv_bias=biases.qkv,
            out_bias=biases.out,
        )
        return LayerSpec(mixer=mixer, ffn=ffn, mixer_norm=norm, ffn_norm=norm)

    return ModelSpec(
        architecture=architecture,
        dtype=dtype,
        cache_dtype=dtype,
        vocabulary=fields.whole("vocab_size"),
        hidden=hidden,
        max_positions=fields.whole("max_position_embeddings"),
        layers=tuple(layer(window) for window in windows),
        ropes=(read_rope(fields, head_dim),),
        final_norm=norm,
        tied=fields.flag("tie_word_embeddings"),
        bos_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_ids=fields.token_ids("eos_token_id"),
    )
