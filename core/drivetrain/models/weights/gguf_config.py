"""The configuration that a GGUF file's metadata stands for, in Hugging Face's terms. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from drivetrain.errors import ModelError
from drivetrain.models.weights.gguf_details import DETAILS, EPSILONS
from drivetrain.models.weights.gguf_file import GgufFile

FREQUENCIES = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
CONTEXT = "original_max_position_embeddings"
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, CONTEXT: 8192}
LLAMA3_FACTORS = (8.0, 32.0)
EPSILON = "attention.layer_norm_rms_epsilon"
ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}


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
        "rms_norm_eps": float(np.float32(need(EPSILONS.get(arch, EPSILON))).astype(str)),
        "max_position_embeddings": int(need("context_length")),
        "rope_theta": float(meta.get(f"{arch}.rope.freq_base", 10000.0)),
        "vocab_size": len(meta.get("tokenizer.ggml.tokens", ())) or int(need("vocab_size")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16" if arch.startswith("gemma") else "float16",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        if f"tokenizer.ggml.{key}_token_id" in meta:
            config[name] = int(meta[f"tokenizer.ggml.{key}_token_id"])
    _rope_scaling(config, meta, arch, file)
    rotated = int(meta.get(f"{arch}.rope.dimension_count", config["head_dim"]))
    if rotated != config["head_dim"]:
        config["partial_rotary_factor"] = (rotated + 0.25) / config["head_dim"]  # whole elements, whatever is rounded
    if arch in DETAILS:
        DETAILS[arch](config, meta, file)
    return config


def _rope_scaling(config: dict[str, Any], meta: Mapping[str, Any], arch: str, file: GgufFile) -> None:
    begin = f"{arch}.rope.scaling."
    kind = meta.get(f"{begin}type")
    if LONG in file.tensors or kind == "longrope":
        config["rope_scaling"] = _long_factors(meta, begin, file)
    elif kind in (None, "none"):
        if FREQUENCIES in file.tensors:
            config["rope_scaling"] = _frequency_rule(config, file)
    elif kind == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": _factor(meta, begin, file)}
    elif kind == "yarn":
        config["rope_scaling"] = _yarn(meta, begin, file)
    else:
        raise ModelError(f"{file.path.name} has rope scaling {kind!r}", fix="linear, yarn and longrope are supported")


def _factor(meta: Mapping[str, Any], begin: str, file: GgufFile) -> float:
    if f"{begin}factor" not in meta:
        raise ModelError(f"{file.path.name} lacks the metadata {begin}factor", fix="convert the model again")
    return float(meta[f"{begin}factor"])


def _yarn(meta: Mapping[str, Any], begin: str, file: GgufFile) -> dict[str, Any]:
    for key, plain in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_log_multiplier", 0.1)):
        if float(meta.get(begin + key, plain)) != plain:
            raise ModelError(
                f"{file.path.name} has {begin}{key} {meta[begin + key]}", fix="use the safetensors checkpoint"
            )
    rule: dict[str, Any] = {"rope_type": "yarn", "factor": _factor(meta, begin, file)}
    if f"{begin}original_context_length" in meta:
        rule[CONTEXT] = int(meta[f"{begin}original_context_length"])
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if begin + key in meta:
            rule[name] = float(meta[begin + key])
    return rule


def _long_factors(meta: Mapping[str, Any], begin: str, file: GgufFile) -> dict[str, Any]:
    """A longrope: the format keeps what each frequency is divided by in two tensors."""
    if LONG not in file.tensors or SHORT not in file.tensors:
        raise ModelError(f"{file.path.name} lacks {SHORT} or {LONG}", fix="convert the model again")
    rule: dict[str, Any] = {"rope_type": "longrope"}
    for key, name in (("short_factor", SHORT), ("long_factor", LONG)):
        tensor = file.tensors[name]
        if tensor.kind != 0 or len(tensor.shape) != 1:
            raise ModelError(f"{file.path.name}: {name} is no list of float32", fix="convert the model again")
        rule[key] = [float(value) for value in file.bytes_of(tensor).view("<f4").reshape(-1)]
    if f"{begin}original_context_length" in meta:
        rule[CONTEXT] = int(meta[f"{begin}original_context_length"])
    if f"{begin}attn_factor" in meta:
        rule["attention_factor"] = float(meta[f"{begin}attn_factor"])
    return rule


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
