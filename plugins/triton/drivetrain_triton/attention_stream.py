"""Kernel of paged attention for long prompts with heads of 128: bulk copies bring keys and values, two groups of warps
attend.

One warp asks for a tile's blocks through the block table, stage after stage; two groups of four warps take 64 query
rows each and wait for what has come, each at its own pace, so that one's exponentials run beside the other's products.
Written in Gluon; for compute capability 9.0. Meaning, tiles of queries and order are ``attention_prefill``'s.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from drivetrain_triton.launch import kernel

together = getattr(gl, "barrier", None) or gl.thread_barrier  # the older name is Triton 3.6's
ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
WIDTH, BLOCK = 128, 16  # a head's elements; tokens of a cache block
LOG2E = gl.constexpr(1.4426950408889634)
PAGE = gl.constexpr(16)
HEAD = gl.constexpr(128)
KEYS = gl.constexpr(128)  # of a tile
HALF = gl.constexpr(64)  # query rows of one group of warps
PAGES = gl.constexpr(8)
PIECE = gl.constexpr(8)  # rows that one warp cleans at a time


@lru_cache(maxsize=8)
def layout_of(dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile of keys, values or queries lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([BLOCK, WIDTH], ELEMENTS[dtype])


def fits(part: torch.Tensor) -> bool:
    """Whether a cache part [blocks, tokens, heads, size] can be brought by bulk copies of a block and head."""
    _, tokens, heads, size = part.shape
    rows = tokens == BLOCK and size == WIDTH and part.stride()[1:] == (heads * size, size, 1)
    return rows and part.dtype in ELEMENTS and part.stride(0) % part.stride(1) == 0 and part.data_ptr() % 16 == 0


def boxes(part: torch.Tensor) -> TensorDescriptor:
    """Describe a cache part as rows of all heads of a token, in boxes of one block and head."""
    row = part.stride(1)
    count = (part.shape[0] - 1) * (part.stride(0) // row) + BLOCK
    return TensorDescriptor(part, [count, row], [row, 1], [BLOCK, WIDTH], layout_of(part.dtype))


@gluon.jit
def row_of_tile(query_start, tile, rows, base, BLOCK_Q: gl.constexpr):
    """As ``attention_prefill.row_of_tile``."""
    low = rows * 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        before = (gl.load(query_start + middle) - base) // BLOCK_Q + middle <= tile
        low = gl.where(before, middle, low)
        high = gl.where(before, high, middle)
    return low


@gluon.jit
def ask(part, table, tile, last_page, ready, ring, kv_head, RATIO: gl.constexpr):
    """Ask for the blocks of one tile; past the row's last page that page again."""
    at = tile * PAGES
    for page in gl.static_range(PAGES):
        block = gl.load(table + gl.minimum(at + page, last_page))
        spot = [block * RATIO, kv_head * HEAD]
        tma.async_copy_global_to_shared(part, spot, ready, ring.slice(page * PAGE, PAGE))


