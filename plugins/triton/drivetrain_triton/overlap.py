"""Programmatic dependent launch inside kernels. Every kernel that is launched so waits once, before it reads what
another kernel wrote and before it writes at all: all kernels ahead of it have then ended, in order.

A kernel may begin when all programs of the one directly ahead have called ``let_next_begin`` or ended, and that one may
have begun early too: nothing at all is then known to have ended. The exceptions call it after their own wait, so that
what was there before such a kernel is complete when any kernel after it begins: ``rope.angles``, once a step between
its preparation (lengths, block tables, slots) and its layers, and all kernels that write a step's keys and values.
Kernels of decode rows use that. Before their wait they read what the preparation and earlier steps wrote: lengths,
tables, slots, and where they go ahead, keys and values of earlier steps, past the first-level cache, which the device
need not have emptied. Cosines, the new token and sums of shares are read after it. ``token_kernel`` is the writer and
such a reader in one: the kernel ahead of it is a product, which does not wait before it lets the next begin, so what
it reads early is complete by the writer of the layer before, and in the first layer by ``rope.angles``."""

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
