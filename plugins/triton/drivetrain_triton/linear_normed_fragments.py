"""Linears for few rows that add, norm and multiply by matrix units fed from registers: see ``linear_fragments``.

A thread norms the elements that it gives to the matrix unit. Each program reads the rows and their residuals for the
mean of the squares; the first step's elements stay in registers, later ones are read again. The last program of the
tokens stores the sums.
"""

from __future__ import annotations

import triton
from triton import language as tl

from drivetrain_triton.launch import kernel
from drivetrain_triton.linear_fragments import ROWS_LAST, elements, operand, places, read_weights
from drivetrain_triton.linear_normed_rows import keep_sums, kept_sum
from drivetrain_triton.linear_parts import finish_tile, panel
from drivetrain_triton.norms import weighted
from drivetrain_triton.overlap import let_next_begin, wait_for_earlier


@triton.jit
def squares(value):
    """Sums of the squares of each token's elements, on axes as the elements are on."""
    if ROWS_LAST:
        parts = tl.sum(tl.sum(value * value, axis=0, keep_dims=True), axis=4, keep_dims=True)
        return tl.sum(parts, axis=2, keep_dims=True)
    else:
        parts = tl.sum(tl.sum(value * value, axis=3, keep_dims=True), axis=4, keep_dims=True)
        return tl.sum(parts, axis=1, keep_dims=True)


@triton.jit
def multiplied(sums, tile, values, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sums [WARPS, BLOCK_N, BLOCK_M] plus a step's products."""
    warps: tl.constexpr = sums.shape[0]
    size: tl.constexpr = tile.numel // BLOCK_N
    weights, tokens = operand(tile, BLOCK_N, size, warps), operand(values, BLOCK_M, size, warps)
    return tl.dot(weights, tl.permute(tokens, (0, 2, 1)), sums, input_precision="ieee")


@kernel
@triton.jit(do_not_specialize=["M"])
def normed_fragment_products(
    x,
    residual,
    scale,
    weight,
    bias,
    out,
    total,
    M,
    N,
    K,
    x_stride,
    residual_stride,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND: tl.constexpr,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_STEP: tl.constexpr,
    EVEN_K: tl.constexpr,
    WARPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [M, N] and total [M, K]. Programs: panels of BLOCK_N weight rows and one for sums; tiles of BLOCK_M tokens.

    ``scale`` [K]: the norm's weight. ``residual``: only with ADD. ONE_STEP: BLOCK_K holds K.
    """
    let_next_begin(OVERLAPS)
    program, first_token = tl.program_id(0), tl.program_id(1) * BLOCK_M
    k = elements(BLOCK_K, WARPS)
    weights_at = weight + panel(program * BLOCK_N + places(BLOCK_N), N, KIND != "") * K + k
    tile = read_weights(weights_at, k, K, EVEN_K)
    factors = tl.load(scale + k, mask=k < K, other=0.0)
    wait_for_earlier(OVERLAPS)
    if program == tl.num_programs(0) - 1:
        keep_sums(x, residual, total, first_token, M, K, x_stride, residual_stride, ADD, BLOCK_M)
    else:
        row = tl.minimum(first_token + places(BLOCK_M), M - 1).to(tl.int64)
        x_at, residual_at = x + row * x_stride, residual + row * residual_stride
        value = kept_sum(x_at, residual_at, k, k < K, ADD)
        summed = squares(value)
        if not ONE_STEP:
            for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=1):
                later = kept_sum(x_at, residual_at, k + start, k + start < K, ADD)
                summed += squares(later)
        factor = tl.rsqrt(summed / K + EPS)
        values = weighted(value * factor, factors, OFFSET, ROUND).to(tile.dtype)
        sums = multiplied(tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32), tile, values, BLOCK_M, BLOCK_N)
        if not ONE_STEP:
            for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=1):
                here = k + start
                tile = read_weights(weights_at + start, here, K, EVEN_K)
                factors = tl.load(scale + here, mask=here < K, other=0.0)
                value = kept_sum(x_at, residual_at, here, here < K, ADD)
                values = weighted(value * factor, factors, OFFSET, ROUND).to(tile.dtype)
                sums = multiplied(sums, tile, values, BLOCK_M, BLOCK_N)
        finish_tile(tl.sum(sums, axis=0), bias, out, program, first_token, M, N, HAS_BIAS, KIND)
