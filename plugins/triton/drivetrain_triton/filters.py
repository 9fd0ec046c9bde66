"""What top-k and top-p leave of a row, as limits: the smallest key kept, and of that key the largest token id.

In falling order, ties by id, a filter keeps a prefix. So its last key is found by bisection between keys that occur:
each pass over the row counts (top-k) or sums the probabilities of (top-p) what lies above a key half way, and moves one
end to the nearest key that the row has. Then one pass finds how many of the tokens of that key still belong. A pass
costs the row's keys once, and with top-p an exponential a token; about log2 of the row's size of them. What is kept is
decided by float64 sums, as in the reference, in another order of summation.
"""

from __future__ import annotations

import torch
import triton
from triton import language as tl

from drivetrain_api.v1 import SamplingInputs

from .keys import LOWEST, joined, lowest, upper, value_of
from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier
from .target import Target

TILE = 2048
WARPS = 16
HIGHEST = tl.constexpr(2**31 - 1)
LEAST = tl.constexpr(-(2**31))
ALL = tl.constexpr(2**31 - 1)  # as the largest id: no token of the last key is left out
COUNT, ROUGH, EXACT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # measures
UNCLEAR = tl.constexpr(1e-4)  # shares in float32 are off by a tenth of it at most
INFINITE = tl.constexpr(0x7F800000)  # +inf's key


@triton.jit
def _ends(keys, V: tl.constexpr, TILE: tl.constexpr):
    """(joined key of the largest, smallest key) of a row."""
    largest = tl.full((TILE,), LOWEST, tl.int64)
    smallest = tl.full((TILE,), HIGHEST, tl.int32)
    for first in range(0, V, TILE):
        index = first + tl.arange(0, TILE)
        key = tl.load(keys + index, mask=index < V, other=LEAST)
        largest = tl.maximum(largest, joined(key, index))
        smallest = tl.minimum(smallest, tl.where(index < V, key, HIGHEST))
    return tl.max(largest, axis=0), tl.min(smallest, axis=0)


@triton.jit
def _share(key, top):
    """Probability as a multiple of the likeliest's, float64."""
    return tl.exp(value_of(key).to(tl.float64) - value_of(top).to(tl.float64))


@triton.jit
def _above(keys, middle, least, last, top, MEASURE: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr):
    """Of the tokens that (least, last) keep: the measure of those with a key above ``middle``, the smallest such key,
    and the largest key not above. The measure, float64: their number, or the sum of their shares, ROUGH in float32."""
    measure = tl.zeros((TILE,), tl.float64 if MEASURE == EXACT else tl.float32 if MEASURE == ROUGH else tl.int32)
    over = tl.full((TILE,), HIGHEST, tl.int32)
    under = tl.full((TILE,), LEAST, tl.int32)
    for first in range(0, V, TILE):
        index = first + tl.arange(0, TILE)
        key = tl.load(keys + index, mask=index < V, other=LEAST)
        there = (index < V) & ((key > least) | ((key == least) & (index <= last)))
        high = there & (key > middle)
        if MEASURE == EXACT:
            measure += tl.where(high, _share(key, top), 0.0)
        elif MEASURE == ROUGH:
            measure += tl.where(high, tl.exp(value_of(key) - value_of(top)), 0.0)
        else:
            measure += high.to(tl.int32)
        over = tl.minimum(over, tl.where(high, key, HIGHEST))
        under = tl.maximum(under, tl.where(there & (key <= middle), key, LEAST))
    return tl.sum(measure, axis=0).to(tl.float64), tl.min(over, axis=0), tl.max(under, axis=0)


