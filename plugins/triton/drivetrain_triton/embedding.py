"""Row lookup, times a scale, in one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton import language as tl

from drivetrain_api.v1 import EmbeddingSpec, torch_dtype

from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier
from .target import Target

BLOCK = 1024
WARPS = 4


@kernel
@triton.jit(do_not_specialize_on_alignment=["ids"])
def _lookup(
    ids, weight, out, stride, SCALE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """ids [T], weight [vocabulary, SIZE] with rows ``stride`` apart -> out [T, SIZE], converted before it is scaled."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    value = tl.load(weight + row * stride + column, mask=column < SIZE, other=0.0).to(out.dtype.element_ty)
    if SCALE != 1.0:
        value = (value.to(tl.float32) * SCALE).to(value.dtype)
    tl.store(out + token * SIZE + column, value, mask=column < SIZE)


def make_embedding(spec: EmbeddingSpec, target: Target) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """embedding/1: ``fn(ids [T] int, weight [vocabulary, size]) -> [T, size]``. Ids are not checked."""
    size, dtype = spec.size, torch_dtype(spec.activation_dtype)
    block = min(BLOCK, triton.next_power_of_2(size))
    pieces = triton.cdiv(size, block)
    settings = {"SCALE": float(spec.scale), "SIZE": size, "BLOCK": block, "OVERLAPS": target.overlaps} | target.options

    def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tokens = ids.shape[0]
        out = torch.empty((tokens, size), dtype=dtype, device=weight.device)
        if tokens:
            _lookup[(tokens, pieces)](ids, weight, out, weight.stride(0), num_warps=WARPS, **settings)
        return out

    return embedding
