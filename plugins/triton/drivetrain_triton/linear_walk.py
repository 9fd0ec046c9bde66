"""Linears for few rows by matrix units, each program an equal share of the weight.

The weight is a row of units: panel after panel, step after step of the sum. Program p of P walks units p U / P to
(p + 1) U / P; where a panel's units belong to several programs, each leaves its part in a scratch, and the last to
arrive adds the parts in their order. The last unit's weights are in registers before the program waits for the kernels
ahead (the last, so that nothing has to be multiplied before all other copies are on their way); the others come by
asynchronous copies, across the borders of panels.
"""

from __future__ import annotations

import triton
from triton import language as tl

from drivetrain_triton.linear_parts import finish_tile, panel
from drivetrain_triton.overlap import let_next_begin, wait_for_earlier


@triton.jit
def step_sums(sums, tile, values, WEIGHT_FIRST: tl.constexpr):
    """Sums plus a unit's products with its pieces [tokens, BLOCK_K] of the rows."""
    if WEIGHT_FIRST:
        return tl.dot(tile, tl.trans(values), sums, input_precision="ieee")
    else:
        return tl.dot(values, tl.trans(tile), sums, input_precision="ieee")


@triton.jit
def row_pieces(x_at, k, K, step, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """What a step takes of the rows [tokens, BLOCK_K]."""
    offset = step * BLOCK_K
    if EVEN_K:
        return tl.load(x_at + offset)
    else:
        return tl.load(x_at + offset, mask=(k + offset < K)[None, :], other=0.0)


@triton.jit
def unit_weights(weight, rows, k, K, step, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """A unit's weights [BLOCK_N, BLOCK_K], read once."""
    at = weight + rows[:, None] * K + (step * BLOCK_K + k)[None, :]
    if EVEN_K:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=(step * BLOCK_K + k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def owner(unit, units):
    """The program to whose share a unit belongs."""
    return ((unit + 1) * tl.num_programs(0) - 1) // units


@triton.jit
def place(program, number, steps, units):
    """Where a program's part of a panel is: it has two at most, of its first panel and of its last."""
    first = program * units // tl.num_programs(0) // steps
    return (2 * (tl.program_id(1) * tl.num_programs(0) + program) + (number != first).to(tl.int32)).to(tl.int64)


@triton.jit
def cells(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of a part's sums."""
    return tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def leave(total, partials, number, steps, units):
    """Store a part of a panel's sums."""
    at = partials + place(tl.program_id(0), number, steps, units) * total.numel
    tl.store(at + cells(total.shape[0], total.shape[1]), total)


@triton.jit
def close(
    total,
    bias,
    out,
    partials,
    unit,
    first,
    steps,
    units,
    first_token,
    M,
    N,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Done with the panel before ``unit``: write it, or leave it if it began before this program's share."""
    number = unit // steps - 1
    if unit - steps >= first:
        finish_tile(total, bias, out, number, first_token, M, N, HAS_BIAS, KIND)
    else:
        leave(total, partials, number, steps, units)


@triton.jit
def arrive(arrivals, number, steps, units):
    """Count a part whose stores are behind a barrier; whether all others of the panel have arrived before."""
    others = owner(number * steps + steps - 1, units) - owner(number * steps, units)
    arrived = arrivals + tl.program_id(1) * (units // steps) + number
    return tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == others


@triton.jit
def gathered(partials, arrivals, number, steps, units, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A panel's sums from all its parts, in their order; its count is zero again."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for program in range(owner(number * steps, units), owner(number * steps + steps - 1, units) + 1):
        at = partials + place(program, number, steps, units) * (ROWS * COLUMNS)
        total += tl.load(at + cells(ROWS, COLUMNS), cache_modifier=".cg")
    tl.store(arrivals + tl.program_id(1) * (units // steps) + number, 0)
    return total


@triton.jit(do_not_specialize=["M"])
def walk_products(
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
    STAGES: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [M, N]. Programs: shares of the weight (no more than it has units), tiles of BLOCK_M tokens.

    ``partials``: float32 scratch; ``arrivals``: int32 counts by panel, zero between launches.
    """
    let_next_begin(OVERLAPS)
    me, count = tl.program_id(0), tl.num_programs(0)
    first_token = tl.program_id(1) * BLOCK_M
    steps = tl.cdiv(K, BLOCK_K)
    units = tl.cdiv(N * 2 if KIND != "" else N, BLOCK_N) * steps
    first, end = me * units // count, (me + 1) * units // count
    k, lane = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    opened, last = first // steps, (end - 1) // steps  # the panels of which others may have parts
    rows = panel(last * BLOCK_N + lane, N, KIND != "")
    late_tile = unit_weights(weight, rows, k, K, (end - 1) % steps, BLOCK_K, EVEN_K)
    wait_for_earlier(OVERLAPS)
    tokens = tl.minimum(first_token + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
    x_at = x + tokens[:, None] * x_stride + k[None, :]
    shape: tl.constexpr = [BLOCK_N, BLOCK_M] if WEIGHT_FIRST else [BLOCK_M, BLOCK_N]
    sums = tl.zeros(shape, tl.float32)
    for unit in tl.range(first, end - 1, num_stages=STAGES):
        number, step = unit // steps, unit % steps
        if (step == 0) & (unit > first):
            total = sums if WEIGHT_FIRST else tl.trans(sums)
            close(total, bias, out, partials, unit, first, steps, units, first_token, M, N, HAS_BIAS, KIND)
            sums = tl.zeros(shape, tl.float32)
        rows = panel(number * BLOCK_N + lane, N, KIND != "")
        tile = unit_weights(weight, rows, k, K, step, BLOCK_K, EVEN_K)
        sums = step_sums(sums, tile, row_pieces(x_at, k, K, step, BLOCK_K, EVEN_K), WEIGHT_FIRST)
    if ((end - 1) % steps == 0) & (end - 1 > first):
        total = sums if WEIGHT_FIRST else tl.trans(sums)
        close(total, bias, out, partials, end - 1, first, steps, units, first_token, M, N, HAS_BIAS, KIND)
        sums = tl.zeros(shape, tl.float32)
    sums = step_sums(sums, late_tile, row_pieces(x_at, k, K, (end - 1) % steps, BLOCK_K, EVEN_K), WEIGHT_FIRST)
    total = sums if WEIGHT_FIRST else tl.trans(sums)
    whole = (last * steps >= first) & (end % steps == 0)
    if whole:
        finish_tile(total, bias, out, last, first_token, M, N, HAS_BIAS, KIND)
    else:
        leave(total, partials, last, steps, units)
    tl.debug_barrier()  # every thread's part is written before the counts say so
    if (opened < last) & (opened * steps < first):
        if arrive(arrivals, opened, steps, units):
            total = gathered(partials, arrivals, opened, steps, units, BLOCK_N, BLOCK_M)
            finish_tile(total, bias, out, opened, first_token, M, N, HAS_BIAS, KIND)
    if not whole:
        if arrive(arrivals, last, steps, units):
            total = gathered(partials, arrivals, last, steps, units, BLOCK_N, BLOCK_M)
            finish_tile(total, bias, out, last, first_token, M, N, HAS_BIAS, KIND)
