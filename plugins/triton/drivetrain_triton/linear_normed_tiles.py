"""Tile sizes of linears with the addition and the norm before them. Free of torch and Triton."""

from __future__ import annotations

from functools import lru_cache

from drivetrain_triton.linear_tiles import Tiles

MOST_ROWS = 2
MOST_INPUTS = 8192  # elements of a row that a program holds
# (weight rows, inputs): {rows: tiles}, where a measurement says other than the rules below
MEASURED: dict[tuple[int, int], dict[int, Tiles]] = {
    (4096, 1024): {1: Tiles("rows", 1, 16, 1024, warps=8), 2: Tiles("rows", 2, 16, 1024, warps=8)},
    (6144, 1024): {1: Tiles("rows", 1, 16, 1024, warps=8)},
    (6144, 4096): {1: Tiles("rows", 1, 16, 512, warps=8)},
    (28672, 4096): {1: Tiles("rows", 1, 4, 4096, warps=8)},
}


@lru_cache(maxsize=4096)
def choose(rows: int, outputs: int, inputs: int, item_bytes: int = 2) -> Tiles:
    """Tiles for up to ``most_rows`` rows and weight [outputs, inputs]."""
    whole = power(inputs)
    if item_bytes == 2 and rows in MEASURED.get((outputs, inputs), {}):
        return MEASURED[outputs, inputs][rows]
    if whole <= 1024:
        return Tiles("rows", rows, 8, whole)
    return Tiles("rows", rows, 4, min(whole, 8192 // item_bytes), warps=8)


def most_rows(inputs: int) -> int:
    """The most rows that the kernel takes."""
    return MOST_ROWS if inputs <= MOST_INPUTS else 0


def fits(tiles: Tiles, rows: int, inputs: int) -> bool:
    """Whether the kernel takes these tiles."""
    return 0 < rows <= tiles.block_m <= most_rows(inputs) and tiles.way == "rows" and tiles.block_k <= power(inputs)


def power(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()
