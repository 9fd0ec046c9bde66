"""Qwen3, dense: Llama's shape with norms on the heads of q and k, and optional windows in the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.models.families import llama
from drivetrain.models.families.config import Fields
from drivetrain.models.naming import Naming
from drivetrain.models.spec import ModelSpec

ARCHITECTURES = ("Qwen3ForCausalLM",)


def spec(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Read a Qwen3 configuration. ModelError naming the key that is missing or not supported."""
    # Unlike Llama's, the head size is a value of its own, 128 where a configuration leaves it out.
    fields = Fields({"head_dim": 128, **{key: value for key, value in config.items() if value is not None}})
    return llama.decoder(fields, dtype, architecture="Qwen3ForCausalLM", windows=_windows(fields), head_norms=True)


def naming(spec: ModelSpec) -> Naming:
    """Name the parameters as Hugging Face checkpoints do."""
    return llama.naming(spec)


def _windows(fields: Fields) -> tuple[int | None, ...]:
    count = fields.whole("num_hidden_layers")
    if not fields.flag("use_sliding_window"):
        return (None,) * count
    window = fields.whole("sliding_window", 4096)
    types = fields.layer_types(count)
    if types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = fields.whole("max_window_layers", 28) if fields.raw("max_window_layers") != 0 else 0
    return tuple(window if layer >= first else None for layer in range(count))
