"""Configurations of tiny checkpoints: every family, and a variant for each switch that changes what it computes.

Sizes: a prime vocabulary, one key-value head, head sizes that are no power of two, odd widths, a window of 8.
"""

from __future__ import annotations

from typing import Any

VOCABULARY = 293  # prime; 256 bytes, 5 special tokens, 32 merges
SPECIAL = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
PAD, BOS, EOS = 0, 1, 2
SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 60,
    "intermediate_size": 77,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
# family -> (Transformers' model type, its configuration)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        dict(SHARED, num_hidden_layers=3, num_attention_heads=3, head_dim=20, tie_word_embeddings=False),
    ),
    "granite": (
        "granite",
        dict(
            SHARED,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            attention_multiplier=0.17,
            residual_multiplier=0.22,
            embedding_multiplier=12.0,
            logits_scaling=0.4,
            tie_word_embeddings=False,
        ),
    ),
    "granite_swa": (
        "granite_swa",
        dict(
            SHARED,
            num_hidden_layers=5,
            num_attention_heads=6,
            num_key_value_heads=2,
            sliding_window=8,
            layer_rope_theta=[0, 10000.0, 500.0, 10000.0, 0],
            attention_multiplier=0.25,
            residual_multiplier=0.3,
            embedding_multiplier=3.0,
            logits_scaling=0.5,
            tie_word_embeddings=False,
        ),
    ),
    "olmo2": (
        "olmo2",
        dict(SHARED, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2),
    ),
    "starcoder2": (
        "starcoder2",
        dict(
            SHARED,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            sliding_window=8,
            tie_word_embeddings=False,
        ),
    ),
    "mistral": (
        "mistral",
        dict(SHARED, num_hidden_layers=3, num_attention_heads=3, head_dim=20, sliding_window=8),
    ),
    "phi3": (
        "phi3",
        dict(SHARED, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=False),
    ),
    "qwen2": (
        "qwen2",
        dict(SHARED, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True),
    ),
    "qwen3": (
        "qwen3",
        dict(SHARED, num_hidden_layers=3, num_attention_heads=5, head_dim=24, tie_word_embeddings=True),
    ),
    "gemma2": (
        "gemma2",
        dict(
            SHARED,
            num_hidden_layers=4,
            num_attention_heads=4,
            head_dim=24,
            sliding_window=8,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=6.0,
        ),
    ),
    "gemma3": (
        "gemma3_text",
        dict(
            SHARED,
            num_hidden_layers=4,
            num_attention_heads=4,
            head_dim=24,
            sliding_window=8,
            query_pre_attn_scalar=20,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            tie_word_embeddings=True,
        ),
    ),
}
FAMILIES["gemma3_text"] = FAMILIES["gemma3"]
OFFSET_NORMS = ("gemma2", "gemma3_text")  # model types whose norms' weights are stored less 1
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def long_factors(size: int, original: int, **more: Any) -> dict[str, Any]:
    """A longrope's parameters for heads that rotate ``size`` elements."""
    count = range(size // 2)
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * i for i in count],
        "long_factor": [1.5 + 0.7 * i for i in count],
        "original_max_position_embeddings": original,
        **more,
    }


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# name -> (family, overrides): what else the families have to get right
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-131": ("llama", dict(tie_word_embeddings=True, vocab_size=131)),
    "llama-rope3": ("llama", dict(rope_parameters=LLAMA3_ROPE)),
    "llama-linear": ("llama", dict(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0})),
    "llama-dynamic": ("llama", dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0})),
    "llama-yarn": ("llama", dict(rope_parameters=YARN)),
    "llama-yarn-scaled": (
        "llama",
        dict(rope_parameters=dict(YARN, mscale=0.7, mscale_all_dim=1.1, beta_fast=8, beta_slow=2, truncate=False)),
    ),
    "llama-longrope": ("llama", dict(rope_parameters=long_factors(20, 512, factor=4.0))),
    "llama-biases": ("llama", dict(attention_bias=True, mlp_bias=True, num_attention_heads=6, num_key_value_heads=3)),
    "granite": ("granite", {}),
    "granite-biases": ("granite", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "granite-plain": (  # no multiplier: each is 1 by default, the one of attention too
        "granite",
        dict(attention_multiplier=1.0, residual_multiplier=1.0, embedding_multiplier=1.0, logits_scaling=1.0),
    ),
    "granite_swa": ("granite_swa", {}),
    "granite_swa-types": (
        "granite_swa",
        dict(
            layer_types=[
                "sliding_attention",
                "full_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            layer_rope_theta=None,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-biases": ("olmo2", dict(attention_bias=True, tie_word_embeddings=True, num_key_value_heads=6)),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-plain": (
        "starcoder2",
        dict(use_bias=False, sliding_window=None, tie_word_embeddings=True, hidden_act="silu", num_key_value_heads=1),
    ),
    "mistral": ("mistral", {}),
    "mistral-full": (
        "mistral",
        dict(sliding_window=None, head_dim=None, num_attention_heads=6, tie_word_embeddings=True),
    ),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", dict(sliding_window=8, num_key_value_heads=6, tie_word_embeddings=True)),
    "phi3-partial": (
        "phi3",
        dict(
            hidden_size=96,
            original_max_position_embeddings=512,
            rope_parameters=long_factors(12, 512, factor=2.0, partial_rotary_factor=0.75),
        ),
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", dict(tie_word_embeddings=False, head_dim=24, num_key_value_heads=1)),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen3": ("qwen3", {}),
    "qwen3-untied": ("qwen3", dict(tie_word_embeddings=False)),
    "qwen3-window": ("qwen3", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "gemma2": ("gemma2", {}),
    "gemma2-uncapped": (
        "gemma2",
        dict(
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            tie_word_embeddings=False,
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        ),
    ),
    "gemma3": ("gemma3", {}),
    "gemma3-untied": ("gemma3", dict(tie_word_embeddings=False)),
    "gemma3-scaled": (
        "gemma3",
        dict(
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            final_logit_softcapping=20.0,
            attn_logit_softcapping=15.0,
        ),
    ),
}
