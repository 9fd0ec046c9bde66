"""Linears of 17 to 64 rows whose weight is small: a panel of the weight a program, all programs on the card at once.

A small weight is read in little more time than a launch takes, so each program has one panel (of a gated weight: half
gate, half up rows) and a share of its inputs, both few. One warp brings weights from the first instruction on, since
they never change; one brings rows, once the kernels ahead have ended; four multiply. The tokens fill the matrix unit's
long side, of which there are always ``ROWS`` (fewer are asked for, and what stands in the others is never written).

Shares of a panel meet in memory: each program leaves its float32 sums, waits until the others of its panel have, and
adds all shares of its own columns, in their order. A panel is counted by a number that only grows, by SHARES in each
launch, so that nothing has to be set back; SHARES is a power of two, so that it may wrap around, and each SHARES has
numbers of its own.

Programs that wait for each other must all be on the card. They are: a launch has no more of them than there are
multiprocessors (``linear_tiles.fits``), a kernel behind it begins only when all of them have begun and called
``launch_dependents``, and the kernels ahead end by themselves, or are such a kernel themselves, all of which had begun
before. So no two such launches may be under way side by side, as on two streams, or in two processes whose kernels
share the card at the same time (MPS). Written in Gluon; for compute capability 9.0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra import cuda

from drivetrain_triton.launch import kernel
from drivetrain_triton.linear import KINDS, Call, Operands, prepare
from drivetrain_triton.linear_stream import boxes, together
from drivetrain_triton.linear_tiles import PANEL_APART, PANEL_LINES, PANEL_ROWS, Tiles
from drivetrain_triton.linear_wide import gated
from drivetrain_triton.target import Target

ROWS = gl.constexpr(PANEL_ROWS)
LINES, APART = gl.constexpr(PANEL_LINES), gl.constexpr(PANEL_APART)
REGISTERS = 128  # of a thread at most


@gluon.jit
def seen(count):
    """What a count in memory says, and with it all that was written before it said so."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [count.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def advanced(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring and its phase."""
    wrapped = stage + 1 == STAGES
    return gl.where(wrapped, 0, stage + 1), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def ring_of(pieces, HIGH: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr):
    """(stages [STAGES, HIGH, STEP] of what ``pieces`` describes, full, empty [STAGES, 1]) in shared memory."""
    ring = gl.allocate_shared_memory(pieces.dtype, [STAGES, HIGH, STEP], pieces.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    return ring, full, empty


@gluon.jit
def bring_weights(weight, ring, full, empty, N, begin, steps, KIND: gl.constexpr, SHARES: gl.constexpr,
                  STAGES: gl.constexpr):  # fmt: skip
    """The warp that brings a panel's weights, inputs from ``begin`` on. It waits for no kernel."""
    PANEL: gl.constexpr = ring.shape[1]
    STEP: gl.constexpr = ring.shape[2]
    half: gl.constexpr = PANEL // 2
    panel = gl.program_id(0) // SHARES
    stage = panel * 0
    phase = panel * 0
    for step in range(steps):
        at = begin + step * STEP
        mbarrier.wait(empty.index(stage), phase ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, PANEL * STEP * 2)
        if KIND >= 0:
            first = panel * half
            tma.async_copy_global_to_shared(weight, [first, at], ready, ring.index(stage).slice(0, half))
            tma.async_copy_global_to_shared(weight, [N + first, at], ready, ring.index(stage).slice(half, half))
        else:
            tma.async_copy_global_to_shared(weight, [panel * PANEL, at], ready, ring.index(stage))
        stage, phase = advanced(stage, phase, STAGES)


@gluon.jit
def bring_rows(x, ring, full, empty, begin, steps, TOKENS: gl.constexpr, STAGES: gl.constexpr, OVERLAPS: gl.constexpr):
    """The warp that brings TOKENS rows. All that the others read of earlier kernels, or write, comes after these."""
    if OVERLAPS:
        cuda.gdc_wait()
    STEP: gl.constexpr = ring.shape[2]
    stage = begin * 0
    phase = begin * 0
    for step in range(steps):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, TOKENS * STEP * 2)
        tma.async_copy_global_to_shared(x, [0, begin + step * STEP], ready, ring.index(stage).slice(0, TOKENS))
        stage, phase = advanced(stage, phase, STAGES)


