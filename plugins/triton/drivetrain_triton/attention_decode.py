"""Kernels of paged attention with one query token a row, and of putting parts of a row together."""

from __future__ import annotations

import triton
from triton import language as tl

from .attention_tiles import LOG2E, NEVER, block_ids, factor_of, fold, gather, lse_of, nothing_yet, scores_of, with_sink
from .overlap import let_next_begin, wait_for_earlier


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    out,
    partial,
    lse,
    q,
    keys,
    values,
    lengths,
    tables,
    sinks,
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
    SOFT_CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (KV heads, rows, splits): the GROUP query heads of one KV head against one share of a row's keys.

    DIRECT (one split): writes out [rows, HEADS, DV]. Else partial [rows, HEADS, splits, DV] float32, each share
    normalised by itself, and lse [rows, HEADS, splits]; -inf where a share is empty, whose partial stays unwritten.
    Shares are whole tiles: ceil(tiles of the row / splits).
    """
    let_next_begin(OVERLAPS)
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    group = tl.arange(0, BLOCK_M)
    real = group < GROUP
    heads = kv_head * GROUP + group
    wait_for_earlier(OVERLAPS)

    length = tl.load(lengths + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else length * 0
    first_tile, end_tile = first // BLOCK_N, tl.cdiv(length, BLOCK_N)
    share = tl.cdiv(end_tile - first_tile, splits)
    begin = first_tile + split * share
    end = tl.minimum(begin + share, end_tile)
    if not DIRECT:
        if begin >= end:
            tl.store(lse + (row * HEADS + heads) * splits + split, NEVER, mask=real)
            return

    columns = tl.arange(0, D_PAD)
    q_tile = tl.load(
        q + row.to(tl.int64) * q_stride + heads[:, None] * D + columns[None, :],
        mask=real[:, None] & (columns < D)[None, :],
        other=0.0,
    )
    table = tables + row.to(tl.int64) * table_stride
    keys += kv_head * KEY_HEAD
    values += kv_head * VALUE_HEAD
    factor = factor_of(scale, SOFT_CAPPED)
    acc, total, top = nothing_yet(BLOCK_M, DV_PAD)
    at = begin * BLOCK_N + tl.arange(0, BLOCK_N)
    ids = block_ids(table, at, length, BLOCK_TOKENS)
    for _ in range(begin, end):
        seen = at < length
        if WINDOW:
            seen = seen & (at >= first)
        k = gather(keys, ids, at, seen, key_stride, KEY_TOKEN, BLOCK_TOKENS, D, D_PAD, True)
        v = gather(values, ids, at, seen, value_stride, VALUE_TOKEN, BLOCK_TOKENS, DV, DV_PAD, True)
        at += BLOCK_N
        ids = block_ids(table, at, length, BLOCK_TOKENS)  # a tile ahead of its use
        s = scores_of(q_tile, k.to(q_tile.dtype), scale, cap, SOFT_CAPPED)
        s = tl.where(seen[None, :], s, NEVER)
        acc, total, top = fold(acc, total, top, s, v.to(q_tile.dtype), factor, False)

    if DIRECT:
        if SINKS:
            sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * LOG2E
            total, decay = with_sink(total, top, sink)
            acc = acc * decay[:, None]
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        target = out + row.to(tl.int64) * (HEADS * DV) + heads[:, None] * DV
    else:
        tl.store(lse + (row * HEADS + heads) * splits + split, lse_of(total, top), mask=real)
        result = acc / total[:, None]
        target = partial + ((row * HEADS + heads) * splits + split)[:, None] * DV
    columns = tl.arange(0, DV_PAD)
    tl.store(target + columns[None, :], result.to(target.dtype.element_ty), real[:, None] & (columns < DV)[None, :])


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    out,
    partial,
    lse,
    sinks,
    splits,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (query tokens, HEADS): out [tokens, HEADS, DV] from partial [tokens, HEADS, splits, DV] and lse."""
    let_next_begin(OVERLAPS)
    token, head = tl.program_id(0), tl.program_id(1)
    each, columns = tl.arange(0, SPLITS_PAD), tl.arange(0, DV_PAD)
    wait_for_earlier(OVERLAPS)
    place = (token * HEADS + head).to(tl.int64)
    part = tl.load(lse + place * splits + each, mask=each < splits, other=NEVER)
    top = tl.max(part, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == NEVER, 0.0, top)
    weights = tl.exp2(part - top)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    full = part > NEVER  # NaN, from a poisoned input, is treated as a share like others below
    full = full | (part != part)
    values = tl.load(
        partial + (place * splits + each)[:, None] * DV + columns[None, :],
        mask=full[:, None] & (columns < DV)[None, :],
        other=0.0,
    )
    result = tl.sum(values * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * DV + columns, result.to(out.dtype.element_ty), mask=columns < DV)
