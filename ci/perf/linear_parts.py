"""What the scripts on linears share: the shapes, a launch, and the time of a graph."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "plugins/triton"), str(ROOT / "plugins/api")]

from drivetrain_triton.linear import Call, Operands  # noqa: E402
from drivetrain_triton.linear_tiles import Tiles, choose, choose_panel  # noqa: E402

DEVICE, REPLAYS = "cuda", 15
PROGRAMS = 132  # multiprocessors of an H200
# name: (weight rows, inputs, activation); A: Llama-3.1-8B, C: Qwen3-0.6B
SHAPES = {
    "A.qkv": (6144, 4096, ""),
    "A.out": (4096, 4096, ""),
    "A.gate_up": (28672, 4096, "silu"),
    "A.down": (4096, 14336, ""),
    "A.head": (128256, 4096, ""),
    "C.qkv": (4096, 1024, ""),
    "C.out": (1024, 2048, ""),
    "C.gate_up": (6144, 1024, "silu"),
    "C.down": (1024, 3072, ""),
    "C.head": (151936, 1024, ""),
}


def shape_dtype(name: str) -> torch.dtype:
    """Logits are float32."""
    return torch.float32 if name.endswith("head") else torch.bfloat16


def table_of(name: str, rows: int, *, panels: bool = True) -> Tiles:
    """Tiles of a shape by the tables, with those of ``linear_panel`` or without."""
    outputs, inputs, kind = SHAPES[name]
    found = choose_panel(rows, outputs, inputs, 90, 2, PROGRAMS, bool(kind)) if panels else None
    return found or choose(rows, outputs, inputs, 90)


def operands_of(x: torch.Tensor, weight: torch.Tensor, name: str, out: torch.Tensor | None = None) -> Operands:
    """A shape's operands, with an output of its own unless given."""
    outputs, _, kind = SHAPES[name]
    if out is None:
        out = torch.empty(len(x), outputs // 2 if kind else outputs, dtype=shape_dtype(name), device=x.device)
    return Operands(x, weight, None, out, kind)


def launch(call: Call) -> None:
    """Make the launch."""
    call.kernel[call.grid](*call.args, **call.options)


def timed(work: Callable[[], None], replays: int = REPLAYS) -> float:
    """Median seconds of one replay of a graph of this work."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return replayed(graph, replays)


def replayed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Median seconds of a replay, after two."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays + 2)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks[2:]) / 1e3
