"""Linears for up to 64 rows: weights stream through shared memory by bulk tensor copies, matrix units read them there.

A program takes a panel of the weight (of a gated one: half gate, half up rows) and a share of the inputs. Its ring of
stages is filled with weights before it waits for the kernels ahead, since weights never change; then come the rows. The
weight is the product's left side, so that the few tokens fill the narrow side of the matrix unit. Where results are
int64 a panel leaves one key for each token in place of its results (``linear_head``). Written in Gluon, which lets a
program order its copies itself; for compute capability 9.0.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from drivetrain_triton import keys
from drivetrain_triton.launch import kernel

together = getattr(gl, "barrier", None) or gl.thread_barrier  # the older name is Triton 3.6's
key_of, joined = gluon.jit(keys.key_of.fn), gluon.jit(keys.joined.fn)
WITH_NAN = gl.constexpr(tl.PropagateNan.ALL)
PAST = gl.constexpr(0x7FFFFFFF)

ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@lru_cache(maxsize=256)
def layout_of(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a box lies in shared memory so that matrix units can read it."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], ELEMENTS[dtype])


def boxes(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a matrix to the copy engine in boxes [rows, columns]. Rows begin at multiples of 16 bytes."""
    layout = layout_of(rows, columns, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout)


@gluon.jit
def activated(x, KIND: gl.constexpr):
    """silu, gelu or gelu_tanh of a float32 tile, as ``activations.activated``."""
    if KIND == "gelu":
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif KIND == "silu":
        return x / (1.0 + gl.exp(-x))
    else:
        return x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@gluon.jit
def store_panel(total, bias, out, first, block, M, N, HAS_BIAS: gl.constexpr, num_warps: gl.constexpr):
    """Write total [weight rows, tokens] to out [M, N], columns from ``first`` on."""
    size: gl.constexpr = total.shape[0]
    tokens: gl.constexpr = total.shape[1]
    # Eight columns a thread, side by side in memory.
    lanes: gl.constexpr = min(32, size // 8)
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, num_warps], [0, 1])
    result = gl.convert_layout(total, layout)
    columns = first + gl.arange(0, size, layout=gl.SliceLayout(1, layout))
    rows = block * tokens + gl.arange(0, tokens, layout=gl.SliceLayout(0, layout))
    if HAS_BIAS:
        terms = gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)
        result += gl.expand_dims(terms, 1)
    at = gl.expand_dims(rows.to(gl.int64), 0) * N + gl.expand_dims(columns, 1)
    kept = gl.expand_dims(rows < M, 0) & gl.expand_dims(columns < N, 1)
    gl.store(out + at, result.to(out.dtype.element_ty), mask=kept)


@gluon.jit
def share_of(partial, place, PANEL: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr):
    """Pointers to one panel's sums [PANEL, TOKENS] at ``place`` in the scratch."""
    row = gl.arange(0, PANEL, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
    inner = gl.expand_dims(row, 1) * TOKENS + gl.expand_dims(token, 0)
    return partial + place.to(gl.int64) * (PANEL * TOKENS) + inner


@gluon.jit
def ask_weights(weight, ready, panel, first, second, at, there, BYTES: gl.constexpr, GATED: gl.constexpr):
    """Ask for a stage's weights, inputs from ``at`` on: rows from ``first`` on, if gated also from ``second`` on.

    BYTES: what the stage gets in all, rows of x too. Nothing happens unless ``there``.
    """
    mbarrier.expect(ready, BYTES, pred=there)
    if GATED:
        half: gl.constexpr = panel.shape[0] // 2
        tma.async_copy_global_to_shared(weight, [first, at], ready, panel.slice(0, half), pred=there)
        tma.async_copy_global_to_shared(weight, [second, at], ready, panel.slice(half, half), pred=there)
    else:
        tma.async_copy_global_to_shared(weight, [first, at], ready, panel, pred=there)


@gluon.jit
def sums_of_all(partial, place, SHARES: gl.constexpr, PANEL: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr):
    """Add every share of a panel, in order. ``place``: the first share's."""
    total = gl.load(share_of(partial, place, PANEL, TOKENS, layout), cache_modifier=".cg")
    for each in gl.static_range(1, SHARES):
        total += gl.load(share_of(partial, place + each, PANEL, TOKENS, layout), cache_modifier=".cg")
    return total


@gluon.jit
def arrived_last(partial, arrivals, total, mine, share, SHARES: gl.constexpr, layout: gl.constexpr):
    """Leave one share's sums; whether all others have come."""
    place = share_of(partial, mine * SHARES + share, total.shape[0], total.shape[1], layout)
    gl.store(place, total)
    together()  # every thread's part is written before the count says so
    last = gl.atomic_add(arrivals + mine, 1, sem="acq_rel", scope="gpu") == SHARES - 1
    if last:
        gl.store(arrivals + mine, 0)
    return last


@gluon.jit
def halves_of(total, num_warps: gl.constexpr):
    """Split sums [PANEL, tokens] into their upper and lower half."""
    half: gl.constexpr = total.shape[0] // 2
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0, 1])
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, num_warps], [0, 1])
    both = gl.allocate_shared_memory(gl.float32, [2 * half, total.shape[1]], plain, total)
    together()
    return both.slice(0, half).load(layout), both.slice(half, half).load(layout)


@gluon.jit
def larger(a, b):
    """The larger of two; NaN where one is."""
    return gl.maximum(a, b, propagate_nan=WITH_NAN)


@gluon.jit
def lower(a, b):
    """The lower of two numbers."""
    return gl.minimum(a, b)


