"""Linears for few rows, and the same with a gated activation: host side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from drivetrain_triton.linear_fragments import fragment_products
from drivetrain_triton.linear_rows import row_products
from drivetrain_triton.linear_tiles import (
    MAX_PANELS,
    PANEL_TURNS,
    PARTIAL_BYTES,
    Tiles,
    choose,
    choose_panel,
    fits,
    most_rows,
)
from drivetrain_triton.target import Target

__all__ = ["Tiles", "choose", "prepare", "product_call", "small_gated", "small_linear", "supports"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class Scratch:
    """Parts of split sums, how many parts of each panel have arrived (zero between launches), and for ``linear_panel``
    how many ever have."""

    partials: torch.Tensor
    arrivals: torch.Tensor
    turns: torch.Tensor


SCRATCH: dict[torch.device, Scratch] = {}


def prepare(device: torch.device) -> Scratch:
    """Make the device's scratch (24 MiB). Call it before a graph is captured.

    Launches on one device follow each other, as on one stream: they share the scratch, and programs of ``linear_panel``
    wait for each other, so that two such launches side by side could wait for ever. Recording a launch on another
    stream is none.
    """
    scratch = SCRATCH.get(device)
    if scratch is None:
        partials = torch.empty(PARTIAL_BYTES // 4, dtype=torch.float32, device=device)
        arrivals, turns = (torch.zeros(size, dtype=torch.int32, device=device) for size in (MAX_PANELS, PANEL_TURNS))
        scratch = Scratch(partials, arrivals, turns)
        SCRATCH[device] = scratch
    return scratch


def supports(rows: int, weight: torch.Tensor, x_dtype: torch.dtype, target: Target) -> bool:
    """Whether these products are ours: few rows, a dense contiguous weight of the rows' dtype."""
    most = most_rows(target.arch, weight.element_size(), weight.shape[1])
    return 0 < rows <= most and weight.dtype == x_dtype and x_dtype in DTYPES and weight.is_contiguous()


class Call(NamedTuple):
    """One launch, not yet made: ``kernel[grid](*args, **options)``."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


class Operands(NamedTuple):
    """x [M, K] with last axis contiguous, weight [N or 2 S, K], bias [N] or None; out [M, N or S]."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    kind: str = ""


@lru_cache(maxsize=4096)
def settings(tiles: Tiles, target: Target, inputs: int, kind: str, has_bias: bool) -> dict[str, Any]:
    """A launch's options."""
    options = {"HAS_BIAS": has_bias, "KIND": kind, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k}
    options |= {"EVEN_K": inputs % tiles.block_k == 0, "OVERLAPS": target.overlaps}
    options |= {"num_warps": tiles.warps, **target.options}
    if tiles.way == "rows":
        return options | {"ROWS": tiles.block_m}
    return options | {"BLOCK_M": tiles.block_m, "WARPS": tiles.warps}


def product_call(operands: Operands, target: Target, tiles: Tiles) -> Call:
    """The launch of these operands with these tiles."""
    if tiles.way == "stream":
        return stream_call(operands, target, tiles)
    if tiles.way == "panel":
        from drivetrain_triton.linear_panel import panel_call  # not everywhere: it needs Triton's Gluon

        return panel_call(operands, target, tiles)
    x, weight, bias, out, kind = operands
    rows, inputs = x.shape
    sizes = (rows, out.shape[1], inputs, x.stride(0))
    options = settings(tiles, target, inputs, kind, bias is not None)
    panels, terms = -(-weight.shape[0] // tiles.block_n), weight if bias is None else bias
    if tiles.way == "rows":
        return Call(row_products, (panels,), (x, weight, terms, out, *sizes), options)
    return Call(fragment_products, (panels, -(-rows // tiles.block_m)), (x, weight, terms, out, *sizes), options)


def stream_call(operands: Operands, target: Target, tiles: Tiles) -> Call:
    """The launch of ``stream_products``."""
    x, weight, bias, out, kind = operands
    rows, inputs = x.shape
    from drivetrain_triton import linear_stream as stream  # not everywhere: it needs Triton's Gluon

    scratch, outs = prepare(x.device), tiles.block_n // 2 if kind else tiles.block_n
    options = {"HAS_BIAS": bias is not None, "KIND": kind, "PANEL": tiles.block_n}
    options |= {"BLOCK_M": tiles.block_m, "BLOCK_K": tiles.block_k, "STAGES": tiles.stages, "SHARES": tiles.shares}
    options |= {"OVERLAPS": target.overlaps, "num_warps": tiles.warps, **target.options}
    boxes = stream.boxes(weight, outs, tiles.block_k), stream.boxes(x, tiles.block_m, tiles.block_k)
    args = (*boxes, weight if bias is None else bias, out, scratch.partials, scratch.arrivals)
    grid = (-(-out.shape[1] // outs), -(-rows // tiles.block_m), tiles.shares)
    return Call(stream.stream_products, grid, (*args, rows, out.shape[1], inputs), options)


def copied_in_bulk(x: torch.Tensor) -> bool:
    """Whether rows begin where bulk copies can start: at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def tiles_of(operands: Operands, target: Target) -> Tiles:
    """Tiles by the tables. Logits, of another dtype than x, stay those that ``linear_head`` takes the best of."""
    x, weight, _, out, kind = operands
    (rows, inputs), outputs, size = x.shape, weight.shape[0], weight.element_size()
    arch = target.arch if weight.data_ptr() % 16 == 0 else 0
    if out.dtype == x.dtype:
        found = choose_panel(rows, outputs, inputs, arch, size, target.multiprocessors, bool(kind))
        if found is not None:
            return found
    return choose(rows, outputs, inputs, arch, size)


def launch(operands: Operands, target: Target, tiles: Tiles | None) -> torch.Tensor:
    """Multiply, with tiles by the table unless given."""
    rows, inputs = operands.x.shape
    if rows == 0:
        return operands.out
    outputs = operands.weight.shape[0]
    if tiles is None:
        tiles = tiles_of(operands, target)
    if not fits(tiles, rows, outputs, inputs, target.multiprocessors, bool(operands.kind)):
        raise ValueError(f"{tiles} do not fit {rows} rows of {outputs} x {inputs}, or the scratch")
    if operands.x.stride(1) != 1 or (tiles.way in ("stream", "panel") and not copied_in_bulk(operands.x)):
        operands = operands._replace(x=operands.x.clone(memory_format=torch.contiguous_format))
    call = product_call(operands, target, tiles)
    call.kernel[call.grid](*call.args, **call.options)
    return operands.out


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    target: Target,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N]; summed in float32, rounded once."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    return launch(Operands(x, weight, bias, out), target, tiles)


def small_gated(
    x: torch.Tensor, weight: torch.Tensor, kind: str, target: Target, tiles: Tiles | None = None
) -> torch.Tensor:
    """act(x G^T) * (x U^T) for weight [2 S, K] = G over U: [M, S], rounded as by separate kernels."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no gated activation: one of {', '.join(KINDS)}")
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    return launch(Operands(x, weight, None, out, kind), target, tiles)
