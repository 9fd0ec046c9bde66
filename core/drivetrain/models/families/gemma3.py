"""Gemma 3, text: norms before and after each branch, windows in most layers, a rope of their own for those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.errors import ModelError
from drivetrain.models.families.config import Fields, check_heads, sliding_layers
from drivetrain.models.families.llama import TABLE as LLAMA_TABLE
from drivetrain.models.families.ropes import rope_of
from drivetrain.models.naming import Naming, named
from drivetrain.models.spec import AttentionMixer, GatedMlp, LayerSpec, ModelSpec, RmsNorm, Rope

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
FULL, SLIDING = 0, 1  # the ropes' indices
TABLE = LLAMA_TABLE | {
    "post_mixer_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}


def spec(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Read a Gemma 3 configuration, of the text model or of the text part of the model with vision.

    ModelError naming the key that is missing or not supported.
    """
    outer, within = Fields(config), ""
    architecture = next(name for name in config["architectures"] if name in ARCHITECTURES)
    if architecture == "Gemma3ForConditionalGeneration":
        if not isinstance(config.get("text_config"), Mapping):
            raise ModelError("the configuration lacks text_config")
        config, within = config["text_config"], "text_config."
    fields = Fields(config, within=within)
    fields.refuse("use_bidirectional_attention", "only causal attention is served")
    hidden, head_dim = fields.whole("hidden_size", 2304), fields.whole("head_dim", 256)
    norm = RmsNorm(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0)
    return ModelSpec(
        architecture=architecture,
        dtype=dtype,
        cache_dtype=dtype,
        vocabulary=fields.whole("vocab_size", 262208),
        hidden=hidden,
        max_positions=fields.whole("max_position_embeddings", 131072),
        layers=_layers(fields, norm, head_dim),
        ropes=_ropes(fields, head_dim),
        final_norm=norm,
        tied=fields.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", True)),
        embed_scale=hidden**0.5,
        logit_soft_cap=fields.maybe_number("final_logit_softcapping"),
        bos_id=next(iter(fields.token_ids("bos_token_id") or outer.token_ids("bos_token_id")), None),
        eos_ids=outer.token_ids("eos_token_id") or fields.token_ids("eos_token_id"),
    )


def naming(spec: ModelSpec) -> Naming:
    """Name the parameters as Hugging Face checkpoints do; the model with vision nests the text model, in two ways."""
    return Naming(
        names=named(spec, TABLE),
        prefixes=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        ignored=(
            "vision_tower.",
            "multi_modal_projector.",
            "model.vision_tower.",
            "model.multi_modal_projector.",
            ".rotary_emb.inv_freq",
        ),
    )


def _layers(fields: Fields, norm: RmsNorm, head_dim: int) -> tuple[LayerSpec, ...]:
    kinds = sliding_layers(fields, fields.whole("num_hidden_layers", 26), every=6)
    window = fields.whole("sliding_window", 4096) if any(kinds) else None
    places = [(window, SLIDING) if sliding else (None, FULL) for sliding in kinds]
    return layers(fields, norm, head_dim, places, head_norm=norm)


def layers(
    fields: Fields,
    norm: RmsNorm,
    head_dim: int,
    places: Sequence[tuple[int | None, int]],
    head_norm: RmsNorm | None = None,
) -> tuple[LayerSpec, ...]:
    """Return Gemma's layers of four norms. ``places``: (window, index of its rope) of each."""
    heads, kv_heads = fields.whole("num_attention_heads", 8), fields.whole("num_key_value_heads", 4)
    check_heads(heads, kv_heads)
    bias = fields.flag("attention_bias")
    ffn = GatedMlp(
        intermediate=fields.whole("intermediate_size", 9216),
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
    )

    def layer(window: int | None, rope: int) -> LayerSpec:
        mixer = AttentionMixer(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
            rope=rope,
            window=window,
            soft_cap=fields.maybe_number("attn_logit_softcapping"),
            head_norm=head_norm,
            qkv_bias=bias,
            out_bias=bias,
        )
        return LayerSpec(mixer=mixer, ffn=ffn, mixer_norm=norm, post_mixer_norm=norm, ffn_norm=norm, post_ffn_norm=norm)

    return tuple(layer(window, rope) for window, rope in places)


def _ropes(fields: Fields, head_dim: int) -> tuple[Rope, Rope]:
    """(full, sliding). Older configurations scale the full layers' rope only."""
    given = fields.raw("rope_parameters") or {}
    if given:
        if not isinstance(given, Mapping) or not set(given) & {"full_attention", "sliding_attention"}:
            raise fields.wrong("rope_parameters", "an object with full_attention and sliding_attention")
        full, sliding = given.get("full_attention") or {}, given.get("sliding_attention") or {}
    else:
        full, sliding = fields.raw("rope_scaling") or {}, {}
    key = "rope_parameters.full_attention" if given else "rope_scaling"
    local = {"rope_theta": fields.number("rope_local_base_freq", 10000.0), **sliding}
    return (
        rope_of(full, fields, key=key, head_dim=head_dim, theta=1000000.0),
        rope_of(local, fields, key="rope_parameters.sliding_attention", head_dim=head_dim),
    )
