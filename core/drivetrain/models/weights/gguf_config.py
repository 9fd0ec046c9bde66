"""The configuration that a GGUF file's metadata stands for, in Hugging Face's terms. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from drivetrain.errors import ModelError
from drivetrain.models.weights.gguf_file import GgufFile

ARCHITECTURES = {"gemma3": "Gemma3ForCausalLM", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the Hugging Face style configuration that the file's metadata stands for. ModelError names what lacks."""
    meta = file.metadata
    arch = str(meta.get("general.architecture"))
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{file.path.name} is of the GGUF architecture {arch!r}",
            fix=f"supported: {', '.join(sorted(ARCHITECTURES))}",
        )

    def need(key: str) -> Any:
        if f"{arch}.{key}" not in meta:
            raise ModelError(f"{file.path.name} lacks the metadata {arch}.{key}", fix="convert the model again")
        return meta[f"{arch}.{key}"]

    heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": {"gemma3": "gemma3_text"}.get(arch, arch),
        "hidden_size": hidden,
        "num_hidden_layers": int(need("block_count")),
        "intermediate_size": int(need("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get(f"{arch}.attention.head_count_kv", heads)),
        "head_dim": int(meta.get(f"{arch}.attention.key_length", hidden // heads)),
        "rms_norm_eps": float(np.float32(need("attention.layer_norm_rms_epsilon")).astype(str)),
        "max_position_embeddings": int(need("context_length")),
        "rope_theta": float(meta.get(f"{arch}.rope.freq_base", 10000.0)),
        "vocab_size": len(meta.get("tokenizer.ggml.tokens", ())) or int(need("vocab_size")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16" if arch == "gemma3" else "float16",
    }
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        if f"tokenizer.ggml.{key}_token_id" in meta:
            config[name] = int(meta[f"tokenizer.ggml.{key}_token_id"])
    _rope_scaling(config, meta, arch, file)
    if arch == "gemma3":
        _gemma(config, meta)
    return config


def _rope_scaling(config: dict[str, Any], meta: Mapping[str, Any], arch: str, file: GgufFile) -> None:
    kind = meta.get(f"{arch}.rope.scaling.type")
    if kind in (None, "none"):
        if "rope_freqs.weight" in file.tensors:
            raise ModelError(
                f"{file.path.name} scales rotary frequencies by a tensor (rope_freqs)",
                fix="use the safetensors checkpoint",
            )
        return
    if kind != "linear":
        raise ModelError(f"{file.path.name} has rope scaling {kind!r}", fix="linear is supported from GGUF")
    config["rope_scaling"] = {"rope_type": "linear", "factor": float(meta[f"{arch}.rope.scaling.factor"])}


def _gemma(config: dict[str, Any], meta: Mapping[str, Any]) -> None:
    """Fill what the format leaves implied: five sliding layers to one full, a local theta of 10,000."""
    layers = range(config["num_hidden_layers"])
    config["sliding_window"] = int(meta.get("gemma3.attention.sliding_window", 0)) or None
    config["layer_types"] = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in layers]
    config["rope_local_base_freq"] = 10000.0
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["query_pre_attn_scalar"] = config["head_dim"]
