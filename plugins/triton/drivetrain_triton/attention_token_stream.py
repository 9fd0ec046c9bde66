"""Kernel of a decode step's whole attention, of heads of 128, with keys and values by bulk copies.

As ``attention_token.token_kernel``: head norms, rotary positions, the cache's write, and attention. A program's ring of
stages is asked for before it waits for the kernels ahead. Each of its warps takes keys of its own and keeps sums of its
own, which meet once, at the end; with one warp nothing waits for other warps at all. A row without prompts beside it,
causal, without windows, sinks or soft cap. Written in Gluon; for compute capability 9.0.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra import cuda

from .attention_token_sums import finish
from .launch import kernel

together = getattr(gl, "barrier", None) or gl.thread_barrier  # the older name is Triton 3.6's
LOG2E = gl.constexpr(1.4426950408889634)
PAGE = gl.constexpr(16)
HEAD = gl.constexpr(128)
HEADS_PAD = gl.constexpr(16)  # rows of a matrix product


@gluon.jit
def share_of_past(length, split, splits, SPAN: gl.constexpr, LEAST: gl.constexpr, DIRECT: gl.constexpr):
    """Which keys before a row's last one a share takes, in tiles of SPAN; shares have LEAST tiles or more.

    -> how many keys there are; the share's tiles, begin and count; how many shares have any, of which the last, or the
    only one of a row without earlier keys, takes the new token too.
    """
    past = gl.maximum(length - 1, 0)
    tiles = (past + SPAN - 1) // SPAN
    if DIRECT:
        return past, tiles * 0, tiles, tiles * 0 + 1
    share = gl.maximum((tiles + splits - 1) // splits, LEAST)
    used = gl.maximum((tiles + share - 1) // share, 1)
    begin = split * share
    return past, begin, gl.minimum(share, tiles - begin), used


@gluon.jit
def blocks_of(table, first, limit, COUNT: gl.constexpr):
    """The ids of COUNT blocks from number ``first`` on, all asked for at once; -1 from number ``limit`` on."""
    blocks = ()
    for number in gl.static_range(COUNT):
        blocks = blocks + (gl.load(table + first + number, mask=first + number < limit, other=-1),)
    return blocks


@gluon.jit
def first_blocks(table, table_width, split, begin, pages, COUNT: gl.constexpr, DIRECT: gl.constexpr):
    """The ids of a share's first COUNT blocks. Those of a row's first share, which begins with the row, do not wait for
    its length, and past it may be any that the table has."""
    if DIRECT:
        blocks = blocks_of(table, 0, table_width, COUNT)
    elif split == 0:
        blocks = blocks_of(table, 0, table_width, COUNT)
    else:
        blocks = blocks_of(table, begin, pages, COUNT)
    return blocks


@gluon.jit
def bring(part, block, kv_head, ready, box, there, RATIO: gl.constexpr):
    """Ask for a block of one head. No block: a box before all rows, for which the copy engine gives zeros unread."""
    row = gl.where(block >= 0, block * RATIO, -PAGE)
    tma.async_copy_global_to_shared(part, [row, kv_head * HEAD], ready, box, pred=there)


@gluon.jit
def ask_first(keys, values, blocks, first, pages, count, k_ready, v_ready, k_ring, v_ring, kv_head,
              KEY_RATIO: gl.constexpr, VALUE_RATIO: gl.constexpr):  # fmt: skip
    """Ask for a share's first tiles, as many as there are stages, from block number ``first`` of ``pages`` on."""
    PAGES: gl.constexpr = k_ring.shape[1] // PAGE
    STAGES: gl.constexpr = k_ring.shape[0]
    for stage in gl.static_range(STAGES):
        mbarrier.expect(k_ready.index(stage), PAGES * PAGE * HEAD * 2, pred=stage < count)
        mbarrier.expect(v_ready.index(stage), PAGES * PAGE * HEAD * 2, pred=stage < count)
    for stage in gl.static_range(STAGES):
        for page in gl.static_range(PAGES):
            block = gl.where(first + stage * PAGES + page < pages, blocks[stage * PAGES + page], -1)
            k_box = k_ring.index(stage).slice(page * PAGE, PAGE)
            v_box = v_ring.index(stage).slice(page * PAGE, PAGE)
            bring(keys, block, kv_head, k_ready.index(stage), k_box, stage < count, KEY_RATIO)
            bring(values, block, kv_head, v_ready.index(stage), v_box, stage < count, VALUE_RATIO)


