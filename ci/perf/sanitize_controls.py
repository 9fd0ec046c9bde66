# ruff: noqa: ANN001, ANN201  (kernels: the compiler types their arguments)
"""Two kernels that say what racecheck itself is worth where warps are specialized. Gluon, compute capability 9.0.

``orderly`` hands values to its other warps and nothing else: what racecheck reports of it is what it reports of
``warp_specialize`` alone. In ``racing`` those warps read shared memory while the first ones write it, with nothing in
between: racecheck must report that, and it must not be put aside.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from drivetrain_triton.launch import kernel
from drivetrain_triton.linear_stream import together

SIZE = gl.constexpr(128)
PARTS = gl.constexpr(3)


@gluon.jit
def count(out, numbers, first, PART: gl.constexpr, WARPS: gl.constexpr, RACING: gl.constexpr):
    """out[first + PART * SIZE ..]: counted up. RACING: part 0 leaves its numbers in shared memory, part 1 takes them
    from there."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    at = gl.arange(0, SIZE, layout=layout) + first
    if RACING and PART == 0:
        numbers.store(at.to(gl.int64))  # of eight bytes: plain stores and loads, where matrices' would do for four
        together()
    if RACING and PART == 1:
        at = numbers.load(layout).to(gl.int32)
    gl.store(out + first + PART * SIZE + gl.arange(0, SIZE, layout=layout), at + PART * SIZE)


@gluon.jit
def counted(out, begins, RACING: gl.constexpr):
    """Two groups of four warps and one warp, as in kernels of bulk copies; PARTS * SIZE numbers a program, from where
    ``begins`` says."""
    first = gl.load(begins + gl.program_id(0))
    numbers = gl.allocate_shared_memory(gl.int64, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([
        (count, (out, numbers, first, gl.constexpr(0), gl.constexpr(4), RACING)),
        (count, (out, numbers, first, gl.constexpr(1), gl.constexpr(4), RACING)),
        (count, (out, numbers, first, gl.constexpr(2), gl.constexpr(1), RACING)),
    ], [4, 1], [232, 40])  # fmt: skip


@kernel
@gluon.jit
def orderly(out, begins):
    """out [programs, PARTS * SIZE] int32: counted up."""
    counted(out, begins, gl.constexpr(False))


@kernel
@gluon.jit
def racing(out, begins):
    """As ``orderly``, with a race."""
    counted(out, begins, gl.constexpr(True))


def run_control(name: str, device: torch.device, rows: int = 64) -> None:
    """Launch one of them; RuntimeError where ``orderly`` is wrong."""
    which = {"orderly": orderly, "racing": racing}[name]
    width = PARTS.value * SIZE.value
    out = torch.full((rows, width), -1, dtype=torch.int32, device=device)
    begins = torch.randperm(rows).to(torch.int32).to(device) * width
    which[(rows,)](out, begins, num_warps=4)
    right = torch.arange(out.numel()).view_as(out)
    if name == "orderly" and not torch.equal(out.cpu().long(), right):
        raise RuntimeError("the orderly control kernel is wrong")