@gluon.jit
def best_of(total, first, N, AXIS: gl.constexpr):
    """Keys int64 of the best along one axis of logits, whose columns begin at ``first`` and count below N: the largest,
    NaN above all, ties to the lowest. Two passes of 32 bits: twice as many registers would not be there."""
    layout: gl.constexpr = gl.SliceLayout(1 - AXIS, total.type.layout)
    columns = gl.expand_dims(first + gl.arange(0, total.shape[AXIS], layout=layout), 1 - AXIS)
    score = gl.where(columns < N, total, float("-inf"))
    top = gl.reduce(score, AXIS, larger)
    same = (score == gl.expand_dims(top, AXIS)) | (score != score)
    return joined(key_of(top), gl.reduce(gl.where(same, columns, PAST), AXIS, lower))


@gluon.jit
def store_best(found, out, tile, tiles, block, M):
    """Write found [tokens] to out [M, tiles], column ``tile``."""
    tokens: gl.constexpr = found.shape[0]
    rows = block * tokens + gl.arange(0, tokens, layout=found.type.layout)
    gl.store(out + rows.to(gl.int64) * tiles + tile, found, mask=rows < M)


@gluon.jit
def write_out(total, bias, out, first, block, M, N, dtype: gl.constexpr, HAS_BIAS: gl.constexpr, KIND: gl.constexpr,
              num_warps: gl.constexpr):  # fmt: skip
    """Write a panel's sums, gated if they are, roundings as by separate kernels; or the best key of each token."""
    if out.dtype.element_ty == gl.int64:
        store_best(best_of(total, first, N, 0), out, gl.program_id(0), gl.num_programs(0), block, M)
    else:
        if KIND != "":
            gate, up = halves_of(total, num_warps)
            gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
            total = activated(gate, KIND).to(dtype).to(gl.float32) * up
        store_panel(total, bias, out, first, block, M, N, HAS_BIAS, num_warps)


@kernel
@gluon.jit(do_not_specialize=["M"])
def stream_products(
    weight,
    x,
    bias,
    out,
    partial,
    arrivals,
    M,
    N,
    K,
    HAS_BIAS: gl.constexpr,
    KIND: gl.constexpr,
    PANEL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SHARES: gl.constexpr,
    OVERLAPS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (panels of PANEL weight rows, blocks of BLOCK_M tokens, SHARES of the inputs): out [M, N].

    ``weight`` describes [rows, K] in boxes of a panel (gated: half of one) by BLOCK_K, ``x`` [M, K] in boxes [BLOCK_M,
    BLOCK_K]; both give zeros outside. With KIND weight rows are N gate rows, then N up rows. Shares of a panel meet in
    partial (float32) and are counted in arrivals, zero before and after; the last to arrive adds all in their order.
    Of type int64, out is [M, panels]: the best key of each (``best_of``).
    """
    if OVERLAPS:
        cuda.gdc_launch_dependents()
    tile, block, share = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    GATED: gl.constexpr = KIND != ""
    BYTES: gl.constexpr = (PANEL + BLOCK_M) * BLOCK_K * 2
    steps = (K + BLOCK_K - 1) // BLOCK_K
    begin = share * steps // SHARES
    count = (share + 1) * steps // SHARES - begin
    first = tile * (PANEL // 2 if GATED else PANEL)
    second = N + first

    panels = gl.allocate_shared_memory(weight.dtype, [STAGES, PANEL, BLOCK_K], weight.layout)
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    hopper.fence_async_shared()
    together()
    for stage in gl.static_range(STAGES):
        at = (begin + stage) * BLOCK_K
        ask_weights(weight, ready.index(stage), panels.index(stage), first, second, at, stage < count, BYTES, GATED)
    if OVERLAPS:
        cuda.gdc_wait()
    for stage in gl.static_range(STAGES):
        spot = [block * BLOCK_M, (begin + stage) * BLOCK_K]
        tma.async_copy_global_to_shared(x, spot, ready.index(stage), rows.index(stage), pred=stage < count)

    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_M, 16]
    )
    total = gl.zeros([PANEL, BLOCK_M], gl.float32, layout)
    stage = 0
    phase = 0
    for step in range(count):
        mbarrier.wait(ready.index(stage), phase)
        tokens = rows.index(stage).permute((1, 0))
        total = hopper.warpgroup_mma(panels.index(stage), tokens, total, is_async=True)
        total = hopper.warpgroup_mma_wait(0, deps=[total])
        together()  # all warps have read the stage
        there = step + STAGES < count
        at = (begin + step + STAGES) * BLOCK_K
        ask_weights(weight, ready.index(stage), panels.index(stage), first, second, at, there, BYTES, GATED)
        tma.async_copy_global_to_shared(x, [block * BLOCK_M, at], ready.index(stage), rows.index(stage), pred=there)
        wrapped = stage + 1 == STAGES
        stage = gl.where(wrapped, 0, stage + 1)
        phase = gl.where(wrapped, 1 - phase, phase)
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(stage))

    if SHARES == 1:
        write_out(total, bias, out, first, block, M, N, x.dtype, HAS_BIAS, KIND, num_warps)
    else:
        mine = tile * gl.num_programs(1) + block
        if arrived_last(partial, arrivals, total, mine, share, SHARES, layout):
            total = sums_of_all(partial, mine * SHARES, SHARES, PANEL, BLOCK_M, layout)
            write_out(total, bias, out, first, block, M, N, x.dtype, HAS_BIAS, KIND, num_warps)
