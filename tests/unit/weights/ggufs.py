"""Small GGUF files, written by the ``gguf`` package from tiny Transformers models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.checkpoints import FAMILIES, randomize

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OWN = {
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "olmo2": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
}
PAIRED = ("granite", "llama", "mistral")
OFFSET = ("gemma2", "gemma3")
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
FLOATS = ("F32", "F16", "BF16")
ARCHITECTURES = {name: name for name in ("llama", "qwen2", "qwen3", "granite", *OWN)} | {"mistral": "llama"}


def stored_name(name: str, family: str) -> str:
    """The format's name of a Hugging Face tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    table = {**LAYER, **OWN.get(family, {})}
    return f"blk.{layer}.{table[part]}.{kind}"


def stored_value(name: str, value: np.ndarray, family: str, config: Any) -> np.ndarray:
    """As converters store it: Gemma's norms with the 1 added, Llama's q and k rows in pairs."""
    if family in OFFSET and name.endswith("norm.weight"):
        return value + 1
    if family in PAIRED and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    return value


def tiny_gguf(
    family: str,
    path: Path,
    *,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    tokens: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> dict[str, torch.Tensor]:
    """Write a file; return the tensors that it stands for, by Hugging Face name.

    ``kinds``: beginnings of stored names -> type; what is not named is F32. ``tokens``: see ``add_tokens``.
    ``metadata``: more keys with int, float, bool or str values, without the architecture in front.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**fields, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, 0, norms_around=0.0 if family in OFFSET else 1.0)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    _describe(writer, family, config)
    add_tokens(writer, tokens or plain_tokens(config.vocab_size))
    for key, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, str: writer.add_string}
        add[type(value)](f"{ARCHITECTURES[family]}.{key}", value)
    truth: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = stored_name(name, family)
        value = stored_value(name, tensor.numpy(), family, config)
        wanted = next((k for begin, k in (kinds or {}).items() if target.startswith(begin)), None)
        if wanted is None:
            writer.add_tensor(target, np.ascontiguousarray(value))
            truth[name] = tensor.clone()
            continue
        packed = gguf.quants.quantize(value, wanted)
        writer.add_tensor(target, packed, raw_dtype=wanted)
        back = torch.from_numpy(unstored(name, gguf.quants.dequantize(packed, wanted), family, config))
        truth[name] = back if wanted.name in FLOATS else back.bfloat16().float()  # the dense copy is bfloat16
    write(writer)
    return truth


def _describe(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    """The metadata of attention, norms and ropes, as converters write it for each family."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention") or rope
    if family not in ("granite", "olmo2", "phi3", "qwen2", "starcoder2"):
        writer.add_key_length(size)
        writer.add_value_length(size)
    if family != "olmo2":
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if family == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family in (*OFFSET, "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope") or family == "phi3":
        writer.add_rope_scaling_orig_ctx_len(
            rope.get("original_max_position_embeddings", config.max_position_embeddings)
        )
    if rope["rope_type"] == "longrope":
        trained = rope["original_max_position_embeddings"]
        times = config.max_position_embeddings / trained
        writer.add_rope_scaling_attn_factors((1 + np.log(times) / np.log(trained)) ** 0.5 if times > 1 else 1.0)
        for end in ("short", "long"):
            writer.add_tensor(f"rope_factors_{end}.weight", np.array(rope[f"{end}_factor"], np.float32))


def unstored(name: str, value: np.ndarray, family: str, config: Any) -> np.ndarray:
    """The inverse of ``stored_value`` for matrices."""
    if family in PAIRED and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return np.ascontiguousarray(value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape))
    return value


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def plain_tokens(size: int) -> dict[str, Any]:
    """A SentencePiece style vocabulary of that many tokens, of which only the number matters."""
    names = ["<unk>", "<bos>", "<eos>", *(f"t{i}" for i in range(size - 3))]
    return {
        "model": "llama",
        "tokens": names,
        "scores": [0.0] * size,
        "token_type": [2, 3, 3] + [1] * (size - 3),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def add_tokens(writer: gguf.GGUFWriter, tokens: Mapping[str, Any]) -> None:
    """Write ``tokenizer.ggml.*``; the key ``chat_template`` goes to its own place."""
    for key, value in tokens.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, list(value))


def pieces(words: Sequence[str]) -> dict[str, Any]:
    """A real SentencePiece style vocabulary: bytes, letters, and what builds ``words`` up from the left."""
    names, kinds, scores = ["<unk>", "<s>", "</s>"], [2, 3, 3], [0.0, 0.0, 0.0]

    def add(token: str, kind: int, score: float) -> None:
        if token not in names:
            names.append(token)
            kinds.append(kind)
            scores.append(score)

    for byte in range(256):
        add(f"<0x{byte:02X}>", 6, 0.0)
    rank = 0
    for word in words:
        for end in range(2, len(word) + 1):
            add(word[:end], 1, -float(rank))
            add(word[len(word) - end :], 1, -float(rank) - 0.5)
            rank += 1
    for letter in sorted({letter for word in words for letter in word}):
        add(letter, 1, -1e6)
    add("<tool>", 4, 0.0)
    add("<|end|>", 3, 0.0)
    return {
        "model": "llama",
        "tokens": names,
        "scores": scores,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
