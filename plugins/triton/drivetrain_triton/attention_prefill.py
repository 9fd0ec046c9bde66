"""Kernel of paged attention with any number of query tokens a row."""

from __future__ import annotations

import triton
from triton import language as tl

from .attention_tiles import LOG2E, NEVER, block_ids, factor_of, fold, gather, lse_of, nothing_yet, scores_of, with_sink
from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier


@triton.jit
def row_of_tile(query_start, tile, rows, base, BLOCK_Q: tl.constexpr):
    """Return the row whose query tiles hold number ``tile``: row r's begin at (query_start[r] - base) // BLOCK_Q + r.

    That leaves each row at least as many tiles as it needs, and at most one too many.
    """
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(query_start + middle) - base) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def attend(
    acc,
    total,
    top,
    q_tile,
    begin,
    end,
    positions,
    length,
    first,
    table,
    keys,
    values,
    key_stride,
    value_stride,
    scale,
    cap,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFT_CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Tiles begin .. end - 1 of one row's keys. Not MASKED: every query of the tile sees every key of them."""
    factor = factor_of(scale, SOFT_CAPPED)
    at = begin * BLOCK_N + tl.arange(0, BLOCK_N)
    ids = block_ids(table, at, length, BLOCK_TOKENS)
    for _ in range(begin, end):
        there = (at < length) & (at >= first)
        k = gather(keys, ids, at, there, key_stride, KEY_TOKEN, BLOCK_TOKENS, D, D_PAD, MASKED, "")
        v = gather(values, ids, at, there, value_stride, VALUE_TOKEN, BLOCK_TOKENS, DV, DV_PAD, MASKED, "")
        s = scores_of(q_tile, k.to(q_tile.dtype), scale, cap, SOFT_CAPPED)
        if MASKED:
            seen = there[None, :]
            if CAUSAL:
                seen = seen & (at[None, :] <= positions[:, None])
            if WINDOW:
                seen = seen & (at[None, :] > positions[:, None] - WINDOW)
            s = tl.where(seen, s, NEVER)
        at += BLOCK_N
        ids = block_ids(table, at, length, BLOCK_TOKENS)  # a tile ahead of its use
        acc, total, top = fold(acc, total, top, s, v.to(q_tile.dtype), factor, MASKED)
    return acc, total, top


@triton.jit
def share_of(
    low,
    high,
    length,
    split,
    splits,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Which keys the queries at positions low .. high see, and which tiles of them a share takes.

    -> the first key; the share's tiles, begin and end.
    """
    first = tl.maximum(low - WINDOW + 1, 0) if WINDOW else length * 0
    last = tl.minimum(tl.maximum(high + 1, 0), length) if CAUSAL else length
    first_tile, end_tile = first // BLOCK_N, tl.cdiv(last, BLOCK_N)
    share = tl.cdiv(end_tile - first_tile, splits)
    begin = first_tile + split * share
    end = tl.minimum(begin + share, end_tile)
    return first, begin, end


@triton.jit
def sum_tiles(
    q_tile, begin, end, low, high, positions, length, first, table, keys, values, key_stride, value_stride, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    KEY_TOKEN: tl.constexpr, VALUE_TOKEN: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    SOFT_CAPPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums over tiles begin .. end - 1 of keys, for queries at positions low .. high. Only the tiles that not all of
    them see whole, before inner and from outer on, are masked."""
    inner = tl.cdiv(tl.maximum(high - WINDOW + 1, 0), BLOCK_N) if WINDOW else begin
    outer = (tl.minimum(tl.maximum(low + 1, 0), length) if CAUSAL else length) // BLOCK_N
    inner = tl.minimum(tl.maximum(inner, begin), tl.maximum(end, begin))
    outer = tl.minimum(tl.maximum(outer, inner), tl.maximum(end, inner))
    acc, total, top = nothing_yet(BLOCK_M, DV_PAD)
    if WINDOW:
        acc, total, top = attend(
            acc, total, top, q_tile, begin, inner, positions, length, first, table, keys, values, key_stride,
            value_stride, scale, cap, D, DV, D_PAD, DV_PAD, BLOCK_TOKENS, KEY_TOKEN, VALUE_TOKEN, WINDOW, CAUSAL,
            SOFT_CAPPED, True, BLOCK_N,
        )  # fmt: skip
    acc, total, top = attend(
        acc, total, top, q_tile, inner, outer, positions, length, first, table, keys, values, key_stride,
        value_stride, scale, cap, D, DV, D_PAD, DV_PAD, BLOCK_TOKENS, KEY_TOKEN, VALUE_TOKEN, WINDOW, CAUSAL,
        SOFT_CAPPED, False, BLOCK_N,
    )  # fmt: skip
    acc, total, top = attend(
        acc, total, top, q_tile, outer, end, positions, length, first, table, keys, values, key_stride,
        value_stride, scale, cap, D, DV, D_PAD, DV_PAD, BLOCK_TOKENS, KEY_TOKEN, VALUE_TOKEN, WINDOW, CAUSAL,
        SOFT_CAPPED, True, BLOCK_N,
    )  # fmt: skip
    return acc, total, top


@kernel
@triton.jit(
    do_not_specialize=["table_stride", "rows", "base", "tiles"],
    do_not_specialize_on_alignment=["query_start", "lengths", "tables"],  # they begin behind any number of decode rows
)
def prefill_kernel(
    out,
    partial,
    lse,
    q,
    keys,
    values,
    query_start,
    lengths,
    tables,
    sinks,
    rows,
    base,
    tiles,
    table_stride,
    q_stride,
    key_stride,
    value_stride,
    scale,
    cap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFT_CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (tiles, KV heads, splits): BLOCK_Q query tokens times the GROUP heads of one KV head, BLOCK_M rows of a dot.

    ``query_start``, ``lengths`` and ``tables`` begin at the first of ``rows``, whose first token is ``base``. Late
    tiles, which see the most keys, run first. Writes out [tokens, HEADS, DV], or its parts (not DIRECT) as
    ``decode_kernel`` does, token ``base`` first; of a share without keys only that its lse is -inf.
    """
    let_next_begin(OVERLAPS)
    tile, kv_head = tiles - 1 - tl.program_id(0), tl.program_id(1)
    split, splits = tl.program_id(2), tl.num_programs(2)
    lane = tl.arange(0, BLOCK_M)
    heads, columns = kv_head * GROUP + lane % GROUP, tl.arange(0, D_PAD)
    wait_for_earlier(OVERLAPS)
    row = row_of_tile(query_start, tile, rows, base, BLOCK_Q)
    row_begin, row_end = tl.load(query_start + row), tl.load(query_start + row + 1)
    begin_token = row_begin + (tile - (row_begin - base) // BLOCK_Q - row) * BLOCK_Q
    if begin_token >= row_end:
        return
    length = tl.load(lengths + row)
    tokens = begin_token + lane // GROUP
    real = (tokens < row_end) & (lane < BLOCK_Q * GROUP)
    positions = length - row_end + tokens
    low = length - row_end + begin_token  # the positions of the tile's first and last query
    high = length - row_end + tl.minimum(begin_token + BLOCK_Q, row_end) - 1
    first, begin, end = share_of(low, high, length, split, splits, WINDOW, CAUSAL, BLOCK_N)
    place = (((tokens - base) * HEADS + heads) * splits + split).to(tl.int64)
    if not DIRECT:
        if begin >= end:  # a share that the tile does not have: nobody reads its sums
            tl.store(lse + place, tl.full([BLOCK_M], NEVER, tl.float32), mask=real)
            return

    q_tile = tl.load(
        q + tokens.to(tl.int64)[:, None] * q_stride + heads[:, None] * D + columns[None, :],
        mask=real[:, None] & (columns < D)[None, :],
        other=0.0,
    )
    table = tables + row.to(tl.int64) * table_stride
    keys, values = keys + kv_head * KEY_HEAD, values + kv_head * VALUE_HEAD
    acc, total, top = sum_tiles(
        q_tile, begin, end, low, high, positions, length, first, table, keys, values, key_stride, value_stride, scale,
        cap, D, DV, D_PAD, DV_PAD, BLOCK_TOKENS, KEY_TOKEN, VALUE_TOKEN, WINDOW, CAUSAL, SOFT_CAPPED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if DIRECT:
        if SINKS:
            sink = tl.load(sinks + heads).to(tl.float32) * LOG2E
            total, decay = with_sink(total, top, sink)
            acc = acc * decay[:, None]
        target = out + (tokens.to(tl.int64) * HEADS + heads)[:, None] * DV
    else:
        tl.store(lse + place, lse_of(total, top), mask=real)
        target = partial + place[:, None] * DV
    result, columns = acc / tl.where(total > 0.0, total, 1.0)[:, None], tl.arange(0, DV_PAD)
    tl.store(target + columns[None, :], result.to(target.dtype.element_ty), real[:, None] & (columns < DV)[None, :])
