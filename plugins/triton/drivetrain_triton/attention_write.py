"""Kernels that fill the cache: keys and values as they are, or made from the qkv product on the way."""

from __future__ import annotations

import triton
from triton import language as tl

from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier


@kernel
@triton.jit
def write_kernel(
    k,
    v,
    keys,
    values,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    key_stride,
    value_stride,
    KV_HEADS: tl.constexpr,
    KV_PAD: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (tokens): k [T, KV_HEADS, D] and v [T, KV_HEADS, DV], innermost contiguous, to their slots.

    The next kernel begins only when those ahead of this one have ended: see ``overlap``.
    """
    token = tl.program_id(0).to(tl.int64)
    heads, columns, value_columns = tl.arange(0, KV_PAD), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    wait_for_earlier(OVERLAPS)
    let_next_begin(OVERLAPS)
    slot = tl.load(slots + token).to(tl.int64)
    block, inside = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
    mask = (heads < KV_HEADS)[:, None] & (columns < D)[None, :]
    key = tl.load(k + token * k_token + heads[:, None] * k_head + columns[None, :], mask=mask)
    place = keys + block * key_stride + inside * KEY_TOKEN + heads[:, None] * KEY_HEAD + columns[None, :]
    tl.store(place, key.to(keys.dtype.element_ty), mask=mask)
    mask = (heads < KV_HEADS)[:, None] & (value_columns < DV)[None, :]
    value = tl.load(v + token * v_token + heads[:, None] * v_head + value_columns[None, :], mask=mask)
    place = values + block * value_stride + inside * VALUE_TOKEN + heads[:, None] * VALUE_HEAD + value_columns[None, :]
    tl.store(place, value.to(values.dtype.element_ty), mask=mask)


@triton.jit
def put(
    x,
    columns,
    wanted,
    head,
    q,
    keys,
    values,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    D: tl.constexpr,
):
    """Store x [heads, columns]: query heads to q, key and value heads to the cache. Each pointer is of one token."""
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = head >= HEADS + KV_HEADS
    spread = columns[None, :]
    at = q + head[:, None] * D + spread
    tl.store(at, x.to(q.dtype.element_ty), mask=wanted & (head < HEADS)[:, None])
    at = keys + (head - HEADS)[:, None] * KEY_HEAD + spread
    tl.store(at, x.to(keys.dtype.element_ty), mask=wanted & is_key[:, None])
    at = values + (head - HEADS - KV_HEADS)[:, None] * VALUE_HEAD + spread
    tl.store(at, x.to(values.dtype.element_ty), mask=wanted & is_value[:, None])


@triton.jit
def weighted(x, root, weight, OFFSET: tl.constexpr, EARLY: tl.constexpr, DTYPE: tl.constexpr):
    """x [heads, n] float32 times root [heads], times (weight + OFFSET), rounded as the norm alone rounds; float32."""
    x = x * root[:, None]
    if EARLY:
        scale = weight.to(tl.float32)
        if OFFSET != 0.0:
            scale = (scale + OFFSET).to(DTYPE).to(tl.float32)
        result = x.to(DTYPE).to(tl.float32) * scale
    else:
        result = x * (weight.to(tl.float32) + OFFSET)
    return result.to(DTYPE).to(tl.float32)


@kernel
@triton.jit
def rotate_kernel(
    q,
    x,
    weight,
    cos,
    sin,
    keys,
    values,
    slots,
    x_stride,
    key_stride,
    value_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    PAIR_STEP: tl.constexpr,
    PAIR_GAP: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LATE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """x [T, HEADS + 2 KV_HEADS, D] -> q, and k and v in the cache. Programs: parts of BLOCK_H heads, token after token,
    on one axis: a grid's others end at 65535.

    Pair i of the HALF rotated pairs is (PAIR_STEP i, PAIR_STEP i + PAIR_GAP); REST_PAD covers the D - 2 HALF
    dimensions after them, 0 where there are none. Value heads pass as they are.

    LATE: the next kernel begins only when those ahead of this one have ended: see ``overlap``.
    """
    if not LATE:
        let_next_begin(OVERLAPS)
    PARTS: tl.constexpr = (HEADS + 2 * KV_HEADS + BLOCK_H - 1) // BLOCK_H
    head = tl.program_id(0) % PARTS * BLOCK_H + tl.arange(0, BLOCK_H)
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    inside = head < HEADS + 2 * KV_HEADS
    turns = head < HEADS + KV_HEADS
    pair = tl.arange(0, HALF_PAD)
    one, two = pair * PAIR_STEP, pair * PAIR_STEP + PAIR_GAP
    paired = inside[:, None] & (pair < HALF)[None, :]
    weighed = turns[:, None] & (pair < HALF)[None, :]
    if NORM:
        weight_a = tl.load(weight + head[:, None] * D + one[None, :], mask=weighed, other=0.0)
        weight_b = tl.load(weight + head[:, None] * D + two[None, :], mask=weighed, other=0.0)
    wait_for_earlier(OVERLAPS)
    if LATE:
        let_next_begin(OVERLAPS)

    x += token * x_stride
    q += token * (HEADS * D)
    slot = tl.load(slots + token).to(tl.int64)
    keys += (slot // BLOCK_TOKENS) * key_stride + (slot % BLOCK_TOKENS) * KEY_TOKEN
    values += (slot // BLOCK_TOKENS) * value_stride + (slot % BLOCK_TOKENS) * VALUE_TOKEN
    a = tl.load(x + head[:, None] * D + one[None, :], mask=paired, other=0.0).to(tl.float32)
    b = tl.load(x + head[:, None] * D + two[None, :], mask=paired, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    if REST_PAD:
        rest = 2 * HALF + tl.arange(0, REST_PAD)
        kept = inside[:, None] & (rest < D)[None, :]
        r = tl.load(x + head[:, None] * D + rest[None, :], mask=kept, other=0.0).to(tl.float32)
    raw_a, raw_b = a, b
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST_PAD:
            squares += tl.sum(r * r, 1)
        root = 1.0 / tl.sqrt(squares / D + eps)
        a = weighted(a, root, weight_a, OFFSET, EARLY, x.dtype.element_ty)
        b = weighted(b, root, weight_b, OFFSET, EARLY, x.dtype.element_ty)
        if REST_PAD:
            weight_r = tl.load(
                weight + head[:, None] * D + rest[None, :], mask=turns[:, None] & (rest < D)[None, :], other=0.0
            )
            normed = weighted(r, root, weight_r, OFFSET, EARLY, x.dtype.element_ty)
            r = tl.where(turns[:, None], normed, r)
    turned_a = tl.where(turns[:, None], a * c - b * s, raw_a)
    turned_b = tl.where(turns[:, None], b * c + a * s, raw_b)
    put(turned_a, one, paired, head, q, keys, values, HEADS, KV_HEADS, KEY_HEAD, VALUE_HEAD, D)
    put(turned_b, two, paired, head, q, keys, values, HEADS, KV_HEADS, KEY_HEAD, VALUE_HEAD, D)
    if REST_PAD:
        put(r, rest, kept, head, q, keys, values, HEADS, KV_HEADS, KEY_HEAD, VALUE_HEAD, D)
