"""Linears for few rows by matrix units that are fed straight from registers.

A product's sum may run over its elements in any order, if both sides agree. So each thread reads eight neighbours of a
row (16 bytes) and takes them for what the matrix unit wants it to hold: four threads hold 32 elements of a row, eight
rows make a warp. Nothing passes through shared memory, warps meet only at the end, and the first weights are in
registers before the program waits for the kernels ahead. The warps share a sum: warp w of W takes a part of each step.
"""

from __future__ import annotations

import triton
from triton import language as tl

from drivetrain_triton.launch import kernel
from drivetrain_triton.linear_parts import finish_tile, panel
from drivetrain_triton.overlap import let_next_begin, wait_for_earlier

# Which of a tile's axes of equal stride the compiler gives to neighbouring lanes, and how many neighbours a thread of
# a matrix unit holds, changed with its versions. Only speed depends on it.
ROWS_LAST = tl.constexpr(tuple(int(one) for one in triton.__version__.split(".")[:2]) >= (3, 7))


@triton.jit
def elements(BLOCK_K: tl.constexpr, WARPS: tl.constexpr):
    """Offsets [1, WARPS, 1, J, 32], or [J, 1, WARPS, 1, 32], of a step's BLOCK_K = 32 J WARPS elements."""
    pieces: tl.constexpr = BLOCK_K // WARPS // 32
    warp, piece, lane = tl.arange(0, WARPS) * pieces, tl.arange(0, pieces), tl.arange(0, 32)
    if ROWS_LAST:
        return (warp[None, None, :, None, None] + piece[:, None, None, None, None]) * 32 + lane
    else:
        return (warp[None, :, None, None, None] + piece[None, None, None, :, None]) * 32 + lane


@triton.jit
def places(ROWS: tl.constexpr):
    """Which of ROWS rows: [8, 1, ROWS / 8, 1, 1], or [1, ROWS / 8, 1, 8, 1]."""
    group, row = tl.arange(0, ROWS // 8) * 8, tl.arange(0, 8)
    if ROWS_LAST:
        return group[None, :, None, None, None] + row[None, None, None, :, None]
    else:
        return group[None, None, :, None, None] + row[:, None, None, None, None]


@triton.jit
def operand(tile, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr):
    """A tile as read -> [WARPS, ROWS, BLOCK_K / WARPS], each 32 elements in the matrix unit's order."""
    pieces: tl.constexpr = BLOCK_K // WARPS // 32
    if ROWS_LAST:
        parts = tl.reshape(tile, [pieces, ROWS // 8, WARPS, 8, 4, 2, 2, 2])
        parts = tl.permute(parts, (2, 1, 3, 0, 5, 6, 4, 7))
    else:
        parts = tl.reshape(tile, [8, WARPS, ROWS // 8, pieces, 4, 2, 4])
        parts = tl.permute(parts, (1, 2, 0, 3, 5, 4, 6))
    return tl.reshape(parts, [WARPS, ROWS, BLOCK_K // WARPS])


@triton.jit
def read_weights(at, k, K, EVEN_K: tl.constexpr):
    """A step's weights, read once."""
    if EVEN_K:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=k < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def multiplied(sums, tile, x_at, k, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Sums [WARPS, BLOCK_N, BLOCK_M] (BLOCK_N of 8: the last two swapped) plus a step's products."""
    values = tl.load(x_at) if EVEN_K else tl.load(x_at, mask=k < K, other=0.0)
    warps: tl.constexpr = sums.shape[0]
    size: tl.constexpr = tile.numel // BLOCK_N
    weights, tokens = operand(tile, BLOCK_N, size, warps), operand(values, BLOCK_M, size, warps)
    if BLOCK_N == 8:
        return tl.dot(tokens, tl.permute(weights, (0, 2, 1)), sums, input_precision="ieee")
    else:
        return tl.dot(weights, tl.permute(tokens, (0, 2, 1)), sums, input_precision="ieee")


@kernel
@triton.jit(do_not_specialize=["M"])
def fragment_products(
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    WARPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [M, N]. Programs: panels of BLOCK_N weight rows, tiles of BLOCK_M tokens.

    Sixteen weight rows and eight tokens fill a matrix unit; eight weight rows need BLOCK_M of 16.
    """
    let_next_begin(OVERLAPS)
    program, first_token = tl.program_id(0), tl.program_id(1) * BLOCK_M
    k = elements(BLOCK_K, WARPS)
    weights_at = weight + panel(program * BLOCK_N + places(BLOCK_N), N, KIND != "") * K + k
    tile = read_weights(weights_at, k, K, EVEN_K)
    wait_for_earlier(OVERLAPS)
    tokens = tl.minimum(first_token + places(BLOCK_M), M - 1).to(tl.int64)
    x_at = x + tokens * x_stride + k
    if BLOCK_N == 8:
        sums = tl.zeros([WARPS, BLOCK_M, BLOCK_N], tl.float32)
    else:
        sums = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    sums = multiplied(sums, tile, x_at, k, K, BLOCK_M, BLOCK_N, EVEN_K)
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=1):
        left = K - start
        tile = read_weights(weights_at + start, k, left, EVEN_K)
        sums = multiplied(sums, tile, x_at + start, k, left, BLOCK_M, BLOCK_N, EVEN_K)
    total = tl.sum(sums, axis=0)
    if BLOCK_N == 8:
        total = tl.trans(total)
    finish_tile(total, bias, out, program, first_token, M, N, HAS_BIAS, KIND)
