"""The last step of a head without logits, compiled for one chip and run on the host: the best key of each panel, from
sums laid out as the matrix units leave them. Prints a line for each case; fails where a key is not the right one.

    python -m tests.unit.triton.best_panels

A process of its own: in the tests' process the same kernels are interpreted.
"""

from __future__ import annotations

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from drivetrain_triton.linear_stream import best_of, store_best
from tests.unit.triton.ptx import Machine, Program

# panel, tokens, axis of the panel, warps; as by streams of 64 and 128 rows of weights, and by wide tiles
CASES = ((64, 8, 0, 4), (64, 16, 0, 4), (128, 64, 0, 4), (128, 16, 0, 8), (256, 64, 1, 4))
ROWS = 5  # of more tokens only so many are stored
TILES, TILE = 7, 3


@gluon.jit
def panel_kernel(sums, best, first, N, M, PANEL: gl.constexpr, TOKENS: gl.constexpr, AXIS: gl.constexpr,
                 TILES: gl.constexpr, TILE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """sums [tokens, PANEL] float32 -> one column of best [M, TILES]."""
    SIZE: gl.constexpr = TOKENS if AXIS == 0 else PANEL
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, SIZE, 16])
    if AXIS == 0:
        column = gl.expand_dims(gl.arange(0, PANEL, layout=gl.SliceLayout(1, layout)), 1)
        token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout)), 0)
    else:
        column = gl.expand_dims(gl.arange(0, PANEL, layout=gl.SliceLayout(0, layout)), 0)
        token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout)), 1)
    total = gl.load(sums + token * PANEL + column)
    store_best(best_of(total, first, N, AXIS), best, TILE, TILES, 0, M)


def compiled(panel, tokens, axis, warps):
    sizes = {"PANEL": panel, "TOKENS": tokens, "AXIS": axis, "TILES": TILES, "TILE": TILE, "num_warps": warps}
    signature = {"sums": "*fp32", "best": "*i64", "first": "i32", "N": "i32", "M": "i32"}
    source = GluonASTSource(
        fn=panel_kernel, signature=signature | dict.fromkeys(sizes, "constexpr"), constexprs=sizes, attrs={}
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def sums_of(tokens, panel, inside):
    """Rows of every kind; what lies outside the vocabulary is 0, as copies leave it."""
    values = np.random.default_rng(0).normal(size=(tokens, panel)).astype(np.float32) - 5.0
    values[1] = -np.inf
    values[2, [inside // 3, inside // 2]] = np.nan, -np.nan
    values[3] = np.where(np.arange(panel) % 2, 0.0, -0.0)
    values[4, [7, inside - 1]] = 3.0
    values[6, inside - 1], values[7, 0] = np.inf, 4.0
    values[:, inside:] = 0.0
    return values


def expected(values, first, inside):
    """(token, logit) of each row: NaN above all, ties to the lowest."""
    values = values[:, :inside]
    place = np.where(np.isnan(values).any(1), np.isnan(values).argmax(1), values.argmax(1))
    return first + place, values[np.arange(len(values)), place]


def unpacked(keys):
    """(token, logit) of joined keys."""
    upper = (keys >> 32).astype(np.int32)
    return 0x7FFFFFFF - (keys & 0xFFFFFFFF), np.where(upper < 0, upper ^ 0x7FFFFFFF, upper).view(np.float32)


def check(case, inside, rows):
    panel, tokens, _, warps = case
    made, first = compiled(*case), 1280
    values = sums_of(tokens, panel, inside)
    memory = np.zeros(values.nbytes + tokens * TILES * 8, np.uint8)
    memory[: values.nbytes] = values.view(np.uint8).reshape(-1)
    keys = memory[values.nbytes :].view(np.int64).reshape(tokens, TILES)
    keys[:] = -1
    program = Program(made.asm["ptx"])
    names = [name for _, name in program.params]
    given = (0, values.nbytes, first, first + inside, rows)
    numbers = dict(zip(names, given, strict=False)) | dict.fromkeys(names[len(given) :], 0)
    place = (values.nbytes, len(memory))
    Machine(program, 32 * warps, memory, numbers, {}, [place], late=False).run((0, 0, 0), (1, 1, 1))
    token, logit = expected(values, first, inside)
    got_token, got_logit = unpacked(keys[:rows, TILE])
    np.testing.assert_array_equal(got_token, token[:rows])
    np.testing.assert_array_equal(got_logit, logit[:rows])
    assert (np.delete(keys, TILE, 1) == -1).all() and (keys[rows:] == -1).all(), "other places are left alone"
    print(f"{case} {inside} of {panel} columns, {rows} of {tokens} rows: right")


def main():
    for case in CASES:
        for inside in (case[0], case[0] // 2 + 1, case[0] - 8):
            check(case, inside, case[1])
        check(case, case[0], ROWS)


if __name__ == "__main__":
    main()