@gluon.jit
def clean(ring, valid):
    """Zero the values of a tile from row ``valid`` on: they may be NaN, which a weight of zero would not silence."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    rows = gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
    for number in gl.static_range(KEYS // PIECE):
        if (number + 1) * PIECE > valid:
            piece = ring.slice(number * PIECE, PIECE)
            values = piece.load(layout)
            kept = gl.expand_dims(rows + number * PIECE < valid, 1)
            piece.store(gl.where(kept, values, 0.0).to(ring.dtype))


@gluon.jit
def bring(keys, values, table, end, length, kv_head, k_ring, v_ring, k_full, k_empty, v_full, v_empty, tail,
          KEY_RATIO: gl.constexpr, VALUE_RATIO: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The copying warp: tiles 0 .. end - 1 of a row of ``length`` keys."""
    BYTES: gl.constexpr = KEYS * HEAD * 2
    last_page = (length - 1) // PAGE
    stage = end * 0
    phase = end * 0
    for tile in range(end):
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), BYTES)
        ask(keys, table, tile, last_page, k_full.index(stage), k_ring.index(stage), kv_head, KEY_RATIO)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        valid = length - tile * KEYS
        if valid >= KEYS:
            mbarrier.expect(v_full.index(stage), BYTES)
            ask(values, table, tile, last_page, v_full.index(stage), v_ring.index(stage), kv_head, VALUE_RATIO)
        else:
            mbarrier.expect(tail, BYTES)
            ask(values, table, tile, last_page, tail, v_ring.index(stage), kv_head, VALUE_RATIO)
            mbarrier.wait(tail, 0)
            clean(v_ring.index(stage), valid)
            hopper.fence_async_shared()
            together()
            mbarrier.arrive(v_full.index(stage), count=1)
        wrapped = stage + 1 == STAGES
        stage = gl.where(wrapped, 0, stage + 1)
        phase = gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def scores(q, k, k_full, phase):
    """Begin q [HALF, HEAD] times k [KEYS, HEAD] transposed, once the keys have come."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    zeros = gl.zeros([HALF, KEYS], gl.float32, layout)
    mbarrier.wait(k_full, phase)
    return hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def weigh(s, total, top, positions, at, factor, dtype: gl.constexpr, MASKED: gl.constexpr):
    """One step of an online softmax over scores s [HALF, KEYS] of keys from ``at`` on: the weights as the left side of
    a product, the new total and top [HALF], and what earlier sums are to be multiplied by."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    if MASKED:
        seen = at + gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
        s = gl.where(gl.expand_dims(seen, 0) <= gl.expand_dims(positions, 1), s, float("-inf"))
    higher = gl.maximum(top, gl.max(s, axis=1) * factor)
    level = gl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = gl.exp2(s * factor - gl.expand_dims(level, 1))
    decay = gl.exp2(top - level)
    total = total * decay + gl.sum(weights, axis=1)
    return gl.convert_layout(weights.to(dtype), left), total, higher, decay


