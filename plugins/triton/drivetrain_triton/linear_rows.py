"""Linears for one to four rows without matrix units: a program multiplies a few rows of the weight in float32.

The first tile of the weight is in registers before the program waits for the kernels ahead: weights never change.
"""

from __future__ import annotations

import triton
from triton import language as tl

from drivetrain_triton.launch import kernel
from drivetrain_triton.linear_parts import gated, panel
from drivetrain_triton.overlap import let_next_begin, wait_for_earlier


@triton.jit
def weights_of(at, inside, EVEN_K: tl.constexpr):
    """A tile [BLOCK_N, BLOCK_K] of the weight, which is read once."""
    if EVEN_K:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def added(sums, tile, x, inside, EVEN_K: tl.constexpr, GROUP: tl.constexpr):
    """Sums [BLOCK_N, BLOCK_K / GROUP] plus a tile's products with a piece of a row."""
    values = tl.load(x) if EVEN_K else tl.load(x, mask=inside, other=0.0)
    if GROUP == 1:
        return sums + tile.to(tl.float32) * values.to(tl.float32)[None, :]
    else:
        products = tile.to(tl.float32) * values.to(tl.float32)[None, :]
        return sums + tl.sum(tl.reshape(products, [tile.shape[0], tile.shape[1] // GROUP, GROUP]), axis=2)


@triton.jit
def finish_row(sums, bias, out, program, N, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr):
    """Write one row's results; ``out``: its start."""
    total = tl.sum(sums, axis=1)
    dtype: tl.constexpr = out.dtype.element_ty
    if KIND != "":
        gate, up = tl.split(tl.reshape(total, [BLOCK_N // 2, 2]))
        columns = program * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        result = gated(gate, up, KIND, dtype)
    else:
        columns = program * BLOCK_N + tl.arange(0, BLOCK_N)
        result = total
        if HAS_BIAS:
            result += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(out + columns, result.to(dtype), mask=columns < N)


@kernel
@triton.jit(do_not_specialize=["M"])
def row_products(
    x,
    weight,
    bias,
    out,
    M,
    N,
    K,
    x_stride,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [M, N] for M <= ROWS <= 4: a program reads BLOCK_N rows of the weight.

    One row keeps a sum for every element of the tile, so that a step is nothing but multiply-adds; several rows keep
    one for eight elements, which a thread holds side by side.
    """
    let_next_begin(OVERLAPS)
    program = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    at = weight + panel(program * BLOCK_N + tl.arange(0, BLOCK_N), N, KIND != "")[:, None] * K + k[None, :]
    tile = weights_of(at, k < K, EVEN_K)
    wait_for_earlier(OVERLAPS)
    one = x + tl.minimum(1, M - 1).to(tl.int64) * x_stride
    two = x + tl.minimum(2, M - 1).to(tl.int64) * x_stride
    three = x + tl.minimum(3, M - 1).to(tl.int64) * x_stride
    GROUP: tl.constexpr = 1 if ROWS == 1 else 8
    sums0 = tl.zeros([BLOCK_N, BLOCK_K // GROUP], tl.float32)
    sums1, sums2, sums3 = sums0, sums0, sums0
    sums0 = added(sums0, tile, x + k, k < K, EVEN_K, GROUP)
    if ROWS > 1:
        sums1 = added(sums1, tile, one + k, k < K, EVEN_K, GROUP)
    if ROWS > 2:
        sums2 = added(sums2, tile, two + k, k < K, EVEN_K, GROUP)
        sums3 = added(sums3, tile, three + k, k < K, EVEN_K, GROUP)
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=1):
        here = k + start
        tile = weights_of(at + start, here < K, EVEN_K)
        sums0 = added(sums0, tile, x + here, here < K, EVEN_K, GROUP)
        if ROWS > 1:
            sums1 = added(sums1, tile, one + here, here < K, EVEN_K, GROUP)
        if ROWS > 2:
            sums2 = added(sums2, tile, two + here, here < K, EVEN_K, GROUP)
            sums3 = added(sums3, tile, three + here, here < K, EVEN_K, GROUP)
    finish_row(sums0, bias, out, program, N, BLOCK_N, HAS_BIAS, KIND)
    if ROWS > 1:
        if M > 1:
            finish_row(sums1, bias, out + N, program, N, BLOCK_N, HAS_BIAS, KIND)
    if ROWS > 2:
        if M > 2:
            finish_row(sums2, bias, out + 2 * N, program, N, BLOCK_N, HAS_BIAS, KIND)
        if M > 3:
            finish_row(sums3, bias, out + 3 * N, program, N, BLOCK_N, HAS_BIAS, KIND)
