"""Tile sizes of linears for few rows, chosen from the product's shape alone. Free of torch and Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Literal

STREAM_ROWS = 64  # beyond, a vendor's product is no slower: the weight's reading no longer rules
FRAGMENT_ROWS = 32  # rows up to which every program may read the rows anew: first-level caches keep them
ROW_ROWS = 4
STREAM_ARCH = 90  # bulk copies and matrix units that read shared memory, as the kernel uses them
STREAM_BYTES = 220 << 10  # shared memory of a program's stages
PARTIAL_BYTES = 24 << 20  # scratch for the parts of split sums
MAX_PANELS = 1 << 14  # counts of arrived parts
SLOTS = 264  # programs at work at once: two a multiprocessor of the chip that the table was measured on
MOST_SHARES = 8
SMALL = 1 << 23  # elements of a weight that is read in little more time than a launch takes
WIDE_TOKENS, WIDE_OUTS = 128, 128  # a tile of ``linear_wide``
WIDE_FULL, WIDE_FEW = 0.95, 0.8  # the least useful part of its work: of many rounds of tiles, of one or two
HEAD_OUTS, HEAD_USEFUL = 256, 0.8  # the same of the head without logits: a tile's vocabulary, the least useful part
HEAD_INPUTS = 1024  # the most inputs of a head that gained for more than STREAM_ROWS
PANEL_FEWEST = 17  # rows: of fewer ``linear_stream`` is no slower
PANEL_ROWS = 64  # tokens of a product of ``linear_panel``, on the matrix unit's long side
PANEL_LEAST, PANEL_MOST = 96, 256  # its programs: fewer leave the card idle, more the scratch has no counts for
PANEL_SHARES = (1, 2, 4, 8)
PANEL_LINES, PANEL_APART = PANEL_MOST // 2, 8  # panels counted for one number of shares; int32 from count to count
PANEL_TURNS = (PANEL_SHARES[-1] + 1) * PANEL_LINES * PANEL_APART  # int32 of all counts
PANEL_BYTES = 16 << 20  # a weight that is small for it
BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # rows, upwards to the next


@dataclass(frozen=True, slots=True)
class Tiles:
    """``way``: ``rows`` (float32 products, up to 4 tokens), ``fragments`` (matrix units fed from registers; a step
    of ``block_k`` is shared by the warps in pieces of 32), ``stream`` (matrix units fed by bulk copies) or ``panel``
    (the same for 17 to 64 rows and small weights, tokens on the long side).

    ``block_m`` tokens x ``block_n`` weight rows (gate and up rows both count) x ``block_k`` elements a step. Only for
    ``stream`` and ``panel``: ``stages`` of the ring of copies (``panel``: of weights, ``row_stages`` of rows), and the
    ``shares`` into which a tile's inputs are cut.
    """

    way: Literal["rows", "fragments", "stream", "panel"]
    block_m: int
    block_n: int
    block_k: int
    warps: int = 4
    shares: int = 1
    stages: int = 4
    row_stages: int = 0


# (weight rows, inputs): {bucket of rows: tiles}, where a measurement says other than the rules below. Rows of a bucket
# share a variant, so that a row's bits do not hang on how many neighbours it has within one.
MEASURED: dict[tuple[int, int], dict[int, Tiles]] = {
    (6144, 4096): {
        1: Tiles("rows", 1, 16, 512, warps=8),
        8: Tiles("stream", 8, 64, 128, shares=4, stages=4),
        16: Tiles("stream", 16, 64, 256, shares=1, stages=4),
        32: Tiles("stream", 32, 64, 256, shares=1, stages=4),
        64: Tiles("stream", 64, 64, 128, shares=1, stages=6),
    },
    (4096, 4096): {
        1: Tiles("rows", 1, 2, 2048),
        8: Tiles("stream", 8, 64, 128, shares=4, stages=6),
        16: Tiles("stream", 16, 64, 256, shares=2, stages=4),
        32: Tiles("stream", 32, 64, 128, shares=2, stages=6),
        64: Tiles("stream", 64, 64, 128, shares=2, stages=4),
    },
    (28672, 4096): {
        1: Tiles("rows", 1, 4, 1024),
        8: Tiles("stream", 8, 64, 256, shares=1, stages=3),
        16: Tiles("stream", 16, 64, 128, shares=1, stages=4),
        32: Tiles("stream", 32, 64, 128, shares=1, stages=4),
        64: Tiles("stream", 64, 128, 128, shares=1, stages=3),
    },
    (4096, 14336): {
        1: Tiles("rows", 1, 2, 2048),
        8: Tiles("stream", 8, 64, 128, shares=4, stages=6),
        16: Tiles("stream", 16, 64, 256, shares=2, stages=4),
        32: Tiles("stream", 32, 64, 256, shares=2, stages=4),
        64: Tiles("stream", 64, 64, 256, shares=2, stages=3),
    },
    (128256, 4096): {
        1: Tiles("rows", 1, 2, 2048),
        8: Tiles("stream", 8, 64, 128, shares=1, stages=4),
        16: Tiles("stream", 16, 128, 128, shares=1, stages=3),
        32: Tiles("stream", 32, 64, 128, shares=1, stages=4),
        64: Tiles("stream", 64, 128, 128, shares=1, stages=3),
    },
    (4096, 1024): {
        1: Tiles("rows", 1, 16, 512),
        2: Tiles("rows", 2, 4, 1024),
        8: Tiles("stream", 8, 64, 256, shares=4, stages=3),
        16: Tiles("stream", 16, 64, 512, shares=2, stages=2),
        32: Tiles("stream", 32, 64, 512, shares=2, stages=2),
        64: Tiles("stream", 64, 64, 256, shares=2, stages=3),
    },
    (1024, 2048): {
        1: Tiles("rows", 1, 2, 2048),
        2: Tiles("rows", 2, 2, 2048),
        8: Tiles("stream", 8, 64, 512, shares=4, stages=2),
        16: Tiles("stream", 16, 64, 512, shares=4, stages=2),
        32: Tiles("stream", 16, 64, 512, shares=4, stages=2),
        64: Tiles("stream", 32, 64, 512, shares=4, stages=2),
    },
    (6144, 1024): {
        1: Tiles("rows", 1, 8, 512),
        8: Tiles("stream", 8, 64, 512, shares=1, stages=2),
        16: Tiles("stream", 16, 64, 512, shares=1, stages=2),
        32: Tiles("stream", 32, 64, 256, shares=1, stages=3),
        64: Tiles("stream", 64, 64, 128, shares=1, stages=4),
    },
    (1024, 3072): {
        1: Tiles("rows", 1, 4, 1024),
        8: Tiles("stream", 8, 64, 512, shares=6, stages=2),
        16: Tiles("stream", 16, 64, 512, shares=6, stages=2),
        32: Tiles("stream", 16, 64, 128, shares=8, stages=4),
        64: Tiles("stream", 32, 64, 128, shares=8, stages=4),
    },
    (151936, 1024): {
        1: Tiles("rows", 1, 4, 1024),
        8: Tiles("stream", 8, 64, 128, shares=1, stages=4),
        16: Tiles("stream", 16, 64, 128, shares=1, stages=4),
        32: Tiles("stream", 32, 64, 128, shares=1, stages=4),
        64: Tiles("stream", 64, 128, 128, shares=1, stages=3),
    },
}

# The same for ``linear_panel``, where it gained over the tiles above in a chain of layers.
PANELS: dict[tuple[int, int], dict[int, Tiles]] = {
    (4096, 1024): {
        32: Tiles("panel", 32, 32, 128, shares=1, stages=6, row_stages=4),
        64: Tiles("panel", 64, 32, 128, shares=1, stages=6, row_stages=4),
    },
    (1024, 2048): {
        32: Tiles("panel", 32, 64, 128, shares=4, stages=4, row_stages=4),
        64: Tiles("panel", 64, 64, 128, shares=4, stages=4, row_stages=4),
    },
    (6144, 1024): {64: Tiles("panel", 64, 64, 128, shares=1, stages=6, row_stages=6)},
    (1024, 3072): {
        32: Tiles("panel", 32, 64, 128, shares=4, stages=6, row_stages=6),
        64: Tiles("panel", 64, 64, 128, shares=4, stages=6, row_stages=6),
    },
}


def bucket(rows: int) -> int:
    """The smallest bucket that holds ``rows``; beyond all, the largest."""
    return next((one for one in BUCKETS if one >= rows), BUCKETS[-1])


def most_rows(arch: int, item_bytes: int, inputs: int) -> int:
    """Rows up to which some kernel takes a weight of this many inputs."""
    if item_bytes != 2:
        return ROW_ROWS
    return STREAM_ROWS if streams(arch, item_bytes, inputs) else FRAGMENT_ROWS


def streams(arch: int, item_bytes: int, inputs: int) -> bool:
    """Whether bulk copies can bring the weight: rows of 16-byte pieces."""
    return arch == STREAM_ARCH and item_bytes == 2 and inputs % 8 == 0


def is_wide(rows: int, outs: int, inputs: int, arch: int, item_bytes: int, programs: int) -> bool:
    """Whether ``linear_wide`` takes a gated product of ``rows`` tokens and ``outs`` gate and as many up rows.

    Its tiles are large and take equal times, so it pays where they fill whole rounds of ``programs``: on an H200 it
    beats a product and an activation by 1 to 13 % where its work is useful to the given parts, and loses elsewhere.
    """
    if not streams(arch, item_bytes, inputs) or outs % 8 or rows <= STREAM_ROWS:
        return False
    rounds = ceil(ceil(rows / WIDE_TOKENS) * ceil(outs / WIDE_OUTS) / programs)
    useful = rows * outs / (rounds * programs * WIDE_TOKENS * WIDE_OUTS)
    return useful >= (WIDE_FEW if rounds <= 2 else WIDE_FULL)


def is_best_kept(rows: int, outs: int, inputs: int, arch: int, item_bytes: int, programs: int) -> bool:
    """Whether ``linear_head`` takes a head of ``outs`` tokens for ``rows`` greedy rows: where it gained over logits.

    One row's logits are no burden. Up to 64 rows all that bulk copies bring: on an H200 1 to 21 % less time than a
    product and a draw. Of more rows the vendor's product is the quicker one, by more the more inputs there are: heads
    of few inputs gained 22 to 30 % where the work of tiles is useful; of 4096 inputs 256 rows lost, and none are taken.
    Up to 128 rows a tile reads its weights once whatever the rows, so that only the vocabulary has to fill rounds.
    """
    if rows < 2 or not streams(arch, item_bytes, inputs):
        return False
    if rows <= STREAM_ROWS:
        tiles = choose(rows, outs, inputs, arch, item_bytes)
        return tiles.way == "stream" and fits(tiles, rows, outs, inputs)
    rounds = ceil(ceil(rows / WIDE_TOKENS) * ceil(outs / HEAD_OUTS) / programs)
    useful = max(rows, WIDE_TOKENS) * outs / (rounds * programs * WIDE_TOKENS * HEAD_OUTS)
    return inputs <= HEAD_INPUTS and useful >= HEAD_USEFUL


def fits(tiles: Tiles, rows: int, outputs: int, inputs: int, programs: int = 0, gated: bool = False) -> bool:
    """Whether the kernel takes the shape and its scratch holds the parts. ``outputs``: weight rows. Only ``panel``
    asks for ``programs``, the multiprocessors, and whether the weight is ``gated``."""
    if tiles.way == "panel":
        return fits_panel(tiles, rows, outputs, inputs, programs, gated)
    blocks, panels = ceil(rows / tiles.block_m), ceil(outputs / tiles.block_n)
    if tiles.way == "rows":
        return blocks == 1 and tiles.block_m <= 4
    if tiles.way == "fragments":
        sides = tiles.block_m % 8 == 0 and (tiles.block_n % 16 == 0 or (tiles.block_n, tiles.block_m) == (8, 16))
        return sides and tiles.block_k % (32 * tiles.warps) == 0
    sides = tiles.block_n in (64, 128, 256) and tiles.block_m % 8 == 0 and inputs % 8 == 0
    stage = (tiles.block_n + tiles.block_m) * tiles.block_k * 2
    sides = sides and stage * tiles.stages <= STREAM_BYTES and tiles.shares <= ceil(inputs / tiles.block_k)
    size = blocks * panels * tiles.shares * tiles.block_n * tiles.block_m * 4
    return sides and (tiles.shares == 1 or (size <= PARTIAL_BYTES and panels * blocks <= MAX_PANELS))


def fits_panel(tiles: Tiles, rows: int, outputs: int, inputs: int, programs: int, gated: bool) -> bool:
    """Whether ``linear_panel`` takes the shape: whole panels and steps, and all programs on the card at once, since
    they wait for each other."""
    panel, shares, step = tiles.block_n, tiles.shares, tiles.block_k
    whole = outputs % panel == 0 and inputs % (shares * step) == 0
    sides = (
        panel in (32, 64, 128) and step in (64, 128, 256) and shares in (PANEL_SHARES[:1] if gated else PANEL_SHARES)
    )
    sides = sides and tiles.block_m in (8, 16, 32, 64) and rows <= tiles.block_m and tiles.warps == 4
    # A stage is given back in the step after: a ring of one would wait for itself.
    rings = min(tiles.stages, tiles.row_stages) >= 2
    ring = (panel * tiles.stages + PANEL_ROWS * tiles.row_stages) * step * 2
    count = outputs // panel * shares
    parts = count * PANEL_ROWS * panel * 4 <= PARTIAL_BYTES
    return whole and sides and rings and ring <= STREAM_BYTES and parts and 0 < count <= min(programs, PANEL_MOST)


@lru_cache(maxsize=4096)
def choose_panel(
    rows: int, outputs: int, inputs: int, arch: int, item_bytes: int, programs: int, gated: bool
) -> Tiles | None:
    """Tiles of ``linear_panel`` on a card of ``programs`` multiprocessors; None where it does not take the product, or
    is not known to gain over what ``choose`` gives."""
    size = bucket(rows)
    if not streams(arch, item_bytes, inputs) or not PANEL_FEWEST <= rows <= PANEL_ROWS:
        return None
    measured = PANELS.get((outputs, inputs), {}).get(size)
    if measured is not None and fits(measured, rows, outputs, inputs, programs, gated):
        return measured
    if size < PANEL_ROWS or outputs * inputs * item_bytes > PANEL_BYTES:
        return None
    return panel_tiles(outputs, inputs, programs, gated)


def panel_tiles(outputs: int, inputs: int, programs: int, gated: bool) -> Tiles | None:
    """Tiles of 64 rows by which most multiprocessors have a program, few of them idle; of equal ones those whose panels
    are higher. Shares of at least 512 inputs, so that bringing them outlasts their meeting."""
    best, most = None, PANEL_LEAST - 1
    for panel, shares in ((64, 1), (64, 2), (32, 1), (32, 2), (32, 4)):
        steps = inputs // (shares * 128)
        stages = max(2, min(4 if panel == 64 else 6, steps))
        tiles = Tiles("panel", PANEL_ROWS, panel, 128, shares=shares, stages=stages, row_stages=max(2, min(4, steps)))
        count, long = outputs // panel * shares, shares == 1 or steps >= 4
        if count > most and long and fits(tiles, PANEL_ROWS, outputs, inputs, programs, gated):
            best, most = tiles, count
    return best


@lru_cache(maxsize=4096)
def choose(rows: int, outputs: int, inputs: int, arch: int, item_bytes: int = 2) -> Tiles:
    """Tiles for x [rows, inputs] and weight [outputs, inputs]; ``arch`` 0: the interpreter, which likes few steps."""
    size = bucket(rows)
    table = MEASURED.get((outputs, inputs), {}) if item_bytes == 2 else {}
    # Below eight tokens a matrix unit is not full, and no product quicker.
    measured = table.get(size, table.get(8) if 1 < size < 8 else None)
    if measured is not None and (measured.way != "stream" or arch == STREAM_ARCH):
        return measured
    if size == 1 or item_bytes != 2:
        return replace(row_tiles(inputs, item_bytes), block_m=size)
    if streams(arch, item_bytes, inputs):
        return stream_tiles(size, outputs, inputs)
    return fragment_tiles(size, outputs, inputs)


def row_tiles(inputs: int, item_bytes: int) -> Tiles:
    """Four weight rows, whole if short: 16 KB on their way in each of many small programs."""
    most, whole = 4096 // item_bytes, _power(max(inputs, 16))
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


def stream_tiles(rows: int, outputs: int, inputs: int) -> Tiles:
    """Low panels, so that many programs share the work evenly; of many rows taller ones where there are enough, since
    each reads all rows anew. Small weights come in few large steps, their inputs cut until a program a multiprocessor
    has work; where a panel's rows are many and its shares too, adding these takes longer than reading the rows twice.
    """
    block_m, small = max(8, rows), outputs * inputs < SMALL
    block_n = 128 if rows > 32 and outputs >= 64 * SLOTS else 64
    block_m = block_m // 2 if rows > 32 and outputs <= 2048 else block_m
    block_k = 128 if block_n == 128 or (rows > 32 and not small) else 512 if small else 256
    tiles = ceil(outputs / block_n)
    shares = max(1, min(MOST_SHARES, round((SLOTS // 2 if small or rows > 8 else SLOTS) / tiles), inputs // block_k))
    stages = 2 if block_k == 512 else 3 if block_n == 128 else 4
    if (block_n + block_m) * block_k * 2 * stages > STREAM_BYTES:
        block_k //= 2
    return Tiles("stream", block_m, block_n, block_k, shares=shares, stages=stages)


def _power(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()
