"""Programmatic dependent launch inside kernels. Every kernel that is launched so waits once, before it reads what
another kernel wrote and before it writes at all: all kernels ahead of it have then ended, in order.

A kernel may begin when all programs of the one directly ahead have called ``let_next_begin`` or ended, and that one may
have begun early too: nothing at all is then known to have ended. Kernels that write a step's keys and values are the
exception: they call it after their own wait. What was there before such a kernel (a step's lengths and block tables,
the keys of earlier steps) is therefore complete when any kernel after it begins. Decode kernels use that: they read
lengths and tables before their wait, and ask the second-level cache for keys, which it keeps up to date by itself."""

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
