"""The head's product of greedy rows without its logits: each tile of vocabulary leaves one key a row, its best token's,
and a small kernel takes the best of all tiles.

Up to 64 rows by ``linear_stream``, whose sums these are bit by bit; more by the copying and multiplying warps of
``linear_wide``, on tiles of 128 tokens by 256 rows of the vocabulary. Written in Gluon; for compute capability 9.0.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from drivetrain_triton.draws import choose_best
from drivetrain_triton.launch import kernel
from drivetrain_triton.linear import Call, copied_in_bulk, prepare
from drivetrain_triton.linear_stream import best_of, boxes, store_best, stream_products
from drivetrain_triton.linear_tiles import HEAD_OUTS, STREAM_ROWS, WIDE_TOKENS, Tiles, choose, fits
from drivetrain_triton.linear_wide import GROUPED, HALF, STAGES, STEP, bring, share_of, signals, sums_of, tile_place
from drivetrain_triton.target import Target


@gluon.jit
def keep_best(best, panels, rows, full, empty, program, programs, count, steps, token_tiles, weight_tiles, M, N,
              WHICH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A group of four warps: tokens WHICH * HALF on of ``count`` tiles."""
    PANEL: gl.constexpr = panels.shape[1]
    stage = program * 0
    phase = program * 0
    for number in range(count):
        total, stage, phase = sums_of(panels, rows, full, empty, stage, phase, steps, WHICH, STAGES)
        block, panel = tile_place(program + number * programs, token_tiles, weight_tiles, GROUP)
        store_best(best_of(total, panel * PANEL, N, 1), best, panel, weight_tiles, block * 2 + WHICH, M)


@kernel
@gluon.jit(do_not_specialize=["M"])
def wide_best(
    weight,
    x,
    best,
    M,
    N,
    K,
    PANEL: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Any number of programs: best [M, panels of N] int64, the best key of each panel of x [M, K] times weights [N, K].

    ``weight`` describes them in boxes [PANEL, STEP], ``x`` in boxes [HALF, STEP]. Both give zeros outside.
    """
    if OVERLAPS:
        cuda.gdc_launch_dependents()
    program, programs, token_tiles, weight_tiles, count, steps = share_of(M, N, K, PANEL)
    panels = gl.allocate_shared_memory(weight.dtype, [STAGES, PANEL, STEP], weight.layout)
    rows = gl.allocate_shared_memory(x.dtype, [STAGES * 2, HALF, STEP], x.layout)
    full, empty = signals(STAGES)
    # Tuples that are named would turn their constants into numbers of run time.
    gl.warp_specialize([
        (keep_best, (best, panels, rows, full, empty, program, programs, count, steps, token_tiles, weight_tiles, M, N,
                     gl.constexpr(0), GROUP, STAGES)),
        (keep_best, (best, panels, rows, full, empty, program, programs, count, steps, token_tiles, weight_tiles, M, N,
                     gl.constexpr(1), GROUP, STAGES)),
        (bring, (weight, x, panels, rows, full, empty, program, programs, count * steps, steps, token_tiles,
                 weight_tiles, N, PANEL, gl.constexpr(False), GROUP, STAGES, OVERLAPS)),
    ], [4, 1], [232, 40])  # fmt: skip


def tiles_of(rows: int, weight: torch.Tensor, target: Target) -> Tiles | None:
    """How ``linear_stream`` cuts the product; None: by ``wide_best``."""
    if rows > STREAM_ROWS:
        return None
    tiles = choose(rows, *weight.shape, target.arch, weight.element_size())
    if tiles.way != "stream" or not fits(tiles, rows, *weight.shape):
        raise ValueError(f"{rows} rows of {tuple(weight.shape)} are not multiplied by bulk copies")
    return tiles


def best_call(x: torch.Tensor, weight: torch.Tensor, best: torch.Tensor, target: Target) -> Call:
    """The launch that fills best [M, tiles of the vocabulary] int64 for x [M, K] and weight [N, K]."""
    rows, inputs = x.shape
    sizes, tiles = (rows, weight.shape[0], inputs), tiles_of(rows, weight, target)
    options = {"OVERLAPS": target.overlaps, **target.options}
    if tiles is None:
        options |= {"PANEL": HEAD_OUTS, "GROUP": GROUPED, "STAGES": STAGES, "num_warps": 4}
        count = -(-rows // WIDE_TOKENS) * best.shape[1]
        pieces = boxes(weight, HEAD_OUTS, STEP.value), boxes(x, HALF.value, STEP.value)
        return Call(wide_best, (min(count, target.multiprocessors),), (*pieces, best, *sizes), options)
    scratch = prepare(x.device)
    options |= {"HAS_BIAS": False, "KIND": "", "PANEL": tiles.block_n, "BLOCK_M": tiles.block_m}
    options |= {"BLOCK_K": tiles.block_k, "STAGES": tiles.stages, "SHARES": tiles.shares, "num_warps": tiles.warps}
    pieces = boxes(weight, tiles.block_n, tiles.block_k), boxes(x, tiles.block_m, tiles.block_k)
    grid = (best.shape[1], -(-rows // tiles.block_m), tiles.shares)
    return Call(stream_products, grid, (*pieces, weight, best, scratch.partials, scratch.arrivals, *sizes), options)


def empty_best(x: torch.Tensor, weight: torch.Tensor, target: Target) -> torch.Tensor:
    """Room for the best key of each row and tile of the vocabulary."""
    tiles = tiles_of(len(x), weight, target)
    panel = HEAD_OUTS if tiles is None else tiles.block_n
    return torch.empty((len(x), -(-weight.shape[0] // panel)), dtype=torch.int64, device=x.device)


def best_tokens(x: torch.Tensor, weight: torch.Tensor, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K], weight [N, K] -> (each row's token with the largest logit [M] int32, that logit [M] float32).

    NaN above all, ties to the lowest token. The weight begins at a multiple of 16 bytes; up to 64 rows are such that
    ``linear_tiles.choose`` multiplies by bulk copies.
    """
    if x.stride(1) != 1 or not copied_in_bulk(x):
        x = x.clone(memory_format=torch.contiguous_format)
    best = empty_best(x, weight, target)
    call = best_call(x, weight, best, target)
    call.kernel[call.grid](*call.args, **call.options)
    return choose_best(best, target)
