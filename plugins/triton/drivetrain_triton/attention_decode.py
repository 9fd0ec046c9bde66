"""Kernels of paged attention with one query token a row, and of putting parts of a row together."""

from __future__ import annotations

import triton
from triton import language as tl

from .attention_tiles import LOG2E, NEVER, block_ids, factor_of, fold, gather, lse_of, nothing_yet, scores_of, with_sink
from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier


@triton.jit
def write_alone(
    out,
    sinks,
    acc,
    total,
    top,
    row,
    kv_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Write acc [BLOCK_M, DV] of all keys, divided by total [BLOCK_M]: zero of no keys."""
    lane, columns = tl.arange(0, BLOCK_M), tl.arange(0, DV_PAD)
    heads = kv_head * GROUP + lane
    if SINKS:
        sink = tl.load(sinks + heads, mask=lane < GROUP, other=0.0).to(tl.float32) * LOG2E
        total, decay = with_sink(total, top, sink)
        acc = acc * decay[:, None]
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    at = out + row.to(tl.int64) * (HEADS * DV) + heads[:, None] * DV + columns[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(lane < GROUP)[:, None] & (columns < DV)[None, :])


@triton.jit
def write_together(
    out,
    partial,
    lse,
    arrivals,
    sinks,
    acc,
    total,
    top,
    row,
    kv_head,
    split,
    used,
    splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SINKS: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Leave one of ``used`` shares; the program that leaves the last adds them all, in their order, and writes out.

    acc [BLOCK_M, DV], total and top [BLOCK_M] of this share, of ``splits`` for which there is room.
    """
    lane, columns = tl.arange(0, BLOCK_M), tl.arange(0, DV_PAD)
    place = ((row * HEADS + kv_head * GROUP + lane) * splits + split).to(tl.int64)
    tl.store(lse + place, lse_of(total, top), mask=lane < GROUP)
    mine = (lane < GROUP)[:, None] & (columns < DV)[None, :]
    tl.store(partial + place[:, None] * DV + columns[None, :], acc / total[:, None], mask=mine)
    tl.debug_barrier()  # every thread's part is written before the count says so
    arrived = arrivals + row * (HEADS // GROUP) + kv_head
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == used - 1:
        tl.store(arrived, 0)
        group, every = tl.arange(0, GROUP_PAD), tl.arange(0, MOST)
        heads = kv_head * GROUP + group
        base = ((row * HEADS + heads) * splits).to(tl.int64)
        there = (group < GROUP)[:, None] & (every < used)[None, :]
        peaks = tl.load(lse + base[:, None] + every[None, :], mask=there, other=NEVER, cache_modifier=".cg")
        level = tl.max(peaks, 1)
        if SINKS:
            sink = tl.load(sinks + heads, mask=group < GROUP, other=0.0).to(tl.float32) * LOG2E
            level = tl.maximum(level, sink)
        level = tl.where(level == NEVER, 0.0, level)
        whole = tl.sum(tl.exp2(peaks - level[:, None]), 1)
        if SINKS:
            whole += tl.exp2(sink - level)
        result = tl.zeros([GROUP_PAD, DV_PAD], tl.float32)
        for start in range(0, used, CHUNK):
            some = start + tl.arange(0, CHUNK)
            full = (group < GROUP)[:, None] & (some < used)[None, :]
            spot = base[:, None] + some[None, :]
            peak = tl.load(lse + spot, mask=full, other=NEVER, cache_modifier=".cg")
            parts = tl.load(
                partial + spot[:, :, None] * DV + columns[None, None, :],
                mask=full[:, :, None] & (columns < DV)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            result += tl.sum(parts * tl.exp2(peak - level[:, None])[:, :, None], 1)
        result = result / tl.where(whole == 0.0, 1.0, whole)[:, None]
        at = out + row.to(tl.int64) * (HEADS * DV) + heads[:, None] * DV + columns[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=(group < GROUP)[:, None] & (columns < DV)[None, :])


@triton.jit
def finish(
    out,
    partial,
    lse,
    arrivals,
    sinks,
    acc,
    total,
    top,
    row,
    kv_head,
    split,
    used,
    splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SINKS: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Write a row's sums out: alone where its keys are one share, which DIRECT says of every row, else together."""
    if DIRECT:
        write_alone(out, sinks, acc, total, top, row, kv_head, HEADS, GROUP, DV, DV_PAD, BLOCK_M, SINKS)
    else:
        if used > 1:
            write_together(
                out, partial, lse, arrivals, sinks, acc, total, top, row, kv_head, split, used, splits, HEADS, GROUP,
                GROUP_PAD, DV, DV_PAD, BLOCK_M, SINKS, MOST, CHUNK,
            )  # fmt: skip
        else:
            write_alone(out, sinks, acc, total, top, row, kv_head, HEADS, GROUP, DV, DV_PAD, BLOCK_M, SINKS)


@kernel
@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    out,
    partial,
    lse,
    arrivals,
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
    GROUP_PAD: tl.constexpr,
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
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (KV heads, rows, splits): the GROUP query heads of one KV head against one share of a row's keys.

    Writes out [rows, HEADS, DV]. Shares are whole tiles: ceil(tiles of the row / splits). Unless DIRECT (one split),
    they meet in partial [rows, HEADS, splits, DV] and lse [rows, HEADS, splits], both float32, and are counted in
    arrivals [rows, KV heads] int32, zero before and after; programs beyond the shares that a row has end at once.

    EARLY: lengths and tables are read before the wait (see ``overlap``).
    """
    let_next_begin(OVERLAPS)
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    group = tl.arange(0, BLOCK_M)
    real = group < GROUP
    heads = kv_head * GROUP + group
    if not EARLY:
        wait_for_earlier(OVERLAPS)

    length = tl.load(lengths + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else length * 0
    first_tile, end_tile = first // BLOCK_N, tl.cdiv(length, BLOCK_N)
    share = tl.maximum(tl.cdiv(end_tile - first_tile, splits), 1)
    begin = first_tile + split * share
    end = tl.minimum(begin + share, end_tile)
    if not DIRECT:
        if split > 0 and begin >= end:
            return

    table = tables + row.to(tl.int64) * table_stride
    keys += kv_head * KEY_HEAD
    values += kv_head * VALUE_HEAD
    at = begin * BLOCK_N + tl.arange(0, BLOCK_N)
    ids = block_ids(table, at, length, BLOCK_TOKENS)
    if EARLY:
        wait_for_earlier(OVERLAPS)

    columns = tl.arange(0, D_PAD)
    q_tile = tl.load(
        q + row.to(tl.int64) * q_stride + heads[:, None] * D + columns[None, :],
        mask=real[:, None] & (columns < D)[None, :],
        other=0.0,
    )
    factor = factor_of(scale, SOFT_CAPPED)
    acc, total, top = nothing_yet(BLOCK_M, DV_PAD)
    for _ in range(begin, end):
        seen = at < length
        if WINDOW:
            seen = seen & (at >= first)
        k = gather(keys, ids, at, seen, key_stride, KEY_TOKEN, BLOCK_TOKENS, D, D_PAD, True, "")
        v = gather(values, ids, at, seen, value_stride, VALUE_TOKEN, BLOCK_TOKENS, DV, DV_PAD, True, "")
        at += BLOCK_N
        ids = block_ids(table, at, length, BLOCK_TOKENS)  # a tile ahead of its use
        s = scores_of(q_tile, k.to(q_tile.dtype), scale, cap, SOFT_CAPPED)
        s = tl.where(seen[None, :], s, NEVER)
        acc, total, top = fold(acc, total, top, s, v.to(q_tile.dtype), factor, False)

    finish(
        out, partial, lse, arrivals, sinks, acc, total, top, row, kv_head, split,
        tl.cdiv(end_tile - first_tile, share), splits, HEADS, GROUP, GROUP_PAD, DV, DV_PAD, BLOCK_M, SINKS, MOST,
        CHUNK, DIRECT,
    )  # fmt: skip


@kernel
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
