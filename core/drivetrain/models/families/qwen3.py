"""Qwen3, dense: Llama's shape with norms on the heads of q and k, and optional windows in the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.models.families import llama
from drivetrain.models.families.config import Fields, upper_windows
from drivetrain.models.naming import Naming
from drivetrain.models.spec import ModelSpec

ARCHITECTURES = ("Qwen3ForCausalLM",)


def spec(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Read a Qwen3 configuration. ModelError naming the key that is missing or not supported."""
    # Unlike Llama's, the head size is a value of its own, 128 where a configuration leaves it out.
    fields = Fields({"head_dim": 128, **{key: value for key, value in config.items() if value is not None}})
    return llama.decoder(
        fields,
        dtype,
        architecture="Qwen3ForCausalLM",
        windows=upper_windows(fields),
        biases=llama.attention_biases(fields),
        head_norms=True,
    )


def naming(spec: ModelSpec) -> Naming:
    """Name the parameters as Hugging Face checkpoints do."""
    return llama.naming(spec)