@gluon.jit
def places(rows, columns, stride):
    """Places of a tile in rows ``stride`` apart."""
    return gl.expand_dims(rows, 1) * stride + gl.expand_dims(columns, 0)


@gluon.jit
def meet(total, partial, turns, M, SHARES: gl.constexpr):
    """Leave a share's sums [ROWS, PANEL], wait for the panel's others: (all added [ROWS, PANEL / SHARES], columns)."""
    PANEL: gl.constexpr = total.shape[1]
    panel = gl.program_id(0) // SHARES
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, total.type.layout))
    columns = gl.arange(0, PANEL, layout=gl.SliceLayout(0, total.type.layout))
    mine = partial + gl.program_id(0) * (ROWS * PANEL)
    gl.store(mine + places(rows, columns, PANEL), total, mask=gl.expand_dims(rows < M, 1))
    together()  # every thread's part is written before the count says so
    count = turns + (SHARES * LINES + panel) * APART
    ticket = gl.atomic_add(count, 1, sem="acq_rel", scope="gpu")
    goal = (ticket | (SHARES - 1)) + 1
    while seen(count) - goal < 0:
        pass
    WIDTH: gl.constexpr = PANEL // SHARES
    lanes: gl.constexpr = WIDTH // 4
    plain: gl.constexpr = gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0])
    out_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, plain))
    out_columns = gl.program_id(0) % SHARES * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, plain))
    first = partial + panel * (SHARES * ROWS * PANEL) + places(out_rows, out_columns, PANEL)
    there = gl.expand_dims(out_rows < M, 1)
    result = gl.load(first, mask=there, other=0.0, cache_modifier=".cg")
    for other in gl.static_range(1, SHARES):
        result += gl.load(first + other * (ROWS * PANEL), mask=there, other=0.0, cache_modifier=".cg")
    return result, panel * PANEL + out_columns


@gluon.jit
def sums_of(panels, panel_full, panel_empty, rows, row_full, row_empty, steps, W_STAGES: gl.constexpr,
            X_STAGES: gl.constexpr):  # fmt: skip
    """Sums [ROWS, PANEL] over all steps. A stage is given back in the step after, when its product is done."""
    PANEL: gl.constexpr = panels.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PANEL, 16])
    total = gl.zeros([ROWS, PANEL], gl.float32, layout)
    w = gl.program_id(0) * 0
    w_phase = gl.program_id(0) * 0
    x = gl.program_id(0) * 0
    x_phase = gl.program_id(0) * 0
    for step in range(steps):
        mbarrier.wait(panel_full.index(w), w_phase)
        mbarrier.wait(row_full.index(x), x_phase)
        total = hopper.warpgroup_mma(rows.index(x), panels.index(w).permute((1, 0)), total, is_async=True)
        total = hopper.warpgroup_mma_wait(1, deps=[total])
        mbarrier.arrive(panel_empty.index(gl.where(w == 0, W_STAGES - 1, w - 1)), count=1, pred=step > 0)
        mbarrier.arrive(row_empty.index(gl.where(x == 0, X_STAGES - 1, x - 1)), count=1, pred=step > 0)
        w, w_phase = advanced(w, w_phase, W_STAGES)
        x, x_phase = advanced(x, x_phase, X_STAGES)
    return hopper.warpgroup_mma_wait(0, deps=[total])


