"""Linears for one or two rows that add, norm and multiply: every program norms the rows for itself.

As in ``linear_rows`` the first tile of the weight is in registers before the program waits for the kernels ahead. Then
each program reads the rows and their residuals whole, which first-level caches keep, for the mean of the squares; what
a step multiplies is normed where it is used, with the roundings of separate kernels. The last program stores the sums.
"""

from __future__ import annotations

import triton
from triton import language as tl

from drivetrain_triton.launch import kernel
from drivetrain_triton.linear_parts import panel
from drivetrain_triton.linear_rows import finish_row, weights_of
from drivetrain_triton.norms import weighted
from drivetrain_triton.overlap import let_next_begin, wait_for_earlier


@triton.jit
def kept_sum(x, residual, at, inside, ADD: tl.constexpr):
    """A piece of x plus residual in float32, rounded as it is kept."""
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        stream = tl.load(residual + at, mask=inside, other=0.0)
        value = (value + stream.to(tl.float32)).to(stream.dtype).to(tl.float32)
    return value


@triton.jit
def keep_sums(
    x, residual, total, first_token, M, K, x_stride, residual_stride, ADD: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Store the sums [M, K] of BLOCK_M tokens: the work of a program that multiplies nothing."""
    token = first_token + tl.arange(0, BLOCK_M)[:, None]
    row = token.to(tl.int64)
    for start in tl.range(0, K, 512, num_stages=1):
        k = start + tl.arange(0, 512)[None, :]
        inside = (token < M) & (k < K)
        stream = residual + row * residual_stride
        value = kept_sum(x + row * x_stride, stream, k, inside, ADD)
        tl.store(total + row * K + k, value.to(total.dtype.element_ty), mask=inside)


@triton.jit
def two_sums(a, b, c, d):
    """Two sums in one pass over the threads."""
    return a + c, b + d


@triton.jit
def products(tile, value, factor, scale, OFFSET: tl.constexpr, ROUND: tl.constexpr, GROUP: tl.constexpr):
    """A tile's products [BLOCK_N, BLOCK_K / GROUP] with a piece of the stream, normed."""
    normed = weighted(value * factor, scale, OFFSET, ROUND).to(scale.dtype).to(tl.float32)
    each = tile.to(tl.float32) * normed[None, :]
    if GROUP == 1:
        return each
    else:
        return tl.sum(tl.reshape(each, [tile.shape[0], tile.shape[1] // GROUP, GROUP]), axis=2)


@kernel
@triton.jit(do_not_specialize=["M"])
def normed_row_products(
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
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [M, N] and total [M, K] for M <= ROWS <= 2: a program reads BLOCK_N rows of the weight; one more keeps sums.

    ``scale`` [K]: the norm's weight. ``residual``: only with ADD. WHOLE, a power of two, holds K; a BLOCK_K of that
    size multiplies the rows as they were read.
    """
    let_next_begin(OVERLAPS)
    program = tl.program_id(0)
    k, column = tl.arange(0, BLOCK_K), tl.arange(0, WHOLE)
    at = weight + panel(program * BLOCK_N + tl.arange(0, BLOCK_N), N, KIND != "")[:, None] * K + k[None, :]
    tile = weights_of(at, k < K, EVEN_K)
    factors = tl.load(scale + k, mask=k < K, other=0.0)
    wait_for_earlier(OVERLAPS)
    if program == tl.num_programs(0) - 1:
        keep_sums(x, residual, total, 0, M, K, x_stride, residual_stride, ADD, ROWS)
    else:
        second = tl.minimum(1, M - 1).to(tl.int64)
        one, one_residual = x + second * x_stride, residual + second * residual_stride
        whole0 = kept_sum(x, residual, column, column < K, ADD)
        whole1 = whole0
        if ROWS > 1:
            whole1 = kept_sum(one, one_residual, column, column < K, ADD)
            squares0, squares1 = tl.reduce((whole0 * whole0, whole1 * whole1), 0, two_sums)
        else:
            squares0 = tl.sum(whole0 * whole0, axis=0)
            squares1 = squares0
        factor0, factor1 = tl.rsqrt(squares0 / K + EPS), tl.rsqrt(squares1 / K + EPS)
        GROUP: tl.constexpr = 1 if ROWS == 1 else 8
        value0, value1 = whole0, whole1
        if BLOCK_K != WHOLE:
            value0 = kept_sum(x, residual, k, k < K, ADD)
            if ROWS > 1:
                value1 = kept_sum(one, one_residual, k, k < K, ADD)
        sums0 = products(tile, value0, factor0, factors, OFFSET, ROUND, GROUP)
        sums1 = sums0
        if ROWS > 1:
            sums1 = products(tile, value1, factor1, factors, OFFSET, ROUND, GROUP)
        if BLOCK_K != WHOLE:
            for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=1):
                here = k + start
                tile = weights_of(at + start, here < K, EVEN_K)
                factors = tl.load(scale + here, mask=here < K, other=0.0)
                value0 = kept_sum(x, residual, here, here < K, ADD)
                sums0 += products(tile, value0, factor0, factors, OFFSET, ROUND, GROUP)
                if ROWS > 1:
                    value1 = kept_sum(one, one_residual, here, here < K, ADD)
                    sums1 += products(tile, value1, factor1, factors, OFFSET, ROUND, GROUP)
        finish_row(sums0, bias, out, program, N, BLOCK_N, HAS_BIAS, KIND)
        if ROWS > 1:
            if M > 1:
                finish_row(sums1, bias, out + N, program, N, BLOCK_N, HAS_BIAS, KIND)
