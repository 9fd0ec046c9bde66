"""Kernels of linears for few rows: y = x W^T at the speed at which W can be read.

Both kernels ask for their first weights before they wait for the kernels ahead: weights never change, so they are read
while a norm or an attention is still at work. ``row_products`` multiplies in float32 without matrix units (one to
four rows); ``tile_products`` uses them and may split a sum among programs, of which the last to arrive adds the parts
in their order. Gated weights hold S gate rows, then S up rows; a program then takes rows in pairs: gate, up, gate, ...
"""

from __future__ import annotations

import triton
from triton import language as tl

from drivetrain_triton.activations import activated
from drivetrain_triton.overlap import let_next_begin, wait_for_earlier


@triton.jit
def gated(gate, up, KIND: tl.constexpr, TYPE: tl.constexpr):
    """act(gate) * up of float32 sums, with the roundings of separate kernels: both, the activation, the product."""
    gate, up = gate.to(TYPE).to(tl.float32), up.to(TYPE).to(tl.float32)
    return activated(gate, KIND).to(TYPE).to(tl.float32) * up


@triton.jit
def panel(program, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Weight rows [BLOCK_N] of a program; those past the end repeat the last one."""
    lane = tl.arange(0, BLOCK_N)
    if GATED:
        row = tl.minimum(program * (BLOCK_N // 2) + lane // 2, N - 1)
        return (row + lane % 2 * N).to(tl.int64)
    else:
        return tl.minimum(program * BLOCK_N + lane, N - 1).to(tl.int64)


@triton.jit
def fetch_ahead(weight, rows, first, K, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Ask the second-level cache for ``CHUNKS`` pieces of ``CHUNK`` bytes of each row, from element ``first`` on.

    128: lines, asked for by one thread each; else bulk requests, which a warp makes one after the other.
    """
    length: tl.constexpr = CHUNK * 8 // weight.dtype.element_ty.primitive_bitwidth
    start = tl.minimum(first + tl.arange(0, CHUNKS) * length, K - length)
    at = (weight + rows[:, None] * K + start[None, :]).to(tl.int64)
    if CHUNK == 128:
        asked: tl.constexpr = "prefetch.global.L2 [$1]; // $0"
    elif CHUNK == 512:
        asked: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 512; // $0"
    else:
        asked: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 2048; // $0"
    tl.inline_asm_elementwise(asked, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def row_sums(tile, x, mask, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Products of a tile [BLOCK_N, BLOCK_K] with a piece of a row, summed by eights: [BLOCK_N, BLOCK_K / 8]."""
    values = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    return tl.sum(tl.reshape(tile * values[None, :], [BLOCK_N, BLOCK_K // 8, 8]), axis=2)


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
    ONCE: tl.constexpr,
    AHEAD: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [M, N] for M <= ROWS <= 4: a program reads BLOCK_N rows of the weight, one piece of BLOCK_K ahead."""
    let_next_begin(OVERLAPS)
    program = tl.program_id(0)
    rows = panel(program, N, BLOCK_N, KIND != "")
    k = tl.arange(0, BLOCK_K)
    at = weight + rows[:, None] * K + k[None, :]
    if EVEN_K:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    if AHEAD > 0:
        fetch_ahead(weight, rows, BLOCK_K, K, AHEAD, CHUNK)
    wait_for_earlier(OVERLAPS)
    one = x + tl.minimum(1, M - 1).to(tl.int64) * x_stride
    two = x + tl.minimum(2, M - 1).to(tl.int64) * x_stride
    three = x + tl.minimum(3, M - 1).to(tl.int64) * x_stride
    sums0 = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    sums1, sums2, sums3 = sums0, sums0, sums0
    for start in range(0, BLOCK_K if ONCE else K, BLOCK_K):
        here = k + start
        inside = tl.full([BLOCK_K], True, tl.int1) if EVEN_K else here < K
        values = tile.to(tl.float32)
        if not ONCE:
            left = K - start - BLOCK_K
            more = (k < left)[None, :] if not EVEN_K else left > 0
            tile = tl.load(at + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
        sums0 += row_sums(values, x + here, inside, BLOCK_N, BLOCK_K)
        if ROWS > 1:
            sums1 += row_sums(values, one + here, inside, BLOCK_N, BLOCK_K)
        if ROWS > 2:
            sums2 += row_sums(values, two + here, inside, BLOCK_N, BLOCK_K)
            sums3 += row_sums(values, three + here, inside, BLOCK_N, BLOCK_K)
    finish_row(sums0, bias, out, program, N, BLOCK_N, HAS_BIAS, KIND)
    if ROWS > 1:
        if M > 1:
            finish_row(sums1, bias, out + N, program, N, BLOCK_N, HAS_BIAS, KIND)
    if ROWS > 2:
        if M > 2:
            finish_row(sums2, bias, out + 2 * N, program, N, BLOCK_N, HAS_BIAS, KIND)
        if M > 3:
            finish_row(sums3, bias, out + 3 * N, program, N, BLOCK_N, HAS_BIAS, KIND)


@triton.jit
def dot_sums(
    x,
    weight,
    rows,
    tokens,
    first,
    end,
    K,
    x_stride,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """Sums over elements first .. end - 1: [weight rows, tokens]."""
    k = tl.arange(0, BLOCK_K)
    weights_at = weight + rows[:, None] * K + k[None, :]
    x_at = x + tokens[:, None] * x_stride + k[None, :]
    shape: tl.constexpr = [rows.shape[0], tokens.shape[0]] if WEIGHT_FIRST else [tokens.shape[0], rows.shape[0]]
    sums = tl.zeros(shape, tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            tile = tl.load(weights_at + start, eviction_policy="evict_first")
            values = tl.load(x_at + start)
        else:
            inside = (k < K - start)[None, :]
            tile = tl.load(weights_at + start, mask=inside, other=0.0, eviction_policy="evict_first")
            values = tl.load(x_at + start, mask=inside, other=0.0)
        if WEIGHT_FIRST:
            sums = tl.dot(tile, tl.trans(values), sums, input_precision="ieee")
        else:
            sums = tl.dot(values, tl.trans(tile), sums, input_precision="ieee")
    return sums if WEIGHT_FIRST else tl.trans(sums)


@triton.jit
def finish_tile(
    total, bias, out, program, first_token, M, N, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr
):
    """Write the results of sums [BLOCK_N, tokens]."""
    dtype: tl.constexpr = out.dtype.element_ty
    tokens = first_token + tl.arange(0, total.shape[1])
    if KIND != "":
        pairs = tl.reshape(total, [BLOCK_N // 2, 2, total.shape[1]])
        gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))
        columns = program * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        result = gated(gate, up, KIND, dtype)
    else:
        columns = program * BLOCK_N + tl.arange(0, BLOCK_N)
        result = total
        if HAS_BIAS:
            result += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    at = out + tokens.to(tl.int64)[None, :] * N + columns[:, None]
    tl.store(at, result.to(dtype), mask=(columns < N)[:, None] & (tokens < M)[None, :])


@triton.jit(do_not_specialize=["M"])
def tile_products(
    x,
    weight,
    bias,
    out,
    partials,
    arrivals,
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
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    AHEAD: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [M, N] by matrix units. Programs: panels of the weight, parts of the sum, tiles of BLOCK_M tokens.

    ``partials``: float32 scratch; ``arrivals``: int32 counts by tile, zero between launches.
    """
    let_next_begin(OVERLAPS)
    program, part = tl.program_id(0), tl.program_id(1)
    first_token = tl.program_id(2) * BLOCK_M
    rows = panel(program, N, BLOCK_N, KIND != "")
    count = tl.num_programs(1) if SPLIT else 1
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), count) * BLOCK_K
    first = part * span
    if AHEAD > 0:
        fetch_ahead(weight, rows, first, K, AHEAD, CHUNK)
    wait_for_earlier(OVERLAPS)
    tokens = tl.minimum(first_token + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
    end = tl.minimum(first + span, K)
    total = dot_sums(x, weight, rows, tokens, first, end, K, x_stride, BLOCK_K, EVEN_K, STAGES, WEIGHT_FIRST)
    if not SPLIT:
        finish_tile(total, bias, out, program, first_token, M, N, BLOCK_N, HAS_BIAS, KIND)
    else:
        tile = tl.program_id(2) * tl.num_programs(0) + program
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = partials + tile.to(tl.int64) * (count * BLOCK_N * BLOCK_M)
        tl.store(parts + part * (BLOCK_N * BLOCK_M) + cell, total)
        tl.debug_barrier()  # every thread's part is written before the count says so
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == count - 1:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(count):
                total += tl.load(parts + other * (BLOCK_N * BLOCK_M) + cell, cache_modifier=".cg")
            finish_tile(total, bias, out, program, first_token, M, N, BLOCK_N, HAS_BIAS, KIND)
            tl.store(arrivals + tile, 0)
