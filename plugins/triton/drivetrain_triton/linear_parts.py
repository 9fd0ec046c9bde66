"""What the kernels of linears for few rows share.

Gated weights hold S gate rows, then S up rows; a program then takes rows in pairs: gate, up, gate, ...
"""

from __future__ import annotations

import triton
from triton import language as tl

from drivetrain_triton.activations import activated


@triton.jit
def gated(gate, up, KIND: tl.constexpr, TYPE: tl.constexpr):
    """act(gate) * up of float32 sums, with the roundings of separate kernels: both, the activation, the product."""
    gate, up = gate.to(TYPE).to(tl.float32), up.to(TYPE).to(tl.float32)
    return activated(gate, KIND).to(TYPE).to(tl.float32) * up


@triton.jit
def panel(row, N, GATED: tl.constexpr):
    """Where rows of a program's panels are in the weight; those past the end repeat the last one."""
    if GATED:
        return (tl.minimum(row // 2, N - 1) + row % 2 * N).to(tl.int64)
    else:
        return tl.minimum(row, N - 1).to(tl.int64)


@triton.jit
def finish_tile(total, bias, out, program, first_token, M, N, HAS_BIAS: tl.constexpr, KIND: tl.constexpr):
    """Write the results of a panel's sums [weight rows, tokens]."""
    dtype: tl.constexpr = out.dtype.element_ty
    size: tl.constexpr = total.shape[0]
    tokens = first_token + tl.arange(0, total.shape[1])
    if KIND != "":
        pairs = tl.reshape(total, [size // 2, 2, total.shape[1]])
        gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))
        columns = program * (size // 2) + tl.arange(0, size // 2)
        result = gated(gate, up, KIND, dtype)
    else:
        columns = program * size + tl.arange(0, size)
        result = total
        if HAS_BIAS:
            result += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    at = out + tokens.to(tl.int64)[None, :] * N + columns[:, None]
    tl.store(at, result.to(dtype), mask=(columns < N)[:, None] & (tokens < M)[None, :])
