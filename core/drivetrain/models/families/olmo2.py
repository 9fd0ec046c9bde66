"""OLMo 2: Llama's shape with norms after the branches instead of before, and norms over all heads of q and of k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drivetrain.models.families import llama
from drivetrain.models.families.config import Fields
from drivetrain.models.naming import Naming, named
from drivetrain.models.spec import AttentionMixer, LayerSpec, ModelSpec, RmsNorm

ARCHITECTURES = ("Olmo2ForCausalLM",)
DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
TABLE = llama.TABLE | {
    "post_mixer_norm": "post_attention_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}


def spec(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Read an OLMo 2 configuration. ModelError naming the key that is missing or not supported."""
    fields = Fields({**DEFAULTS, **config})
    fields.refuse("mlp_bias", "the family's feed-forward has no biases")
    fields.refuse("clip_qkv", "q, k and v are not clipped")
    fields.refuse("layer_types", "all layers of the family attend to everything")
    model = llama.decoder(
        fields,
        dtype,
        architecture="Olmo2ForCausalLM",
        windows=(None,) * fields.whole("num_hidden_layers"),
        biases=llama.attention_biases(fields),
    )
    norm = RmsNorm(eps=fields.number("rms_norm_eps"))

    def layer(given: LayerSpec) -> LayerSpec:
        assert isinstance(given.mixer, AttentionMixer)
        mixer = replace(given.mixer, whole_norm=norm)
        return LayerSpec(
            mixer=mixer, ffn=given.ffn, mixer_norm=None, ffn_norm=None, post_mixer_norm=norm, post_ffn_norm=norm
        )

    return replace(model, layers=tuple(layer(each) for each in model.layers), final_norm=norm)


def naming(spec: ModelSpec) -> Naming:
    """Name the parameters as Hugging Face checkpoints do."""
    return Naming(names=named(spec, TABLE), ignored=(".rotary_emb.inv_freq",))
