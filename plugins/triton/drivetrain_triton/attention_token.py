"""Kernel of a decode step's whole attention: head norms, rotary positions, the cache's write, and attention of it."""

from __future__ import annotations

import triton
from triton import language as tl

from .attention_decode import finish
from .attention_tiles import NEVER, block_ids, factor_of, fold, gather, scores_of
from .attention_write import weighted
from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier


@triton.jit
def partner_of(columns, HALF: tl.constexpr, HALVES: tl.constexpr):
    """columns [D] -> the other column of each one's pair; of columns that are not rotated, any column of the head."""
    if HALVES:
        other = (columns + HALF) % (2 * HALF)
    else:
        other = (columns + 1 - 2 * (columns % 2)) % (2 * HALF)
    return other


@triton.jit
def turned(
    plain,
    other,
    weight,
    other_weight,
    cos,
    sin,
    columns,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALVES: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Heads [M, D], and the same with each column's partner in its place -> normed and rotated, rounded after each.

    Weights [M, D], cos and sin [D] of each column's pair. ROUND: norms round before their weight.
    """
    DTYPE: tl.constexpr = plain.dtype
    a, b = plain.to(tl.float32), other.to(tl.float32)
    if NORM:
        root = 1.0 / tl.sqrt(tl.sum(a * a, 1) / D + eps)
        a = weighted(a, root, weight, OFFSET, ROUND, DTYPE)
        b = weighted(b, root, other_weight, OFFSET, ROUND, DTYPE)
    if HALVES:
        first = columns < HALF
    else:
        first = columns % 2 == 0
    result = a * cos[None, :] + b * tl.where(first, -sin, sin)[None, :]
    if 2 * HALF < D:
        result = tl.where((columns < 2 * HALF)[None, :], result, a)
    return result.to(DTYPE)


@triton.jit
def begin_with(tile, value, holds, scale, cap, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SOFT_CAPPED: tl.constexpr):
    """Sums [M, DV], total [M] and top [M] of the new token alone, or where it is not held of nothing.

    tile [M, D]: rotated query heads, and in row GROUP the key, as the cache gives it; value [DV] float32 likewise.
    """
    wide = tile.to(tl.float32)
    key = tl.sum(tl.where((tl.arange(0, BLOCK_M) == GROUP)[:, None], wide, 0.0), 0)
    s = tl.sum(wide * key[None, :], 1)
    if SOFT_CAPPED:
        s = cap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * factor_of(scale, False) / cap)) + 1.0))
    top = tl.where(holds, s * factor_of(scale, SOFT_CAPPED), NEVER)
    total = tl.where(holds, 1.0, 0.0) + tl.zeros([BLOCK_M], tl.float32)
    acc = tl.where(holds, value, 0.0)[None, :] + tl.zeros([BLOCK_M, value.shape[0]], tl.float32)
    return acc, total, top


@triton.jit
def share_of_past(
    length,
    split,
    splits,
    WINDOW: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Which keys before a row's last one a share takes.

    -> how many there are; the first that is seen; the share's tiles, begin and end; and how many shares have any, of
    which the last, or the only one of a row without earlier keys, takes the new token too.
    """
    past = tl.maximum(length - 1, 0)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    first_tile, end_tile = first // BLOCK_N, tl.cdiv(past, BLOCK_N)
    if DIRECT:
        used, begin, end = 1, first_tile, end_tile
    else:
        share = tl.maximum(tl.cdiv(end_tile - first_tile, splits), 1)
        used = tl.maximum(tl.cdiv(end_tile - first_tile, share), 1)
        begin = first_tile + split * share
        end = tl.minimum(begin + share, end_tile)
    return past, first, begin, end, used


@triton.jit
def enter(
    x,
    cos,
    sin,
    w,
    other_w,
    heads,
    made,
    kv_head,
    holds,
    key_spot,
    value_spot,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALVES: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Make a token's query heads and key, and store its key and value where ``holds``.

    x, cos and sin: one token's; made [M, D]: which of the tile exist. -> the heads' tile [M, D] with the key in row
    GROUP, and the value [DV] float32, both as the cache gives them.
    """
    lane, columns, value_columns = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    pair = columns % HALF if HALVES else (columns // 2) % HALF
    plain = tl.load(x + heads[:, None] * D + columns[None, :], mask=made, other=0.0)
    other = tl.load(x + heads[:, None] * D + partner_of(columns, HALF, HALVES)[None, :], mask=made, other=0.0)
    value = tl.load(x + (HEADS + HEADS // GROUP + kv_head) * D + value_columns, mask=value_columns < DV, other=0.0)
    tile = turned(
        plain, other, w, other_w, tl.load(cos + pair), tl.load(sin + pair), columns, eps, D, HALF, HALVES, NORM,
        OFFSET, ROUND,
    )  # fmt: skip
    kept, stored = tile.to(key_spot.dtype.element_ty), value.to(value_spot.dtype.element_ty)
    spread = key_spot + columns[None, :] + lane[:, None] * 0
    tl.store(spread, kept, mask=made & (lane == GROUP)[:, None])  # the key's row is made only where it is held
    tl.store(value_spot + value_columns, stored, mask=(value_columns < DV) & holds)
    if key_spot.dtype.element_ty != x.dtype.element_ty:
        tile = tl.where((lane == GROUP)[:, None], kept.to(tile.dtype), tile)
    return tile, stored.to(tile.dtype).to(tl.float32)


@triton.jit
def attend_ahead(
    acc,
    total,
    top,
    q,
    k,
    v,
    seen,
    ids,
    at,
    begin,
    end,
    limit,
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
    SOFT_CAPPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Tiles begin .. end - 1, of which the first is k and v: each next one is asked for before one is used.

    ids and at [N]: of the second tile. Keys end at ``limit``.
    """
    for _ in range(begin, end):
        later = at < limit
        next_k = gather(keys, ids, at, later, key_stride, KEY_TOKEN, BLOCK_TOKENS, D, D_PAD, True, ".cg")
        next_v = gather(values, ids, at, later, value_stride, VALUE_TOKEN, BLOCK_TOKENS, DV, DV_PAD, True, ".cg")
        at += BLOCK_N
        ids = block_ids(table, at, limit, BLOCK_TOKENS)
        s = tl.where(seen[None, :], scores_of(q, k.to(q.dtype), scale, cap, SOFT_CAPPED), NEVER)
        acc, total, top = fold(acc, total, top, s, v.to(q.dtype), factor_of(scale, SOFT_CAPPED), False)
        k, v, seen = next_k, next_v, later
    return acc, total, top


@kernel
@triton.jit(do_not_specialize=["table_stride", "table_width"])
def token_kernel(
    out,
    partial,
    lse,
    arrivals,
    x,
    weight,
    cos,
    sin,
    keys,
    values,
    slots,
    lengths,
    tables,
    sinks,
    table_stride,
    table_width,
    x_stride,
    key_stride,
    value_stride,
    scale,
    cap,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALVES: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND: tl.constexpr,
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
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (KV heads, rows, splits): as ``decode_kernel``, of queries and one new token a row that it makes itself.

    x [rows, HEADS + 2 KV heads, D], innermost contiguous; weight [HEADS + KV heads, D]; cos, sin [rows, HALF] float32.
    Shares are of the keys before the new token. The program of a row's last share stores the new key and value and
    begins its sums with them, from registers: no program reads that slot, so none waits for another. The new key is
    one more row, number GROUP, of the query heads' tile. A row of no length stores nothing, and gives zeros.

    AHEAD: a share's first tile is asked for before the queries are made, and each next one before one is used, all in
    registers; else tiles go through shared memory, in stages. EARLY: what earlier steps and this step's
    preparation wrote is read before the wait. The next kernel begins after it (see ``overlap``).
    """
    if not EARLY:
        wait_for_earlier(OVERLAPS)
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, far = tl.num_programs(2), row.to(tl.int64)
    length, slot = tl.load(lengths + row), tl.load(slots + row).to(tl.int64)
    past, first, begin, end, used = share_of_past(length, split, splits, WINDOW, DIRECT, BLOCK_N)
    if not DIRECT:
        if split >= used:
            return
    holds = (split == used - 1) & (length > 0)
    table, limit = tables + far * table_stride, tl.minimum(past, end * BLOCK_N)
    at = begin * BLOCK_N + tl.arange(0, BLOCK_N)
    # The first ids of a whole row do not wait for its length.
    ids = block_ids(table, at, table_width * BLOCK_TOKENS if DIRECT and not WINDOW else past, BLOCK_TOKENS)
    key_base, value_base = keys + kv_head * KEY_HEAD, values + kv_head * VALUE_HEAD
    if AHEAD:
        seen = (at < past) & (at >= first) if WINDOW else at < past
        k = gather(key_base, ids, at, seen, key_stride, KEY_TOKEN, BLOCK_TOKENS, D, D_PAD, True, ".cg")
        v = gather(value_base, ids, at, seen, value_stride, VALUE_TOKEN, BLOCK_TOKENS, DV, DV_PAD, True, ".cg")
        at += BLOCK_N
        ids = block_ids(table, at, limit, BLOCK_TOKENS)

    lane, columns = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    heads = tl.where(lane < GROUP, kv_head * GROUP + lane, HEADS + kv_head)
    made = ((lane < GROUP) | ((lane == GROUP) & holds))[:, None] & (columns < D)[None, :]
    w, other_w = 0.0, 0.0
    if NORM:
        w = tl.load(weight + heads[:, None] * D + columns[None, :], mask=made, other=0.0)
        partner = partner_of(columns, HALF, HALVES)
        other_w = tl.load(weight + heads[:, None] * D + partner[None, :], mask=made, other=0.0)
    if EARLY:
        wait_for_earlier(OVERLAPS)
    let_next_begin(OVERLAPS)

    block, inside = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
    q, value = enter(
        x + far * x_stride, cos + far * HALF, sin + far * HALF, w, other_w, heads, made, kv_head, holds,
        key_base + block * key_stride + inside * KEY_TOKEN, value_base + block * value_stride + inside * VALUE_TOKEN,
        eps, HEADS, GROUP, D, DV, D_PAD, DV_PAD, HALF, HALVES, NORM, OFFSET, ROUND, BLOCK_M,
    )  # fmt: skip
    acc, total, top = begin_with(q, value, holds, scale, cap, GROUP, BLOCK_M, SOFT_CAPPED)
    if AHEAD:
        acc, total, top = attend_ahead(
            acc, total, top, q, k, v, seen, ids, at, begin, end, limit, table, key_base, value_base, key_stride,
            value_stride, scale, cap, D, DV, D_PAD, DV_PAD, BLOCK_TOKENS, KEY_TOKEN, VALUE_TOKEN, SOFT_CAPPED, BLOCK_N,
        )  # fmt: skip
    else:
        for _ in range(begin, end):
            seen = (at < limit) & (at >= first) if WINDOW else at < limit
            k = gather(key_base, ids, at, seen, key_stride, KEY_TOKEN, BLOCK_TOKENS, D, D_PAD, True, "")
            v = gather(value_base, ids, at, seen, value_stride, VALUE_TOKEN, BLOCK_TOKENS, DV, DV_PAD, True, "")
            at += BLOCK_N
            ids = block_ids(table, at, limit, BLOCK_TOKENS)  # a tile ahead of its use
            s = tl.where(seen[None, :], scores_of(q, k.to(q.dtype), scale, cap, SOFT_CAPPED), NEVER)
            acc, total, top = fold(acc, total, top, s, v.to(q.dtype), factor_of(scale, SOFT_CAPPED), False)
    finish(
        out, partial, lse, arrivals, sinks, acc, total, top, row, kv_head, split, used, splits, HEADS, GROUP,
        GROUP_PAD, DV, DV_PAD, BLOCK_M, SINKS, MOST, CHUNK, DIRECT,
    )  # fmt: skip
