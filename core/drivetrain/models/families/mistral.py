"""Mistral: Llama's shape with one window for all layers, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.models.families import llama
from drivetrain.models.families.config import Fields
from drivetrain.models.naming import Naming
from drivetrain.models.spec import ModelSpec

ARCHITECTURES = ("MistralForCausalLM",)
# What a configuration has where it leaves the key out; a window of null is no window.
DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}


def spec(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Read a Mistral configuration. ModelError naming the key that is missing or not supported."""
    fields = Fields({**DEFAULTS, **config})
    fields.refuse("attention_bias", "the family's attention has no biases")
    fields.refuse("mlp_bias", "the family's feed-forward has no biases")
    fields.refuse("layer_types", "all layers of the family have the same window")
    window = fields.whole("sliding_window") if fields.has("sliding_window") else None
    windows = (window,) * fields.whole("num_hidden_layers")
    return llama.decoder(fields, dtype, architecture="MistralForCausalLM", windows=windows, biases=llama.Biases())


def naming(spec: ModelSpec) -> Naming:
    """Name the parameters as Hugging Face checkpoints do."""
    return llama.naming(spec)
