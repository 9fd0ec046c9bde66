"""Tile sizes of linears with the addition and the norm before them. Free of torch and Triton."""

from __future__ import annotations

from functools import lru_cache

from drivetrain_triton.linear_tiles import Tiles, bucket

MOST_ROWS, MOST_WIDE_ROWS = 8, 2  # of two bytes an element; of four, which matrix units do not take
MOST_INPUTS = 8192  # elements of a row that a program of the ``rows`` way holds
# (weight rows, inputs): {bucket of rows: tiles}, where a measurement says other than the rules below
MEASURED: dict[tuple[int, int], dict[int, Tiles]] = {}


@lru_cache(maxsize=4096)
def choose(rows: int, outputs: int, inputs: int, item_bytes: int = 2) -> Tiles:
    """Tiles for up to ``most_rows`` rows and weight [outputs, inputs]."""
    size, whole = bucket(rows), power(inputs)
    if item_bytes == 2 and size in MEASURED.get((outputs, inputs), {}):
        return MEASURED[outputs, inputs][size]
    if size > 2:
        # A second step leaves registers for half as much of eight rows.
        step = min(max(256, whole), 1024 if whole <= 1024 else 512)
        return Tiles("fragments", 8, 16, step, warps=4)
    if whole <= 1024:
        return Tiles("rows", size, 8, whole)
    return Tiles("rows", size, 4, min(whole, 8192 // item_bytes), warps=8)


def most_rows(item_bytes: int, inputs: int) -> int:
    """The most rows that the kernels take."""
    if inputs > MOST_INPUTS:
        return 0
    return MOST_ROWS if item_bytes == 2 else MOST_WIDE_ROWS


def fits(tiles: Tiles, rows: int, inputs: int, item_bytes: int = 2) -> bool:
    """Whether the kernels take these tiles."""
    if not 0 < rows <= most_rows(item_bytes, inputs):
        return False
    if tiles.way == "rows":
        return rows <= tiles.block_m <= 2 and tiles.block_k <= power(inputs)
    sides = tiles.block_m % 8 == 0 and tiles.block_n % 16 == 0
    return tiles.way == "fragments" and sides and tiles.block_k % (32 * tiles.warps) == 0


def power(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()