@gluon.jit
def ask(keys, values, blocks, k_ready, v_ready, k_stage, v_stage, kv_head, KEY_RATIO: gl.constexpr,
        VALUE_RATIO: gl.constexpr):  # fmt: skip
    """Ask for the blocks of one tile."""
    PAGES: gl.constexpr = k_stage.shape[0] // PAGE
    mbarrier.expect(k_ready, PAGES * PAGE * HEAD * 2)
    mbarrier.expect(v_ready, PAGES * PAGE * HEAD * 2)
    for page in gl.static_range(PAGES):
        bring(keys, blocks[page], kv_head, k_ready, k_stage.slice(page * PAGE, PAGE), True, KEY_RATIO)
        bring(values, blocks[page], kv_head, v_ready, v_stage.slice(page * PAGE, PAGE), True, VALUE_RATIO)


@gluon.jit
def weighted(x, root, weight, OFFSET: gl.constexpr, ROUND: gl.constexpr, dtype: gl.constexpr):
    """As ``attention_write.weighted``."""
    x = x * gl.expand_dims(root, 1)
    if ROUND:
        scale = weight.to(gl.float32)
        if OFFSET != 0.0:
            scale = (scale + OFFSET).to(dtype).to(gl.float32)
        result = x.to(dtype).to(gl.float32) * scale
    else:
        result = x * (weight.to(gl.float32) + OFFSET)
    return result.to(dtype).to(gl.float32)


@gluon.jit
def partner_of(columns, HALF: gl.constexpr, HALVES: gl.constexpr):
    """As ``attention_token.partner_of``."""
    if HALVES:
        other = (columns + HALF) % (2 * HALF)
    else:
        other = (columns + 1 - 2 * (columns % 2)) % (2 * HALF)
    return other


@gluon.jit
def turned(plain, other, weight, other_weight, cos, sin, columns, eps, HALF: gl.constexpr, HALVES: gl.constexpr,
           NORM: gl.constexpr, OFFSET: gl.constexpr, ROUND: gl.constexpr):  # fmt: skip
    """As ``attention_token.turned``."""
    dtype: gl.constexpr = plain.dtype
    a = plain.to(gl.float32)
    b = other.to(gl.float32)
    if NORM:
        root = 1.0 / gl.sqrt(gl.sum(a * a, 1) / HEAD + eps)
        a = weighted(a, root, weight, OFFSET, ROUND, dtype)
        b = weighted(b, root, other_weight, OFFSET, ROUND, dtype)
    if HALVES:
        first = columns < HALF
    else:
        first = columns % 2 == 0
    signed = gl.where(first, -sin, sin)
    result = a * gl.expand_dims(cos, 0) + b * gl.expand_dims(signed, 0)
    if 2 * HALF < HEAD:
        result = gl.where(gl.expand_dims(columns < 2 * HALF, 0), result, a)
    return result.to(dtype)


@gluon.jit
def enter(x, weight, cos, sin, kv_head, key, value, new_value, holds, q_shared, eps, HEADS: gl.constexpr,
          GROUP: gl.constexpr, HALF: gl.constexpr, HALVES: gl.constexpr, NORM: gl.constexpr, OFFSET: gl.constexpr,
          ROUND: gl.constexpr, EARLY: gl.constexpr, OVERLAPS: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Make a token's query heads and key, leave them in ``q_shared`` (the key in row GROUP; rows beyond it hold
    anything), and store its key and value where ``holds``. All but weights is touched after the wait for others.

    x, cos and sin: one token's; new_value: where its value head is; key and value: its slot.
    """
    ROWS: gl.constexpr = 8 if GROUP < 8 else 16  # the pattern of shared memory repeats after 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, HEAD, layout=gl.SliceLayout(0, layout))
    heads = gl.expand_dims(gl.where(lane < GROUP, kv_head * GROUP + lane, HEADS + kv_head) * HEAD, 1)
    made = gl.expand_dims((lane < GROUP) | ((lane == GROUP) & holds), 1) & gl.expand_dims(columns < HEAD, 0)
    own = heads + gl.expand_dims(columns, 0)
    partner = heads + gl.expand_dims(partner_of(columns, HALF, HALVES), 0)
    w = 0.0
    other_w = 0.0
    if NORM:
        w = gl.load(weight + own, mask=made, other=0.0)
        other_w = gl.load(weight + partner, mask=made, other=0.0)
    if OVERLAPS and EARLY:
        cuda.gdc_wait()
    if OVERLAPS:
        cuda.gdc_launch_dependents()
    pair = columns % HALF if HALVES else (columns // 2) % HALF
    plain = gl.load(x + own, mask=made, other=0.0)
    other = gl.load(x + partner, mask=made, other=0.0)
    c = gl.load(cos + pair)
    s = gl.load(sin + pair)
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [num_warps], [0])
    along = gl.arange(0, HEAD, layout=flat)
    gl.store(value + along, gl.load(new_value + along), mask=(along < HEAD) & holds)
    tile = turned(plain, other, w, other_w, c, s, columns, eps, HALF, HALVES, NORM, OFFSET, ROUND)
    spread = gl.expand_dims(lane * 0, 1) + gl.expand_dims(columns, 0)
    gl.store(key + spread, tile, mask=made & gl.expand_dims(lane == GROUP, 1))  # made only where it is held
    q_shared.slice(0, ROWS).store(tile)


@gluon.jit
def queries(q_shared, mma: gl.constexpr, num_warps: gl.constexpr):
    """Each warp's copy of the queries as the left side of a product [W, 16, 128]."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    q = q_shared.reshape([1, HEADS_PAD, HEAD]).load(left)
    q, _ = gl.broadcast(q, gl.zeros([num_warps, 1, 1], q.dtype, left))
    return gl.convert_layout(q, left)


@gluon.jit
def begin_with(q, q_shared, new_value, holds, factor, GROUP: gl.constexpr, mma: gl.constexpr):
    """Sums [W, 16, 128], total and top [W, 16] of the new token alone, in the first warp; elsewhere, or where it is not
    held, of nothing. Its key is row GROUP of ``q_shared``, read here as 16 keys."""
    W: gl.constexpr = q.shape[0]
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    rows: gl.constexpr = gl.SliceLayout(2, mma)
    k = q_shared.reshape([1, HEADS_PAD, HEAD]).permute((0, 2, 1)).load(right)
    k, _ = gl.broadcast(k, gl.zeros([W, 1, 1], k.dtype, right))
    k = gl.convert_layout(k, right)
    s = mma_v2(q, k, gl.zeros([W, HEADS_PAD, HEADS_PAD], gl.float32, mma))
    columns = gl.arange(0, HEADS_PAD, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))
    own = gl.expand_dims(gl.expand_dims(columns == GROUP, 0), 1)
    s = gl.sum(gl.where(own, s, 0.0), 2)
    first = gl.arange(0, W, layout=gl.SliceLayout(1, rows)) == 0
    mine = gl.expand_dims(first & holds, 1)
    top = gl.where(mine, s * factor, float("-inf"))
    total = gl.where(mine, gl.full([W, HEADS_PAD], 1.0, gl.float32, rows), 0.0)
    along = gl.arange(0, HEAD, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))
    value = gl.load(new_value + along).to(gl.float32)
    value = gl.expand_dims(gl.expand_dims(value, 0), 1)
    acc = gl.where(gl.expand_dims(mine, 2), value, gl.zeros([W, HEADS_PAD, HEAD], gl.float32, mma))
    return acc, total, top


@gluon.jit
def fold(acc, total, top, q, k_stage, v_stage, k_ready, v_ready, phase, left_over, factor, mma: gl.constexpr,
         TAIL: gl.constexpr):  # fmt: skip
    """One step of an online softmax: each warp's keys of a stage [W * T, 128]. TAIL: of which ``left_over`` are real;
    values past them may be NaN, which a weight of zero would not silence."""
    W: gl.constexpr = q.shape[0]
    T: gl.constexpr = k_stage.shape[0] // W
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    mbarrier.wait(k_ready, phase)
    k = k_stage.reshape([W, T, HEAD]).permute((0, 2, 1)).load(right)
    s = mma_v2(q, k, gl.zeros([W, HEADS_PAD, T], gl.float32, mma))
    mbarrier.wait(v_ready, phase)
    v = v_stage.reshape([W, T, HEAD]).load(right)
    if TAIL:
        begin = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(1, mma))) * T
        inside = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))
        real = gl.expand_dims(begin, 1) + gl.expand_dims(inside, 0) < left_over
        s = gl.where(gl.expand_dims(real, 1), s, float("-inf"))
        begin = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, right))) * T
        inside = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))
        real = gl.expand_dims(begin, 1) + gl.expand_dims(inside, 0) < left_over
        v = gl.where(gl.expand_dims(real, 2), v, 0.0).to(v.dtype)
    higher = gl.maximum(top, gl.max(s, 2) * factor)
    level = gl.where(higher == float("-inf"), 0.0, higher)  # a warp may have had no key yet
    weights = gl.exp2(s * factor - gl.expand_dims(level, 2))
    decay = gl.exp2(top - level)
    total = total * decay + gl.sum(weights, 2)
    acc = mma_v2(gl.convert_layout(weights.to(v.dtype), left), v, acc * gl.expand_dims(decay, 2))
    return acc, total, higher


@gluon.jit
def attend(acc, total, top, q, keys, values, table, begin, count, past, k_ready, v_ready, k_ring, v_ring, kv_head,
           factor, KEY_RATIO: gl.constexpr, VALUE_RATIO: gl.constexpr, mma: gl.constexpr):  # fmt: skip
    """Tiles begin .. begin + count - 1 of a row's ``past`` keys, the first of which have been asked for."""
    STAGES: gl.constexpr = k_ring.shape[0]
    SPAN: gl.constexpr = k_ring.shape[1]
    PAGES: gl.constexpr = SPAN // PAGE
    whole = gl.minimum(past // SPAN - begin, count)
    stage = whole * 0
    phase = whole * 0
    for step in range(whole):
        k_stage = k_ring.index(stage)
        v_stage = v_ring.index(stage)
        blocks = blocks_of(table, (begin + step + STAGES) * PAGES, (past + PAGE - 1) // PAGE, PAGES)
        acc, total, top = fold(acc, total, top, q, k_stage, v_stage, k_ready.index(stage), v_ready.index(stage), phase,
                               SPAN, factor, mma, False)  # fmt: skip
        if step + STAGES < count:
            together()  # all warps have read the stage
            ask(keys, values, blocks, k_ready.index(stage), v_ready.index(stage), k_stage, v_stage, kv_head, KEY_RATIO,
                VALUE_RATIO)  # fmt: skip
        wrapped = stage + 1 == STAGES
        stage = gl.where(wrapped, 0, stage + 1)
        phase = gl.where(wrapped, phase ^ 1, phase)
    if whole < count:  # one is left
        left_over = past - (begin + whole) * SPAN
        acc, total, top = fold(acc, total, top, q, k_ring.index(stage), v_ring.index(stage), k_ready.index(stage),
                               v_ready.index(stage), phase, left_over, factor, mma, True)  # fmt: skip
    return acc, total, top


@kernel
@gluon.jit(do_not_specialize=["table_stride", "table_width"])
def token_stream_kernel(
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
    key_cache,
    value_cache,
    slots,
    lengths,
    tables,
    table_stride,
    table_width,
    x_stride,
    scale,
    eps,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HALF: gl.constexpr,
    HALVES: gl.constexpr,
    NORM: gl.constexpr,
    OFFSET: gl.constexpr,
    ROUND: gl.constexpr,
    KEY_RATIO: gl.constexpr,
    VALUE_RATIO: gl.constexpr,
    DIRECT: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    LEAST: gl.constexpr,
    EARLY: gl.constexpr,
    OVERLAPS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (KV heads, rows, splits). ``keys`` and ``values`` describe cache parts (``attention_stream.boxes``), which
    begin at key_cache and value_cache; a block begins RATIO of their rows after the one before.

    A stage has TOKENS keys and values a warp. The other arguments are ``token_kernel``'s; as there no program reads
    the new token's slot (copies may bring it, and it is then masked).
    """
    if OVERLAPS and not EARLY:
        cuda.gdc_wait()
    SPAN: gl.constexpr = num_warps * TOKENS
    kv_head, row, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    splits = gl.num_programs(2)
    far = row.to(gl.int64)
    length = gl.load(lengths + row)
    slot = gl.load(slots + row).to(gl.int64)
    past, begin, count, used = share_of_past(length, split, splits, SPAN, LEAST, DIRECT)
    if not DIRECT:
        if split >= used:
            return
    holds = (split == used - 1) & (length > 0)
    table = tables + far * table_stride
    pages = (past + PAGE - 1) // PAGE
    blocks = first_blocks(table, table_width, split, begin * (SPAN // PAGE), pages, STAGES * SPAN // PAGE, DIRECT)

    k_ring = gl.allocate_shared_memory(keys.dtype, [STAGES, SPAN, HEAD], keys.layout)
    v_ring = gl.allocate_shared_memory(values.dtype, [STAGES, SPAN, HEAD], values.layout)
    q_shared = gl.allocate_shared_memory(keys.dtype, [HEADS_PAD, HEAD], keys.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
    hopper.fence_async_shared()
    together()
    ask_first(keys, values, blocks, begin * (SPAN // PAGE), pages, count, k_ready, v_ready, k_ring, v_ring, kv_head,
              KEY_RATIO, VALUE_RATIO)  # fmt: skip
    spot = kv_head * HEAD
    key = key_cache + (slot // PAGE * KEY_RATIO + slot % PAGE) * (HEADS // GROUP * HEAD) + spot
    value = value_cache + (slot // PAGE * VALUE_RATIO + slot % PAGE) * (HEADS // GROUP * HEAD) + spot
    token = x + far * x_stride
    new_value = token + (HEADS + HEADS // GROUP) * HEAD + spot
    enter(token, weight, cos + far * HALF, sin + far * HALF, kv_head, key, value, new_value, holds, q_shared, eps,
          HEADS, GROUP, HALF, HALVES, NORM, OFFSET, ROUND, EARLY, OVERLAPS, num_warps)  # fmt: skip
    together()
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    q = queries(q_shared, mma, num_warps)
    factor = scale * LOG2E
    acc, total, top = begin_with(q, q_shared, new_value, holds, factor, GROUP, mma)
    acc, total, top = attend(
        acc, total, top, q, keys, values, table, begin, count, past, k_ready, v_ready, k_ring, v_ring, kv_head, factor,
        KEY_RATIO, VALUE_RATIO, mma,
    )  # fmt: skip
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(k_ready.index(stage))
        mbarrier.invalidate(v_ready.index(stage))
    finish(out, partial, lse, arrivals, acc, total, top, row, kv_head, split, used, splits, HEADS, GROUP, DIRECT,
           num_warps)  # fmt: skip
