"""Up to how many rows the small-batch kernels beat cuBLAS, by shape of the weight; measured by
``ci/perf/device_linear.py`` on an H200 (compute capability 9.0). Other cards take the same rows."""

from __future__ import annotations

LARGE = 1 << 24  # elements of a weight whose reading outlasts a launch many times
SHORT_ROWS = 8
MOST_OUTS = 1 << 18  # what the kernels' scratch holds in every dtype
HEAD = (151936, 1024)  # 4 to 9 % faster up to eight rows


def most_small_rows(outs: int, ins: int) -> int:
    """Return the most rows of x for which the small-batch kernel is taken."""
    if outs > MOST_OUTS:
        return 1
    if (outs, ins) == HEAD:
        return SHORT_ROWS
    return 1 if outs * ins >= LARGE else SHORT_ROWS
