"""Programmatic dependent launch inside kernels. Every kernel that is launched so waits once, before it reads what
another kernel wrote and before it writes at all: all kernels ahead of it have then ended, in order."""

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra import cuda


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """Let the next kernel start to load what does not depend on this one."""
    if OVERLAPS:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(OVERLAPS: tl.constexpr):
    """Wait until the kernels ahead have ended and their writes are seen."""
    if OVERLAPS:
        cuda.gdc_wait()
