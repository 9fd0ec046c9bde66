"""Checkpoints: safetensors, GGUF and random weights, one tensor at a time, never pickle."""
