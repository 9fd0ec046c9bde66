"""Granite 3: Llama's shape with multipliers of the embedding, of attention's scores, of branches and of the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drivetrain.models.families import llama
from drivetrain.models.families.config import Fields
from drivetrain.models.naming import Naming
from drivetrain.models.spec import AttentionMixer, LayerSpec, ModelSpec, Residual

ARCHITECTURES = ("GraniteForCausalLM",)


def spec(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Read a Granite configuration. ModelError naming the key that is missing or not supported."""
    fields = Fields({"max_position_embeddings": 2048, **config})
    fields.refuse("layer_types", "all layers of the family attend to everything")
    return multiplied(
        llama.decoder(
            fields,
            dtype,
            architecture="GraniteForCausalLM",
            windows=(None,) * fields.whole("num_hidden_layers"),
            biases=llama.attention_biases(fields, mlp=fields.flag("mlp_bias")),
        ),
        fields,
    )


def naming(spec: ModelSpec) -> Naming:
    """Name the parameters as Hugging Face checkpoints do."""
    return llama.naming(spec)


def multiplied(model: ModelSpec, fields: Fields) -> ModelSpec:
    """The model with the configuration's multipliers, each 1 where it is left out."""
    scale = fields.number("attention_multiplier", 1.0)
    residual = Residual(kind="scaled", scale=fields.number("residual_multiplier", 1.0))

    def layer(given: LayerSpec) -> LayerSpec:
        assert isinstance(given.mixer, AttentionMixer)
        return replace(given, mixer=replace(given.mixer, scale=scale), residual=residual)

    return replace(
        model,
        layers=tuple(layer(each) for each in model.layers),
        embed_scale=fields.number("embedding_multiplier", 1.0),
        logit_divisor=fields.number("logits_scaling", 1.0),
    )
