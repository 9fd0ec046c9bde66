"""Random weights of a measured model as safetensors, so that a start can be timed from files in the page cache.

    python ci/perf/device_files.py FOLDER [--device cuda]

FOLDER holds a config.json of device_models.py. One file a layer, bfloat16; drawn on the device where there is one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(config: dict[str, Any], layer: int) -> Shapes:
    """Names and shapes of one layer's tensors."""
    hidden, size = config["hidden_size"], config["head_dim"]
    heads, kv, wide = config["num_attention_heads"] * size, config["num_key_value_heads"] * size, "intermediate_size"
    parts: Shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (config[wide], hidden),
        "mlp.up_proj": (config[wide], hidden),
        "mlp.down_proj": (hidden, config[wide]),
    }
    if config["model_type"] == "qwen3":
        parts |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}


def outer_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of the tensors outside the layers."""
    table = (config["vocab_size"], config["hidden_size"])
    outer: Shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (config["hidden_size"],)}
    return outer if config["tie_word_embeddings"] else outer | {"lm_head.weight": table}


def write_weights(folder: Path, device: torch.device) -> int:
    """Write all files and their index; returns bytes of tensors."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers: int = config["num_hidden_layers"]
    groups = [layer_shapes(config, layer) for layer in range(layers)] + [outer_shapes(config)]
    places: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = {}
        for key, shape in shapes.items():
            around, spread = (1.0, 0.1) if len(shape) == 1 else (0.0, 0.02)
            drawn = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(around, spread)
            tensors[key] = drawn.cpu()
            total += drawn.numel() * 2
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shapes, name)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    begin = time.perf_counter()
    host = args.device.partition(":")[0] in ("cpu", "mirage", "mirage-static")
    total = write_weights(args.folder, torch.device("cpu" if host else args.device))
    print(json.dumps({"bytes": total, "write_seconds": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
