"""What attention kernels share: tiles of keys gathered through a block table, scores, one step of an online softmax.

A tile is BLOCK_N positions from a multiple of BLOCK_N. Scores are kept in units of log2: exp(x) = exp2(x / ln 2).
"""

from __future__ import annotations

import triton
from triton import language as tl

NEVER = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def block_ids(table, at, end, BLOCK_TOKENS: tl.constexpr):
    """table: one row; at [N] positions -> the int64 block id of each; 0, never to be read, from ``end`` on."""
    return tl.load(table + at // BLOCK_TOKENS, mask=at < end, other=0).to(tl.int64)


@triton.jit
def gather(
    base,
    ids,
    at,
    wanted,
    block_stride,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    MASKED: tl.constexpr,
    CACHE: tl.constexpr,
):
    """base: one head of a cache -> tile [N, PAD] of positions ``at`` [N]; zero beyond SIZE and, MASKED, where unwanted.

    Unwanted places may hold NaN, which a weight of zero would not silence.
    """
    columns = tl.arange(0, PAD)
    places = base + ids[:, None] * block_stride + ((at % BLOCK_TOKENS) * TOKEN_STRIDE)[:, None] + columns[None, :]
    if MASKED:
        if SIZE == PAD:
            return tl.load(places, mask=wanted[:, None], other=0.0, cache_modifier=CACHE)
        return tl.load(places, mask=wanted[:, None] & (columns < SIZE)[None, :], other=0.0, cache_modifier=CACHE)
    if SIZE == PAD:
        return tl.load(places, cache_modifier=CACHE)
    return tl.load(places, mask=(columns < SIZE)[None, :], other=0.0, cache_modifier=CACHE)


@triton.jit
def nothing_yet(BLOCK_M: tl.constexpr, DV_PAD: tl.constexpr):
    """Sums [M, DV], total [M] and top [M] before any key."""
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    return acc, tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)


@triton.jit
def scores_of(q, k, scale, cap, SOFT_CAPPED: tl.constexpr):
    """q [M, D], k [N, D] -> [M, N] float32 to be multiplied by ``factor_of``, which is positive."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFT_CAPPED:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        s = cap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E * scale / cap)) + 1.0))
    return s


@triton.jit
def factor_of(scale, SOFT_CAPPED: tl.constexpr):
    """What turns ``scores_of`` into units of log2."""
    if SOFT_CAPPED:
        factor = LOG2E
    else:
        factor = scale * LOG2E
    return factor


@triton.jit
def fold(acc, total, top, s, v, factor, GUARDED: tl.constexpr):
    """One step of an online softmax: acc [M, DV], total [M] and top [M] after scores s [M, N] of values v [N, DV].

    GUARDED: a query may have seen no key yet.
    """
    higher = tl.maximum(top, tl.max(s, 1) * factor)
    if GUARDED:
        level = tl.where(higher == NEVER, 0.0, higher)
    else:
        level = higher
    weights = tl.exp2(s * factor - level[:, None])
    decay = tl.exp2(top - level)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, total, higher


@triton.jit
def with_sink(total, top, sink):
    """Let a finite logit, in units of log2, join: -> the new total and what the sums are to be multiplied by."""
    level = tl.maximum(top, sink)
    decay = tl.exp2(top - level)
    return total * decay + tl.exp2(sink - level), decay


@triton.jit
def lse_of(total, top):
    """Log-sum-exp in units of log2; -inf of nothing."""
    return tl.where(total > 0.0, top + tl.log2(tl.where(total > 0.0, total, 1.0)), NEVER)
