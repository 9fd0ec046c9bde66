"""Up to how many rows the small-batch kernels beat cuBLAS, by shape of the weight; measured by
``ci/perf/device_linear.py`` on an H200 (compute capability 9.0). Other cards take the same rows."""

from __future__ import annotations

from drivetrain_triton import linear_normed_tiles, linear_tiles

LARGE = 1 << 24  # elements of a weight whose reading outlasts a launch many times
SHORT_ROWS = 8
MOST_OUTS = 1 << 18  # what the kernels' scratch holds in every dtype
LONGEST_NORMED, SMALL = 4096, 1 << 22  # elements of a row, and of a weight


def most_small_rows(outs: int, ins: int, arch: int, item_bytes: int) -> int:
    """Return the most rows of x for which the small-batch kernel is taken."""
    if outs > MOST_OUTS:
        return 1
    most = linear_tiles.most_rows(arch, item_bytes, ins)
    if linear_tiles.streams(arch, item_bytes, ins):
        return most
    return 1 if outs * ins >= LARGE else min(SHORT_ROWS, most)


def most_normed_rows(outs: int, ins: int) -> int:
    """Return the most rows for which the norm before a product is done inside it; 0: never.

    Every program norms the rows anew, which pays while they are few and short: for one row of up to 4,096 elements, and
    for two where the weight is small too (``ci/perf/device_normed.py``).
    """
    if ins > LONGEST_NORMED:
        return 0
    return min(2 if outs * ins <= SMALL else 1, linear_normed_tiles.most_rows(ins))
