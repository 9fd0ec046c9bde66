"""Qwen2 and Qwen2.5, dense: Llama's shape with biases on q, k and v alone, and optional windows in the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.models.families import llama
from drivetrain.models.families.config import Fields, upper_windows
from drivetrain.models.naming import Naming
from drivetrain.models.spec import ModelSpec

ARCHITECTURES = ("Qwen2ForCausalLM",)


def spec(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Read a Qwen2 configuration. ModelError naming the key that is missing or not supported."""
    fields = Fields({"max_position_embeddings": 32768, "num_key_value_heads": 32, **config})
    fields.refuse("mlp_bias", "the family's feed-forward has no biases")
    return llama.decoder(
        fields,
        dtype,
        architecture="Qwen2ForCausalLM",
        windows=upper_windows(fields),
        biases=llama.Biases(qkv=True),
    )


def naming(spec: ModelSpec) -> Naming:
    """Name the parameters as Hugging Face checkpoints do."""
    return llama.naming(spec)
