"""Gated products of many rows, the activation in their last step: a persistent grid of tiles of 128 tokens by 128 gate
and 128 up rows.

One warp asks for pieces of rows and weights by bulk copies, stage after stage and tile after tile; two groups of four
warps multiply 64 tokens each, and send their results out by bulk copies while the next tile's pieces come. The first
stages of weights are asked for before the kernels ahead are waited for. Written in Gluon; for compute capability 9.0.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra import cuda

from drivetrain_triton.launch import kernel
from drivetrain_triton.linear import KINDS, Call, copied_in_bulk
from drivetrain_triton.linear_stream import activated, boxes, together
from drivetrain_triton.linear_tiles import WIDE_OUTS, WIDE_TOKENS
from drivetrain_triton.target import Target

STAGES = 4
GROUPED = 8  # token tiles that go through all weights together
HALF = gl.constexpr(64)  # tokens of one group of warps
STEP = gl.constexpr(64)  # inputs of a stage: what a swizzled row of shared memory holds


@gluon.jit
def tile_place(tile, token_tiles, weight_tiles, GROUP: gl.constexpr):
    """Which tokens and which weights: GROUP token tiles go through all weights together, so that both stay cached."""
    every = GROUP * weight_tiles
    first = tile // every * GROUP
    size = gl.minimum(token_tiles - first, GROUP)
    inner = tile % every
    return first + inner % size, inner // size


@gluon.jit
def share_of(M, N, K, OUTS: gl.constexpr):
    """(program, programs, token tiles, weight tiles of OUTS, tiles of this program, steps of a tile)"""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    token_tiles = (M + 2 * HALF - 1) // (2 * HALF)
    weight_tiles = (N + OUTS - 1) // OUTS
    count = (token_tiles * weight_tiles - program + programs - 1) // programs
    steps = (K + STEP - 1) // STEP
    return program, programs, token_tiles, weight_tiles, count, steps


@gluon.jit
def signals(STAGES: gl.constexpr):
    """(full, empty) [STAGES, 1], ready for use: one copying warp fills a stage, two groups of warps have read it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    hopper.fence_async_shared()
    together()
    return full, empty


@gluon.jit
def ask_panel(weight, ready, panel, column, at, there, N, GATED: gl.constexpr):
    """Ask for a stage's weights: rows from ``column`` on, if gated as many from N + ``column`` on."""
    if GATED:
        half: gl.constexpr = panel.shape[0] // 2
        tma.async_copy_global_to_shared(weight, [column, at], ready, panel.slice(0, half), pred=there)
        tma.async_copy_global_to_shared(weight, [N + column, at], ready, panel.slice(half, half), pred=there)
    else:
        tma.async_copy_global_to_shared(weight, [column, at], ready, panel, pred=there)


@gluon.jit
def ask_tokens(x, ready, ring, stage, row, at, there):
    """Ask for a stage's tokens: one piece for each group of warps."""
    tma.async_copy_global_to_shared(x, [row, at], ready, ring.index(stage * 2), pred=there)
    tma.async_copy_global_to_shared(x, [row + HALF, at], ready, ring.index(stage * 2 + 1), pred=there)


@gluon.jit
def bring(weight, x, panels, rows, full, empty, program, programs, every, steps, token_tiles, weight_tiles, N,
          OUTS: gl.constexpr, GATED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
          OVERLAPS: gl.constexpr):  # fmt: skip
    """The copying warp: ``every`` pieces, ``steps`` for each of a program's tiles."""
    PANEL: gl.constexpr = panels.shape[1]
    BYTES: gl.constexpr = (PANEL + 2 * HALF) * STEP * 2
    for stage in gl.static_range(STAGES):
        _, panel = tile_place(program + stage // steps * programs, token_tiles, weight_tiles, GROUP)
        there = stage < every
        mbarrier.expect(full.index(stage), BYTES, pred=there)
        ask_panel(weight, full.index(stage), panels.index(stage), panel * OUTS, stage % steps * STEP, there, N, GATED)
    if OVERLAPS:
        cuda.gdc_wait()
    for stage in gl.static_range(STAGES):
        block, _ = tile_place(program + stage // steps * programs, token_tiles, weight_tiles, GROUP)
        ask_tokens(x, full.index(stage), rows, stage, block * (2 * HALF), stage % steps * STEP, stage < every)
    stage = program * 0
    phase = program * 0
    for index in range(STAGES, every):
        block, panel = tile_place(program + index // steps * programs, token_tiles, weight_tiles, GROUP)
        at = index % steps * STEP
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), BYTES)
        ask_panel(weight, full.index(stage), panels.index(stage), panel * OUTS, at, True, N, GATED)
        ask_tokens(x, full.index(stage), rows, stage, block * (2 * HALF), at, True)
        wrapped = stage + 1 == STAGES
        stage = gl.where(wrapped, 0, stage + 1)
        phase = gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def silu(x):
    """x / (1 + exp(-x)) in five instructions, two of them approximate (2^-22): each tile waits for its activation."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
        "rcp.approx.ftz.f32 e, e; mul.f32 $0, $1, e; }",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def gated(total, dtype: gl.constexpr, KIND: gl.constexpr):
    """Sums [tokens, gate and up columns] -> [tokens, columns] float32; roundings as by separate kernels.

    KIND: a place in ``KINDS``.
    """
    tokens: gl.constexpr = total.shape[0]
    outs: gl.constexpr = total.shape[1] // 2
    gate, up = gl.split(gl.permute(gl.reshape(total, [tokens, 2, outs]), [0, 2, 1]))
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
    if KIND == 0:
        gate = silu(gate)
    elif KIND == 1:
        gate = activated(gate, "gelu")
    else:
        gate = activated(gate, "gelu_tanh")
    return gate.to(dtype).to(gl.float32) * up


@gluon.jit
def send(total, out, results, row, column, KIND: gl.constexpr):
    """Write gated sums by a bulk copy that may still be on its way afterwards."""
    result = gated(total, results.dtype, KIND)
    tma.store_wait(0)
    together()  # the last result has been read
    results.store(result.to(results.dtype))
    hopper.fence_async_shared()
    together()
    tma.async_copy_shared_to_global(out, [row, column], results)


@gluon.jit
def sums_of(panels, rows, full, empty, stage, phase, steps, WHICH: gl.constexpr, STAGES: gl.constexpr):
    """One tile's sums [HALF, PANEL] of tokens WHICH * HALF on, and where in the ring the next tile begins."""
    PANEL: gl.constexpr = panels.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PANEL, 16])
    total = gl.zeros([HALF, PANEL], gl.float32, layout)
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        total = hopper.warpgroup_mma(
            rows.index(stage * 2 + WHICH), panels.index(stage).permute((1, 0)), total, is_async=True
        )
        total = hopper.warpgroup_mma_wait(1, deps=[total])
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
        wrapped = stage + 1 == STAGES
        stage = gl.where(wrapped, 0, stage + 1)
        phase = gl.where(wrapped, phase ^ 1, phase)
    total = hopper.warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
    return total, stage, phase


