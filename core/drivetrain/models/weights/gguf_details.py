"""What each GGUF architecture says in keys of its own, or leaves implied, in Hugging Face's terms. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from drivetrain.errors import ModelError
from drivetrain.models.weights.gguf_file import GgufFile

Config = dict[str, Any]
# Architectures whose norms' epsilon stands under another key.
EPSILONS = {"starcoder2": "attention.layer_norm_epsilon"}
# The one size of each family whose query scale is hidden / heads; the format leaves that implied.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _gemma(config: Config, meta: Mapping[str, Any], arch: str) -> None:
    """Windows, the scale of queries, and caps, of either Gemma."""
    config["sliding_window"] = int(meta.get(f"{arch}.attention.sliding_window", 0)) or None
    config["hidden_activation"] = "gelu_pytorch_tanh"
    large = config["num_hidden_layers"] == GEMMA_27B_LAYERS[arch]
    shared = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = shared if large else config["head_dim"]
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if f"{arch}.{name}" in meta:
            config[name] = float(meta[f"{arch}.{name}"])


def _gemma2(config: Config, meta: Mapping[str, Any], file: GgufFile) -> None:
    _gemma(config, meta, "gemma2")


def _gemma3(config: Config, meta: Mapping[str, Any], file: GgufFile) -> None:
    """Implied: five sliding layers to one full, a local theta of 10,000."""
    _gemma(config, meta, "gemma3")
    layers = range(config["num_hidden_layers"])
    config["layer_types"] = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in layers]
    config["rope_local_base_freq"] = 10000.0


def _granite(config: Config, meta: Mapping[str, Any], file: GgufFile) -> None:
    """Multipliers; where the one of attention is left out the format means 1 / sqrt(head_dim)."""
    config["attention_multiplier"] = config["head_dim"] ** -0.5
    for key, name in MULTIPLIERS.items():
        if f"granite.{key}" in meta:
            config[name] = float(np.float32(meta[f"granite.{key}"]).astype(str))


def _llama(config: Config, meta: Mapping[str, Any], file: GgufFile) -> None:
    """Mistral goes by the same architecture; a window makes the difference."""
    window = int(meta.get("llama.attention.sliding_window", 0))
    if window:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def _olmo2(config: Config, meta: Mapping[str, Any], file: GgufFile) -> None:
    """The next OLMo goes by the same architecture; it has windows."""
    if meta.get("olmo2.attention.sliding_window"):
        raise ModelError(
            f"{file.path.name} has olmo2.attention.sliding_window: it is an OLMo 3", fix="OLMo 2 is supported"
        )


def _phi3(config: Config, meta: Mapping[str, Any], file: GgufFile) -> None:
    """A window of 0 is none; without a first length the model has one only."""
    config["sliding_window"] = int(meta.get("phi3.attention.sliding_window", 0)) or None
    trained = meta.get("phi3.rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = int(trained)


def _starcoder2(config: Config, meta: Mapping[str, Any], file: GgufFile) -> None:
    """Converters leave the window out; then there is none, as the format's own readers have it."""
    config["norm_epsilon"] = config.pop("rms_norm_eps")
    config["use_bias"] = config.pop("attention_bias")
    if config.pop("mlp_bias") != config["use_bias"]:
        raise ModelError(f"{file.path.name} has biases in some linears only", fix="convert the model again")
    config["sliding_window"] = int(meta.get("starcoder2.attention.sliding_window", 0)) or None
    config["hidden_act"] = "gelu_pytorch_tanh"


DETAILS: dict[str, Callable[[Config, Mapping[str, Any], GgufFile], None]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "granite": _granite,
    "llama": _llama,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "starcoder2": _starcoder2,
}