@gluon.jit
def advance(acc, total, top, p, q, k_ring, v_ring, k_full, k_empty, v_full, v_empty, tile, positions, factor,
            MASKED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The scores of tile ``tile`` and, right behind them, the values of the one before, whose weights are p."""
    now = tile % STAGES
    then = (tile - 1) % STAGES
    s = scores(q, k_ring.index(now), k_full.index(now), (tile // STAGES) & 1)
    mbarrier.wait(v_full.index(then), ((tile - 1) // STAGES) & 1)
    acc = hopper.warpgroup_mma(p, v_ring.index(then), acc, is_async=True)
    s = hopper.warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(now), count=1)
    p, total, top, decay = weigh(s, total, top, positions, tile * KEYS, factor, v_ring.dtype, MASKED)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(then), count=1)
    return acc * gl.expand_dims(decay, 1), total, top, p


@gluon.jit
def take(q, out, q_shared, k_ring, v_ring, k_full, k_empty, v_full, v_empty, end, outer, begin_token, row_end, length,
         kv_head, q_stride, scale, WHICH: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
         BLOCK_Q: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A group of four warps: rows WHICH * HALF on of the tile of queries against tiles 0 .. end - 1 of keys; from
    ``outer`` on some keys are masked."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    lane = WHICH * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, wide))
    columns = gl.arange(0, HEAD, layout=gl.SliceLayout(0, wide))
    tokens = begin_token + lane // GROUP
    heads = kv_head * GROUP + lane % GROUP
    real = (tokens < row_end) & (lane < BLOCK_Q * GROUP)
    places = gl.expand_dims(tokens.to(gl.int64) * q_stride + heads * HEAD, 1) + gl.expand_dims(columns, 0)
    kept = gl.expand_dims(real, 1) & gl.expand_dims(columns < HEAD, 0)
    target = gl.expand_dims((tokens.to(gl.int64) * HEADS + heads) * HEAD, 1) + gl.expand_dims(columns, 0)
    if end > 0:
        q_shared.store(gl.load(q + places, mask=kept, other=0.0))
        hopper.fence_async_shared()
        together()
        spots = WHICH * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
        positions = length - row_end + begin_token + spots // GROUP
        acc = gl.zeros([HALF, HEAD], gl.float32, layout)
        total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, layout))
        top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        factor = scale * LOG2E
        s = scores(q_shared, k_ring.index(0), k_full.index(0), 0)
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(0), count=1)
        p, total, top, _ = weigh(s, total, top, positions, 0, factor, v_ring.dtype, True)
        for tile in range(1, outer):
            acc, total, top, p = advance(acc, total, top, p, q_shared, k_ring, v_ring, k_full, k_empty, v_full,
                                         v_empty, tile, positions, factor, False, STAGES)  # fmt: skip
        for tile in range(gl.maximum(outer, 1), end):
            acc, total, top, p = advance(acc, total, top, p, q_shared, k_ring, v_ring, k_full, k_empty, v_full,
                                         v_empty, tile, positions, factor, True, STAGES)  # fmt: skip
        last = (end - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((end - 1) // STAGES) & 1)
        acc = hopper.warpgroup_mma(p, v_ring.index(last), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        result = acc / gl.expand_dims(gl.where(total > 0.0, total, 1.0), 1)
        result = gl.convert_layout(result.to(out.dtype.element_ty), wide)
        gl.store(out + target, result, mask=kept)
    else:  # padded tokens of a row without length
        gl.store(out + target, gl.zeros([HALF, HEAD], out.dtype.element_ty, wide), mask=kept)


@kernel
@gluon.jit(
    do_not_specialize=["table_stride", "rows", "base", "tiles"],
    do_not_specialize_on_alignment=["query_start", "lengths", "tables"],  # they begin behind any number of decode rows
)
def prompt_kernel(
    out,
    q,
    keys,
    values,
    query_start,
    lengths,
    tables,
    rows,
    base,
    tiles,
    table_stride,
    q_stride,
    scale,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    KEY_RATIO: gl.constexpr,
    VALUE_RATIO: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Grid (tiles, KV heads): BLOCK_Q query tokens times the GROUP heads of one KV head, two times HALF rows at most.

    ``keys`` and ``values`` describe cache parts (``boxes``); a block begins RATIO of their rows after the one before.
    The other arguments are ``prefill_kernel``'s. Causal, without windows.
    """
    if OVERLAPS:
        cuda.gdc_launch_dependents()
    tile = tiles - 1 - gl.program_id(0)
    kv_head = gl.program_id(1)
    if OVERLAPS:
        cuda.gdc_wait()
    row = row_of_tile(query_start, tile, rows, base, BLOCK_Q)
    row_begin = gl.load(query_start + row)
    row_end = gl.load(query_start + row + 1)
    begin_token = row_begin + (tile - (row_begin - base) // BLOCK_Q - row) * BLOCK_Q
    length = gl.load(lengths + row)
    low = length - row_end + begin_token
    high = length - row_end + gl.minimum(begin_token + BLOCK_Q, row_end) - 1
    outer = gl.maximum(low + 1, 0) // KEYS
    end = (gl.maximum(high + 1, 0) + KEYS - 1) // KEYS
    end = gl.where(begin_token < row_end, end, 0)  # a tile without queries
    outer = gl.minimum(outer, end)
    table = tables + row.to(gl.int64) * table_stride

    k_ring = gl.allocate_shared_memory(keys.dtype, [STAGES, KEYS, HEAD], keys.layout)
    v_ring = gl.allocate_shared_memory(values.dtype, [STAGES, KEYS, HEAD], values.layout)
    q_first = gl.allocate_shared_memory(keys.dtype, [HALF, HEAD], keys.layout)
    q_second = gl.allocate_shared_memory(keys.dtype, [HALF, HEAD], keys.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tail = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(tail, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    hopper.fence_async_shared()
    together()
    # Tuples that are named would turn their constants into numbers of run time.
    gl.warp_specialize([
        (take, (q, out, q_first, k_ring, v_ring, k_full, k_empty, v_full, v_empty, end, outer, begin_token, row_end,
                length, kv_head, q_stride, scale, gl.constexpr(0), HEADS, GROUP, BLOCK_Q, STAGES)),
        (take, (q, out, q_second, k_ring, v_ring, k_full, k_empty, v_full, v_empty, end, outer, begin_token, row_end,
                length, kv_head, q_stride, scale, gl.constexpr(1), HEADS, GROUP, BLOCK_Q, STAGES)),
        (bring, (keys, values, table, end, length, kv_head, k_ring, v_ring, k_full, k_empty, v_full, v_empty, tail,
                 KEY_RATIO, VALUE_RATIO, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip
