"""How the warps of a program, and the programs of a row, put their sums of attention together; for
``attention_token_stream``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

together = getattr(gl, "barrier", None) or gl.thread_barrier  # the older name is Triton 3.6's
HEAD = gl.constexpr(128)
ROWS = gl.constexpr(16)
GROUP_PAD = gl.constexpr(8)  # of ROWS, those that may be heads
CHUNK = gl.constexpr(8)  # shares of a row that are loaded together


@gluon.jit
def of_warps(acc, total, top, num_warps: gl.constexpr):
    """Sums [W, 16, 128], total and top [W, 16], a warp each -> the first 8 rows' sums [8, 128], divided
    by their total (zero of nothing), and log-sum-exp [8] in units of log2, -inf of nothing."""
    wide: gl.constexpr = gl.BlockedLayout([num_warps, 1, 4], [1, 1, 32], [1, num_warps, 1], [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, order=[2, 1, 0])
    first, _ = gl.split(gl.permute(gl.reshape(acc, [num_warps, 2, GROUP_PAD, HEAD]), (0, 2, 3, 1)))
    sums = gl.allocate_shared_memory(gl.float32, [num_warps, GROUP_PAD, HEAD], swizzled, first)
    totals = gl.allocate_shared_memory(gl.float32, [num_warps, ROWS], plain, total)
    tops = gl.allocate_shared_memory(gl.float32, [num_warps, ROWS], plain, top)
    together()
    peaks = tops.slice(0, GROUP_PAD, dim=1).load(gl.SliceLayout(2, wide))
    weights = totals.slice(0, GROUP_PAD, dim=1).load(gl.SliceLayout(2, wide))
    parts = sums.load(wide)
    peak = gl.max(peaks, 0)
    level = gl.where(peak == float("-inf"), 0.0, peak)
    scales = gl.exp2(peaks - gl.expand_dims(level, 0))
    whole = gl.sum(weights * scales, 0)
    some = whole > 0.0
    whole = gl.where(some, whole, 1.0)
    result = gl.sum(parts * gl.expand_dims(scales / gl.expand_dims(whole, 0), 2), 0)
    return result, gl.where(some, peak + gl.log2(whole), float("-inf"))


@gluon.jit
def of_shares(partial, lse, base, used, GROUP: gl.constexpr, num_warps: gl.constexpr):
    """Add ``used`` shares of a row, in their order: [8, 128]. base: number of the row's first head's first."""
    wide: gl.constexpr = gl.BlockedLayout([CHUNK, 1, 4], [1, 1, 32], [1, num_warps, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(2, wide)
    number = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, flat))
    group = gl.arange(0, GROUP_PAD, layout=gl.SliceLayout(0, flat))
    columns = gl.arange(0, HEAD, layout=gl.SliceLayout(0, gl.SliceLayout(1, wide)))
    columns = gl.expand_dims(gl.expand_dims(columns, 0), 1)
    splits = gl.num_programs(2)
    top = gl.full([GROUP_PAD], float("-inf"), gl.float32, gl.SliceLayout(0, flat))
    total = gl.zeros([GROUP_PAD], gl.float32, gl.SliceLayout(0, flat))
    acc = gl.zeros([GROUP_PAD, HEAD], gl.float32, gl.SliceLayout(0, wide))
    for start in range(0, used, CHUNK):
        there = gl.expand_dims(start + number < used, 1) & gl.expand_dims(group < GROUP, 0)
        spot = base + gl.expand_dims(group * splits, 0) + gl.expand_dims(start + number, 1)
        peaks = gl.load(lse + spot, mask=there, other=float("-inf"), cache_modifier=".cg")
        full = gl.expand_dims(there, 2) & (columns < HEAD)
        parts = gl.load(partial + gl.expand_dims(spot, 2) * HEAD + columns, mask=full, other=0.0, cache_modifier=".cg")
        higher = gl.maximum(top, gl.max(peaks, 0))
        level = gl.where(higher == float("-inf"), 0.0, higher)
        weights = gl.exp2(peaks - gl.expand_dims(level, 0))
        decay = gl.exp2(top - level)
        total = total * decay + gl.sum(weights, 0)
        slow = gl.convert_layout(decay, gl.SliceLayout(1, gl.SliceLayout(0, wide)))
        acc = acc * gl.expand_dims(slow, 1) + gl.sum(parts * gl.expand_dims(weights, 2), 0)
        top = higher
    total = gl.convert_layout(gl.where(total > 0.0, total, 1.0), gl.SliceLayout(1, gl.SliceLayout(0, wide)))
    return acc / gl.expand_dims(total, 1)


@gluon.jit
def put(at, x, row, kv_head, HEADS: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):
    """Store x [8, 128] to a row's heads of ``at`` [rows, HEADS, 128]."""
    group = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, HEAD, layout=gl.SliceLayout(0, layout))
    heads = row.to(gl.int64) * HEADS + kv_head * GROUP + group
    spot = gl.expand_dims(heads * HEAD, 1) + gl.expand_dims(columns, 0)
    mask = gl.expand_dims(group < GROUP, 1) & gl.expand_dims(columns < HEAD, 0)
    gl.store(at + spot, x.to(at.dtype.element_ty), mask=mask)


@gluon.jit
def finish(out, partial, lse, arrivals, acc, total, top, row, kv_head, split, used, splits, HEADS: gl.constexpr,
           GROUP: gl.constexpr, DIRECT: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Write a row's sums out: alone where its keys are one share, which DIRECT says of every row, else together, as
    ``attention_decode.finish`` does. The program that leaves the last share adds them all."""
    wide: gl.constexpr = gl.BlockedLayout([num_warps, 1, 4], [1, 1, 32], [1, num_warps, 1], [2, 1, 0])
    result, level = of_warps(acc, total, top, num_warps)
    if DIRECT:
        put(out, result, row, kv_head, HEADS, GROUP, gl.SliceLayout(0, wide))
    elif used == 1:
        put(out, result, row, kv_head, HEADS, GROUP, gl.SliceLayout(0, wide))
    else:
        base = ((row * HEADS + kv_head * GROUP) * splits).to(gl.int64)
        group = gl.arange(0, GROUP_PAD, layout=gl.SliceLayout(0, gl.SliceLayout(2, wide)))
        gl.store(lse + base + group * splits + split, level, mask=group < GROUP)
        heads = gl.arange(0, GROUP_PAD, layout=gl.SliceLayout(1, gl.SliceLayout(0, wide)))
        columns = gl.arange(0, HEAD, layout=gl.SliceLayout(0, gl.SliceLayout(0, wide)))
        spot = gl.expand_dims((base + heads * splits + split) * HEAD, 1) + gl.expand_dims(columns, 0)
        gl.store(partial + spot, result, mask=gl.expand_dims(heads < GROUP, 1) & gl.expand_dims(columns < HEAD, 0))
        together()  # every thread's part is written before the count says so
        arrived = arrivals + row * (HEADS // GROUP) + kv_head
        if gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == used - 1:
            gl.store(arrived, 0)
            both: gl.constexpr = gl.BlockedLayout([CHUNK, 1, 4], [1, 1, 32], [1, num_warps, 1], [2, 1, 0])
            whole = of_shares(partial, lse, base, used, GROUP, num_warps)
            put(out, whole, row, kv_head, HEADS, GROUP, gl.SliceLayout(0, both))
