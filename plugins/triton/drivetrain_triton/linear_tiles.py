"""Tile sizes of linears for few rows, chosen from the product's shape alone. Free of torch and Triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Literal

MAX_ROWS = 64  # beyond, a vendor's product is no slower: the weight's reading no longer rules
ROW_MAX = 2  # rows up to which multiplying without matrix units keeps up with reading
PARTIAL_BYTES = 16 << 20  # scratch for the parts of split sums
MAX_TILES = 1 << 14  # counts of arrived parts
CHUNKS = (128, 512, 2048)  # bytes of one request to fetch ahead


@dataclass(frozen=True, slots=True)
class Tiles:
    """``way``: ``rows`` (float32 products, up to 4 tokens) or ``dot`` (matrix units).

    ``block_m`` tokens x ``block_n`` weight rows (gate and up rows both count) x ``block_k`` elements a step.
    ``ahead``: bytes of each weight row that a program asks into the second-level cache before it waits, a power of
    two, in requests of ``chunk`` bytes. Only for ``dot``: ``split`` parts of each sum, ``stages`` of the copy
    pipeline, ``weight_first``: the weight is the product's left side, so that tokens fill the narrow side of the
    matrix unit.
    """

    way: Literal["rows", "dot"]
    block_m: int
    block_n: int
    block_k: int
    warps: int = 4
    ahead: int = 0
    chunk: int = 128
    split: int = 1
    stages: int = 4
    weight_first: bool = True


def fits(tiles: Tiles, rows: int, outputs: int) -> bool:
    """Whether the scratch holds the parts. ``outputs``: weight rows."""
    panels = ceil(outputs / tiles.block_n) * ceil(rows / tiles.block_m)
    size = panels * tiles.split * tiles.block_n * tiles.block_m * 4
    return tiles.split == 1 or (size <= PARTIAL_BYTES and panels <= MAX_TILES)


@lru_cache(maxsize=4096)
def choose(rows: int, outputs: int, inputs: int, arch: int, item_bytes: int = 2) -> Tiles:
    """Tiles for x [rows, inputs] and weight [outputs, inputs]; ``arch`` 0: the interpreter, which likes few steps."""
    if rows <= ROW_MAX:
        return _row_tiles(rows, outputs, inputs, item_bytes)
    return _dot_tiles(rows, outputs, inputs, arch, item_bytes)


def _row_tiles(rows: int, outputs: int, inputs: int, item_bytes: int) -> Tiles:
    """Small panels: every multiprocessor holds several programs, each with a tile of 8 or 16 KB on its way; more would
    not fit the registers, in which a second row keeps as much again."""
    block_n = 16 if outputs >= 16384 else 8 if outputs >= 3072 else 4
    block_k = min(16384 // block_n, 2048, max(512, _power(inputs * item_bytes))) // (item_bytes * _power(rows))
    ahead = min(32768 // block_n, _power(inputs * item_bytes))
    return Tiles("rows", _power(rows), block_n, block_k, warps=4, ahead=ahead)


def _dot_tiles(rows: int, outputs: int, inputs: int, arch: int, item_bytes: int) -> Tiles:
    """Two programs a multiprocessor at most, all of them at work at once, with 64 KB on their way each."""
    block_m = min(64, max(16, _power(rows)))
    if item_bytes == 4:
        return Tiles("dot", block_m, 32, 32, stages=3)
    block_n = 128 if outputs >= 16384 and block_m <= 32 else 64
    block_k = 64 if block_n == 128 or block_m == 64 else 128
    steps, panels = ceil(inputs / block_k), ceil(outputs / block_n) * ceil(rows / block_m)
    split = max(1, min(264 // panels, steps // 4, 8))
    ahead = 131072 // block_n
    tiles = Tiles("dot", block_m, block_n, block_k, ahead=ahead, split=split)
    return tiles if fits(tiles, rows, outputs) else Tiles("dot", block_m, block_n, block_k, ahead=ahead)


def _power(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def chunks(tiles: Tiles, inputs: int, item_bytes: int, arch: int, overlaps: bool) -> int:
    """How many requests a row fetches ahead: none where the device has none, or rows are short or not aligned."""
    row = inputs * item_bytes
    if not overlaps or arch < 90 or row % 16 or row < tiles.chunk:
        return 0
    return tiles.ahead // tiles.chunk
