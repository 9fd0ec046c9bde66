"""GGUF checkpoints under Hugging Face names, dequantized on reading in chunks of rows that fit a processor's cache."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from drivetrain.errors import WeightsError
from drivetrain.models.weights.checkpoint import TensorInfo
from drivetrain.models.weights.gguf_file import GgufFile, GgufTensor, block_of

if TYPE_CHECKING:
    import torch

CHUNK_ELEMENTS = 1 << 18
LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OLMO_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Architecture -> its own names inside a layer, beside and before those of ``IN_LAYER``.
OWN = {
    "gemma2": GEMMA_NORMS,
    "gemma3": GEMMA_NORMS,
    "olmo2": OLMO_NORMS,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
PAIRED = ("granite", "llama")  # architectures whose q and k rows the format keeps in pairs
IGNORED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class GgufCheckpoint:
    """Tensors of one GGUF file.

    The dense copy of a quantized tensor is bfloat16, whatever dtype is asked for, so that a model has the same
    weights in float32 and in bfloat16 (docs/decisions/0006); tensors stored as floats are taken as they are. Gemma's
    norm weights lose the 1 that the format adds; q and k rows of ``PAIRED`` go back from the format's interleaved order
    to Hugging Face's halves.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._architecture = str(file.metadata.get("general.architecture"))
        self._gemma = self._architecture.startswith("gemma")
        self._names = {
            self._hugging_face(tensor.name): tensor for tensor in file.tensors.values() if tensor.name not in IGNORED
        }
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._pool = ThreadPoolExecutor(min(4, workers))

    def infos(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(shape=tensor.shape, dtype=f"ggml:{tensor.kind}", nbytes=tensor.nbytes)
            for name, tensor in self._names.items()
        }

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        import torch

        tensor = self._names[name]
        out = torch.empty((int(np.prod(tensor.shape[:-1], dtype=np.int64)), tensor.shape[-1]), dtype=dtype)
        rows = max(1, CHUNK_ELEMENTS // tensor.shape[-1])
        starts = range(0, out.shape[0], rows)
        list(self._pool.map(lambda at: self._fill(tensor, out, at, rows), starts))
        out = out.reshape(tensor.shape)
        if self._gemma and name.endswith("norm.weight"):
            out = (self._exact(tensor) - 1.0).to(dtype)
        if self._architecture in PAIRED and re.search(r"self_attn\.[qk]_proj\.", name):
            out = self._halves(out, name)
        return out

    def close(self) -> None:
        self._pool.shutdown()
        self._file.close()

    def _fill(self, tensor: GgufTensor, out: torch.Tensor, at: int, rows: int) -> None:
        import torch

        part = torch.from_numpy(_dequantize(self._file.bytes_of(tensor)[at : at + rows], tensor))
        out[at : at + rows].copy_(part if block_of(tensor.kind, tensor.name)[0] == 1 else part.bfloat16())

    def _exact(self, tensor: GgufTensor) -> torch.Tensor:
        import torch

        return torch.from_numpy(_dequantize(self._file.bytes_of(tensor), tensor)).reshape(tensor.shape)

    def _halves(self, weight: torch.Tensor, name: str) -> torch.Tensor:
        key = f"{self._architecture}.attention.head_count"
        own = key if "q_proj" in name else f"{key}_kv"
        heads = int(self._file.metadata.get(own, self._file.metadata[key]))
        if heads < 1 or weight.shape[0] % (2 * heads):
            raise WeightsError(f"tensor {name} has {weight.shape[0]} rows for {heads} heads")
        shaped = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
        return shaped.transpose(1, 2).reshape(weight.shape)

    def _hugging_face(self, name: str) -> str:
        if match := LAYER.fullmatch(name):
            layer, part, kind = match.groups()
            table = {**IN_LAYER, **OWN.get(self._architecture, {})}
            if part in table:
                return f"model.layers.{layer}.{table[part]}.{kind}"
        stem, _, kind = name.rpartition(".")
        if stem in GLOBAL:
            return f"{GLOBAL[stem]}.{kind}"
        return name


def _dequantize(raw: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.kind)
    elements, size = block_of(tensor.kind, tensor.name)
    if elements == 1 and kind.name in ("F32", "F16", "F64"):
        return raw.view(f"<f{size}").astype(np.float32)
    try:
        values: np.ndarray = gguf.quants.dequantize(raw, kind)
    except NotImplementedError as error:
        raise WeightsError(f"tensor {tensor.name} has type {kind.name}, which gguf can't dequantize") from error
    return values
