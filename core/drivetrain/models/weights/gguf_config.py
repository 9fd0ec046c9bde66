"""The configuration that a GGUF file's metadata stands for, in Hugging Face's terms. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from drivetrain.errors import ModelError
from drivetrain.models.weights.gguf_file import GgufFile

FREQUENCIES = "rope_freqs.weight"
CONTEXT = "original_max_position_embeddings"
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, CONTEXT: 8192}
LLAMA3_FACTORS = (8.0, 32.0)
GEMMA_27B_LAYERS = 62  # the one size whose query scale is hidden / heads; the format leaves that implied
ARCHITECTURES = {"gemma3": "Gemma3ForCausalLM", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the Hugging Face style configuration that the file's metadata stands for. ModelError names what lacks."""
    try:
        return _config_of(file)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(
            f"{file.path.name} has metadata of the wrong type or size: {error}", fix="convert the model again"
        ) from error


def _config_of(file: GgufFile) -> dict[str, Any]:
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
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
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
        if FREQUENCIES in file.tensors:
            config["rope_scaling"] = _frequency_rule(config, file)
        return
    if kind != "linear":
        raise ModelError(f"{file.path.name} has rope scaling {kind!r}", fix="linear is supported from GGUF")
    config["rope_scaling"] = {"rope_type": "linear", "factor": float(meta[f"{arch}.rope.scaling.factor"])}


def _frequency_rule(config: Mapping[str, Any], file: GgufFile) -> dict[str, Any]:
    """Llama 3.x: the format stores what each rotary frequency is divided by, not the rule. Find the published rule
    that gives these numbers."""
    tensor = file.tensors[FREQUENCIES]
    size = int(config["head_dim"])
    if tensor.kind == 0 and tensor.shape == (size // 2,):
        stored = file.bytes_of(tensor).view("<f4").reshape(-1).astype(np.float64)
        for factor in LLAMA3_FACTORS:
            if np.allclose(stored, llama3_divisors(size, float(config["rope_theta"]), factor), rtol=1e-4, atol=0.0):
                return dict(LLAMA3, factor=factor)
    raise ModelError(
        f"{file.path.name} scales rotary frequencies ({FREQUENCIES}) by no published Llama 3 rule",
        fix="use the safetensors checkpoint",
    )


def llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """What Llama 3's rule divides each of the head_dim / 2 frequencies by: 1 for short wavelengths, ``factor`` for
    long ones, and in between the reciprocal of a straight line."""
    low, high, context = (float(LLAMA3[key]) for key in ("low_freq_factor", "high_freq_factor", CONTEXT))
    turns = context * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)  # over the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _gemma(config: dict[str, Any], meta: Mapping[str, Any]) -> None:
    """Fill what the format leaves implied: five sliding layers to one full, a local theta of 10,000."""
    layers = range(config["num_hidden_layers"])
    config["sliding_window"] = int(meta.get("gemma3.attention.sliding_window", 0)) or None
    config["layer_types"] = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in layers]
    config["rope_local_base_freq"] = 10000.0
    config["hidden_activation"] = "gelu_pytorch_tanh"
    large = config["num_hidden_layers"] == GEMMA_27B_LAYERS
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    )
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if f"gemma3.{name}" in meta:
            config[name] = float(meta[f"gemma3.{name}"])