@triton.jit
def _last_key(
    keys, bound, total, low, high, least, last, top, WEIGHTS: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr
):
    """(smallest key such that what lies above it measures less than ``bound`` of ``total``, that measure).

    low and high: keys of the row between which it lies; nothing lies above high. A sum of shares in float32 decides
    where it is far from the bound; only near it is the sum repeated in float64.
    """
    above = tl.full((), 0.0, tl.float64)
    while low < high:
        middle = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
        if WEIGHTS:
            measure, over, under = _above(keys, middle, least, last, top, ROUGH, V, TILE)
            if tl.abs(measure / total - bound) < UNCLEAR:
                measure, over, under = _above(keys, middle, least, last, top, EXACT, V, TILE)
        else:
            measure, over, under = _above(keys, middle, least, last, top, COUNT, V, TILE)
        fits = measure / total < bound
        high = tl.where(fits, under, high)
        above = tl.where(fits, measure, above)
        low = tl.where(fits, low, over)
    if WEIGHTS:
        above, over, under = _above(keys, high, least, last, top, EXACT, V, TILE)
    return high, above


@triton.jit
def _last_id(
    keys, bound, total, key_kept, above, least, last, top, WEIGHTS: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr
):
    """The largest id among the tokens of key ``key_kept`` before which less than ``bound`` of ``total`` lies; the
    first token of a row always belongs."""
    each = tl.full((), 1.0, tl.float64)
    if WEIGHTS:
        each = _share(key_kept, top)
    always = tl.where(key_kept == top, 0, -1)
    before = tl.full((), 0, tl.int32)
    found = tl.full((TILE,), -1, tl.int32)
    for first in range(0, V, TILE):
        index = first + tl.arange(0, TILE)
        key = tl.load(keys + index, mask=index < V, other=LEAST)
        same = (index < V) & (key == key_kept) & ((key > least) | (index <= last))
        place = before + tl.cumsum(same.to(tl.int32), axis=0) - 1
        fits = (above + place.to(tl.float64) * each) / total < bound
        fits = fits | (place == always)
        found = tl.maximum(found, tl.where(same & fits, index, -1))
        before += tl.sum(same.to(tl.int32), axis=0)
    return tl.max(found, axis=0)


@kernel
@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p"])
def _limits(
    keys,  # [N, V] int32, of the scaled logits
    temperature,
    top_k,
    top_p,
    limits,  # [3, N] int32: smallest key kept, largest id kept of that key, key of the likeliest
    V: tl.constexpr,
    ANY_K: tl.constexpr,
    ANY_P: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One row a program."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row, rows = tl.program_id(0), tl.num_programs(0)
    keys += row.to(tl.int64) * V
    largest, smallest = _ends(keys, V, TILE)
    top = upper(largest)
    finite = top < INFINITE
    least = tl.where(finite, smallest, top)
    last = tl.where(finite, ALL, lowest(largest))
    one = tl.full((), 1.0, tl.float64)
    random = (tl.load(temperature + row) != 0.0) & finite
    if ANY_K:
        k = tl.load(top_k + row)
        if random & (k > 0) & (k < V):
            bound = k.to(tl.float64)
            key, above = _last_key(keys, bound, one, least, top, least, last, top, False, V, TILE)
            last = _last_id(keys, bound, one, key, above, least, last, top, False, V, TILE)
            least = key
    if ANY_P:
        p = tl.load(top_p + row)
        if random & (p < 1.0):
            bound = p.to(tl.float64)
            total, _, _ = _above(keys, LEAST, least, last, top, EXACT, V, TILE)
            key, above = _last_key(keys, bound, total, least, top, least, last, top, True, V, TILE)
            last = _last_id(keys, bound, total, key, above, least, last, top, True, V, TILE)
            least = key
    tl.store(limits + row, least)
    tl.store(limits + rows + row, last)
    tl.store(limits + 2 * rows + row, top)


def find_limits(keys: torch.Tensor, inputs: SamplingInputs, target: Target) -> torch.Tensor:
    """keys [N, V] of scaled logits -> limits [3, N] int32, as ``_limits`` writes them."""
    rows, vocabulary = keys.shape
    limits = torch.empty((3, rows), dtype=torch.int32, device=keys.device)
    _limits[(rows,)](
        keys,
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        limits,
        V=vocabulary,
        ANY_K=inputs.any_top_k,
        ANY_P=inputs.any_top_p,
        TILE=min(TILE, triton.next_power_of_2(vocabulary)),
        OVERLAPS=target.overlaps,
        num_warps=WARPS,
        **target.options,
    )
    return limits