@gluon.jit
def multiply(out, panels, rows, full, empty, results, program, programs, count, steps, token_tiles, weight_tiles,
             WHICH: gl.constexpr, KIND: gl.constexpr, OUTS: gl.constexpr, GROUP: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    """A group of four warps: tokens WHICH * HALF on of ``count`` tiles."""
    stage = program * 0
    phase = program * 0
    for number in range(count):
        total, stage, phase = sums_of(panels, rows, full, empty, stage, phase, steps, WHICH, STAGES)
        block, panel = tile_place(program + number * programs, token_tiles, weight_tiles, GROUP)
        send(total, out, results, block * (2 * HALF) + WHICH * HALF, panel * OUTS, KIND)
    tma.store_wait(0)


@kernel
@gluon.jit(do_not_specialize=["M"])
def wide_products(
    weight,
    x,
    out,
    M,
    N,
    K,
    KIND: gl.constexpr,
    PANEL: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Any number of programs: out [M, N] of x [M, K] and weights [2 N, K], N gate rows and then N up rows.

    ``weight`` describes them in boxes of half a PANEL by STEP, ``x`` in boxes [HALF, STEP], ``out`` in boxes of HALF by
    half a PANEL. All give zeros outside and write nothing there.
    """
    if OVERLAPS:
        cuda.gdc_launch_dependents()
    OUTS: gl.constexpr = PANEL // 2
    program, programs, token_tiles, weight_tiles, count, steps = share_of(M, N, K, OUTS)

    panels = gl.allocate_shared_memory(weight.dtype, [STAGES, PANEL, STEP], weight.layout)
    rows = gl.allocate_shared_memory(x.dtype, [STAGES * 2, HALF, STEP], x.layout)
    first_results = gl.allocate_shared_memory(out.dtype, [HALF, OUTS], out.layout)
    second_results = gl.allocate_shared_memory(out.dtype, [HALF, OUTS], out.layout)
    full, empty = signals(STAGES)
    # Tuples that are named would turn their constants into numbers of run time.
    gl.warp_specialize([
        (multiply, (out, panels, rows, full, empty, first_results, program, programs, count, steps, token_tiles,
                    weight_tiles, gl.constexpr(0), KIND, OUTS, GROUP, STAGES)),
        (multiply, (out, panels, rows, full, empty, second_results, program, programs, count, steps, token_tiles,
                    weight_tiles, gl.constexpr(1), KIND, OUTS, GROUP, STAGES)),
        (bring, (weight, x, panels, rows, full, empty, program, programs, count * steps, steps, token_tiles,
                 weight_tiles, N, OUTS, gl.constexpr(True), GROUP, STAGES, OVERLAPS)),
    ], [4, 1], [232, 40])  # fmt: skip


def wide_call(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, kind: str, target: Target) -> Call:
    """The launch of ``wide_products`` for x [M, K], weight [2 S, K] and out [M, S]."""
    rows, outs = out.shape
    tiles = -(-rows // WIDE_TOKENS) * -(-outs // WIDE_OUTS)
    options = {"KIND": KINDS.index(kind), "PANEL": 2 * WIDE_OUTS, "GROUP": GROUPED, "STAGES": STAGES}
    options |= {"OVERLAPS": target.overlaps, "num_warps": 4, **target.options}
    pieces = boxes(weight, WIDE_OUTS, STEP.value), boxes(x, HALF.value, STEP.value), boxes(out, HALF.value, WIDE_OUTS)
    return Call(wide_products, (min(tiles, target.multiprocessors),), (*pieces, rows, outs, x.shape[1]), options)


def wide_gated(x: torch.Tensor, weight: torch.Tensor, kind: str, target: Target) -> torch.Tensor:
    """act(x G^T) * (x U^T) for weight [2 S, K] = G over U: [M, S], rounded as by separate kernels.

    x [M, K], last axis contiguous. Shapes are those that ``linear_tiles.is_wide`` takes.
    """
    if x.stride(1) != 1 or not copied_in_bulk(x):
        x = x.clone(memory_format=torch.contiguous_format)
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    call = wide_call(x, weight, out, kind, target)
    call.kernel[call.grid](*call.args, **call.options)
    return out