@gluon.jit
def multiply(bias, out, partial, turns, panels, panel_full, panel_empty, rows, row_full, row_empty, M, N, steps,
             HAS_BIAS: gl.constexpr, KIND: gl.constexpr, SHARES: gl.constexpr, W_STAGES: gl.constexpr,
             X_STAGES: gl.constexpr):  # fmt: skip
    """The four warps that multiply, and write what is theirs of out [M, N]."""
    total = sums_of(panels, panel_full, panel_empty, rows, row_full, row_empty, steps, W_STAGES, X_STAGES)
    if SHARES > 1:
        total, columns = meet(total, partial, turns, M, SHARES)
    else:
        if KIND >= 0:
            total = gated(total, out.dtype.element_ty, KIND)
        width: gl.constexpr = total.shape[1]
        columns = gl.program_id(0) * width + gl.arange(0, width, layout=gl.SliceLayout(0, total.type.layout))
    if HAS_BIAS:
        total += gl.expand_dims(gl.load(bias + columns).to(gl.float32), 0)
    token = gl.arange(0, ROWS, layout=gl.SliceLayout(1, total.type.layout))
    gl.store(out + places(token, columns, N), total.to(out.dtype.element_ty), mask=gl.expand_dims(token < M, 1))


@kernel
@gluon.jit(do_not_specialize=["M"])
def panel_products(
    weight,
    x,
    bias,
    out,
    partial,
    turns,
    M,
    N,
    K,
    HAS_BIAS: gl.constexpr,
    KIND: gl.constexpr,
    PANEL: gl.constexpr,
    STEP: gl.constexpr,
    SHARES: gl.constexpr,
    TOKENS: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Grid (panels of PANEL weight rows times SHARES of the inputs): out [M, N], M up to TOKENS.

    ``weight`` describes [rows, K] in boxes of a panel (gated: half of one) by STEP, ``x`` [M, K] in boxes [TOKENS,
    STEP]; rows past M are zeros. KIND: a place in ``KINDS``, of N gate rows and then N up rows, with one share and no
    bias; -1: none. Panels fill the weight, steps the shares; W_STAGES and X_STAGES are at least 2 each.
    """
    if OVERLAPS:
        cuda.gdc_launch_dependents()
    begin = gl.program_id(0) % SHARES * (K // SHARES)
    steps = K // SHARES // STEP
    panels, panel_full, panel_empty = ring_of(weight, PANEL, STEP, W_STAGES)
    rows, row_full, row_empty = ring_of(x, ROWS, STEP, X_STAGES)
    hopper.fence_async_shared()
    together()
    # Tuples that are named would turn their constants into numbers of run time.
    gl.warp_specialize([
        (multiply, (bias, out, partial, turns, panels, panel_full, panel_empty, rows, row_full, row_empty, M, N, steps,
                    HAS_BIAS, KIND, SHARES, W_STAGES, X_STAGES)),
        (bring_weights, (weight, panels, panel_full, panel_empty, N, begin, steps, KIND, SHARES, W_STAGES)),
        (bring_rows, (x, rows, row_full, row_empty, begin, steps, TOKENS, X_STAGES, OVERLAPS)),
    ], [1, 1], [40, 40])  # fmt: skip


@lru_cache(maxsize=1024)
def settings(tiles: Tiles, target: Target, kind: str, has_bias: bool) -> dict[str, Any]:
    """A launch's options."""
    options = {"HAS_BIAS": has_bias, "KIND": KINDS.index(kind) if kind else -1, "PANEL": tiles.block_n}
    options |= {"STEP": tiles.block_k, "SHARES": tiles.shares, "TOKENS": tiles.block_m}
    options |= {"W_STAGES": tiles.stages, "X_STAGES": tiles.row_stages, "OVERLAPS": target.overlaps}
    return options | {"num_warps": tiles.warps, "maxnreg": REGISTERS, **target.options}


def panel_call(operands: Operands, target: Target, tiles: Tiles) -> Call:
    """The launch of ``panel_products``; out has the dtype of x."""
    x, weight, bias, out, kind = operands
    scratch, panel = prepare(x.device), tiles.block_n // 2 if kind else tiles.block_n
    pieces = boxes(weight, panel, tiles.block_k), boxes(x, tiles.block_m, tiles.block_k)
    args = (*pieces, weight if bias is None else bias, out, scratch.partials, scratch.turns)
    grid = (weight.shape[0] // tiles.block_n * tiles.shares,)
    sizes = (x.shape[0], out.shape[1], x.shape[1])
    return Call(panel_products, grid, (*args, *sizes), settings(tiles, target, kind, bias is not None))
