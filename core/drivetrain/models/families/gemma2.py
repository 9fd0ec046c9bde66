"""Gemma 2: Gemma 3's four norms without those of the heads, windows in every other layer, caps on scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.models.families.config import Fields, sliding_layers
from drivetrain.models.families.gemma3 import TABLE, layers
from drivetrain.models.families.ropes import read_rope
from drivetrain.models.naming import Naming, named
from drivetrain.models.spec import LayerSpec, ModelSpec, RmsNorm

ARCHITECTURES = ("Gemma2ForCausalLM",)
# What a configuration has where it leaves the key out; null is no cap and no window.
DEFAULTS = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "sliding_window": 4096}


def spec(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Read a Gemma 2 configuration. ModelError naming the key that is missing or not supported."""
    fields = Fields({**DEFAULTS, **config})
    fields.refuse("use_bidirectional_attention", "only causal attention is served")
    hidden, head_dim = fields.whole("hidden_size", 2304), fields.whole("head_dim", 256)
    norm = RmsNorm(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0)
    return ModelSpec(
        architecture="Gemma2ForCausalLM",
        dtype=dtype,
        cache_dtype=dtype,
        vocabulary=fields.whole("vocab_size", 256000),
        hidden=hidden,
        max_positions=fields.whole("max_position_embeddings", 8192),
        layers=_layers(fields, norm, head_dim),
        ropes=(read_rope(fields, head_dim),),
        final_norm=norm,
        tied=fields.flag("tie_word_embeddings", True),
        embed_scale=hidden**0.5,
        logit_soft_cap=fields.maybe_number("final_logit_softcapping"),
        bos_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_ids=fields.token_ids("eos_token_id"),
    )


def naming(spec: ModelSpec) -> Naming:
    """Name the parameters as Hugging Face checkpoints do."""
    return Naming(names=named(spec, TABLE), ignored=(".rotary_emb.inv_freq",))


def _layers(fields: Fields, norm: RmsNorm, head_dim: int) -> tuple[LayerSpec, ...]:
    window = fields.whole("sliding_window") if fields.has("sliding_window") else None
    kinds = sliding_layers(fields, fields.whole("num_hidden_layers", 26), every=2)
    return layers(fields, norm, head_dim, [(window if sliding else None, 0) for sliding in kinds])
