"""Values as integers that rise with them, and with the token id behind: what draws compare."""

from __future__ import annotations

import triton
from triton import language as tl

LOWEST = tl.constexpr(-(2**63))


@triton.jit
def key_of(value):
    """float32 -> int32 that rises with the value; both zeros alike, every NaN above +inf."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, key)


@triton.jit
def value_of(key):
    """The float32 whose key this is; NaN of NaN's."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def joined(key, index):
    """int64: by key, then the lower index first."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def upper(both):
    """The key of a joined one."""
    return (both >> 32).to(tl.int32)


@triton.jit
def lowest(both):
    """The index of a joined one."""
    return 0x7FFFFFFF - (both & 0xFFFFFFFF).to(tl.int32)
