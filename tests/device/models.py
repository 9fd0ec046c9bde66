"""Small checkpoints for a device: the awkward ones of every family, and some of the sizes that kernels are made for."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny_checkpoint

# name -> (family or variant, overrides)
MODELS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {}),
    "llama-rope3": ("llama-rope3", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "phi3-partial": ("phi3-partial", {}),
    "granite": ("granite", {}),
    "granite_swa": ("granite_swa", {}),
    "gemma2": ("gemma2", {}),
    "olmo2": ("olmo2", {}),
    "starcoder2": ("starcoder2", {}),
    "llama-biases": ("llama-biases", {}),
    "llama-even": ("llama-rope3", dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64)),
    "qwen3-even": (
        "qwen3",
        dict(
            hidden_size=256,
            intermediate_size=768,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,
            num_hidden_layers=2,
        ),
    ),
    "gemma3-even": (
        "gemma3",
        dict(
            hidden_size=256,
            intermediate_size=512,
            num_attention_heads=4,
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=32,
        ),
    ),
}


def checkpoint(name: str, folder: Path) -> Path:
    """Write a checkpoint whose weights are exact in bfloat16, so that dtypes differ by their activations alone."""
    family, overrides = MODELS[name]
    directory = tiny_checkpoint(family, folder / name, **overrides)
    for path in directory.glob("*.safetensors"):
        tensors = {key: value.to(torch.bfloat16).to(value.dtype) for key, value in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    return directory
