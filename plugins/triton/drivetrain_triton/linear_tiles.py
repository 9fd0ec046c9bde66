"""Tile sizes of linears for few rows, chosen from the product's shape alone. Free of torch and Triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Literal

MAX_ROWS = 64  # beyond, a vendor's product is no slower: the weight's reading no longer rules
FRAGMENT_ROWS = 32  # rows up to which every program may read the rows anew: first-level caches keep them
PARTIAL_BYTES = 24 << 20  # scratch for the parts of split sums
MAX_PANELS = 1 << 14  # counts of arrived parts
SLOTS = 264  # programs at work at once: two a multiprocessor of the chip that the table was measured on
BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # rows, upwards to the next


@dataclass(frozen=True, slots=True)
class Tiles:
    """``way``: ``rows`` (float32 products, up to 4 tokens), ``fragments`` (matrix units fed from registers; a step
    of ``block_k`` is shared by the warps in pieces of 32) or ``walk`` (matrix units, ``programs`` equal shares).

    ``block_m`` tokens x ``block_n`` weight rows (gate and up rows both count) x ``block_k`` elements a step. Only for
    ``walk``: ``stages`` of the copy pipeline, ``weight_first``: the weight is the product's left side, so that tokens
    fill the narrow side of the matrix unit.
    """

    way: Literal["rows", "fragments", "walk"]
    block_m: int
    block_n: int
    block_k: int
    warps: int = 4
    programs: int = 0
    stages: int = 4
    weight_first: bool = True


# (weight rows, inputs): {bucket of rows: tiles}, where a measurement says other than the rules below. Rows of a bucket
# share a variant, so that a row's bits do not hang on how many neighbours it has within one.
MEASURED: dict[tuple[int, int], dict[int, Tiles]] = {
    (6144, 4096): {1: Tiles("rows", 1, 16, 512, warps=8)},
    (4096, 4096): {1: Tiles("rows", 1, 2, 2048)},
    (28672, 4096): {1: Tiles("rows", 1, 4, 1024)},
    (4096, 14336): {1: Tiles("rows", 1, 2, 2048)},
    (128256, 4096): {1: Tiles("rows", 1, 2, 2048)},
    (4096, 1024): {
        1: Tiles("rows", 1, 16, 512),
        2: Tiles("rows", 2, 4, 1024),
        4: Tiles("fragments", 8, 16, 1024),
        8: Tiles("fragments", 8, 16, 1024),
    },
    (1024, 2048): {
        1: Tiles("rows", 1, 2, 2048),
        2: Tiles("rows", 2, 2, 2048),
        4: Tiles("rows", 4, 4, 2048),
        8: Tiles("fragments", 8, 16, 1024, warps=8),
    },
    (6144, 1024): {
        1: Tiles("rows", 1, 8, 512),
        2: Tiles("rows", 2, 4, 1024),
        4: Tiles("fragments", 8, 16, 1024),
        8: Tiles("fragments", 8, 16, 1024),
    },
    (1024, 3072): {
        1: Tiles("rows", 1, 4, 1024),
        2: Tiles("rows", 2, 4, 1024),
        4: Tiles("rows", 4, 4, 1024),
        8: Tiles("fragments", 8, 16, 1024, warps=8),
    },
    (151936, 1024): {
        1: Tiles("rows", 1, 4, 1024),
        2: Tiles("fragments", 8, 16, 1024),
        4: Tiles("fragments", 8, 16, 1024),
        8: Tiles("fragments", 8, 16, 1024),
    },
}


def bucket(rows: int) -> int:
    """The smallest bucket that holds ``rows``; beyond all, the largest."""
    return next((one for one in BUCKETS if one >= rows), BUCKETS[-1])


def fits(tiles: Tiles, rows: int, outputs: int, inputs: int) -> bool:
    """Whether the kernel takes the shape and its scratch holds the parts. ``outputs``: weight rows."""
    blocks, panels = ceil(rows / tiles.block_m), ceil(outputs / tiles.block_n)
    if tiles.way == "rows":
        return blocks == 1 and tiles.block_m <= 4
    if tiles.way == "fragments":
        sides = tiles.block_m % 8 == 0 and (tiles.block_n % 16 == 0 or (tiles.block_n, tiles.block_m) == (8, 16))
        return sides and tiles.block_k % (32 * tiles.warps) == 0
    size = blocks * 2 * shares(tiles, outputs, inputs) * tiles.block_n * tiles.block_m * 4
    return size <= PARTIAL_BYTES and panels * blocks <= MAX_PANELS


def shares(tiles: Tiles, outputs: int, inputs: int) -> int:
    """Programs among which a weight is shared: no more than it has units."""
    return min(tiles.programs, ceil(outputs / tiles.block_n) * ceil(inputs / tiles.block_k))


@lru_cache(maxsize=4096)
def choose(rows: int, outputs: int, inputs: int, arch: int, item_bytes: int = 2) -> Tiles:
    """Tiles for x [rows, inputs] and weight [outputs, inputs]; ``arch`` 0: the interpreter, which likes few steps."""
    size = bucket(rows)
    if item_bytes == 2 and size in MEASURED.get((outputs, inputs), {}):
        return MEASURED[outputs, inputs][size]
    if size == 1:
        return row_tiles(inputs, item_bytes)
    # From arch 100 on, the compiler cannot yet carry the sums of a walk in the memory of its matrix units.
    if item_bytes == 2 and (size <= FRAGMENT_ROWS or arch >= 100):
        return fragment_tiles(size, outputs, inputs)
    return walk_tiles(size, item_bytes)


def row_tiles(inputs: int, item_bytes: int) -> Tiles:
    """Four weight rows, whole if short: 16 KB on their way in each of many small programs."""
    most, whole = 4096 // item_bytes, _power(inputs)
    if whole <= most:
        return Tiles("rows", 1, 4, whole)
    return Tiles("rows", 1, 4, next((k for k in (2048, 1024) if k <= most and inputs % k == 0), 512))


def fragment_tiles(rows: int, outputs: int, inputs: int) -> Tiles:
    """Panels of a unit's height; larger steps where there are few panels, so that enough is on its way at once."""
    block_m = max(8, rows)
    if outputs <= 2048 and block_m == 8:
        return Tiles("fragments", 16, 8, _step(inputs, 1024), warps=4)
    block_n = 16 if block_m == 8 else 32
    few = outputs // block_n <= 3 * 132
    step = (1024 if few else 512) if block_m == 8 else 512 if block_m == 16 else 256
    return Tiles("fragments", block_m, block_n, _step(inputs, step), warps=4)


def _step(inputs: int, largest: int) -> int:
    """The longest step that divides the inputs, or the shortest of all."""
    return next((step for step in (1024, 512, 256) if step <= largest and inputs % step == 0), 128)


def walk_tiles(rows: int, item_bytes: int) -> Tiles:
    """Two programs a multiprocessor, all of them at work at once, with 48 KB of weights on their way each."""
    block_m = max(16, rows)
    if item_bytes == 4:
        return Tiles("walk", block_m, 32, 32, programs=SLOTS, stages=3)
    return Tiles("walk", block_m, 128 if block_m > 32 else 64, 64, programs=SLOTS, stages=3)


def _power(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()
