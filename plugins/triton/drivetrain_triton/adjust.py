"""sample.adjust and sample.count: penalties token by token, then the few tokens that biases and bans name.

The first kernel reads every logit and its count once. The second has one program a row: biased tokens are computed anew
from their logits, since a bias comes before penalties; what is banned is written after them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton import language as tl

from drivetrain_api.v1 import AdjustInputs, AdjustSpec, CountSpec

from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier
from .target import Target

TILE = 2048
WARPS = 4
COUNTED = 128


@triton.jit
def _penalized(x, word, repetition, presence, frequency):
    """One logit after penalties. ``word``: draws of the token, + 2^30 where the prompt has it."""
    drawn = word & 0x3FFFFFFF
    x = tl.where(word != 0, tl.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * drawn.to(tl.float32) - tl.where(drawn > 0, presence, 0.0)


@kernel
@triton.jit(do_not_specialize=["logits_stride"], do_not_specialize_on_alignment=["logits"])
def _penalties(
    logits, out, slots, counts, repetition, presence, frequency, logits_stride, strides,
    V: tl.constexpr, PENALTY: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A tile of one row a program: logits [N, V] -> out [N, V] float32. ``strides``: from a slot's penalties to the
    next one's."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = index < V
    x = tl.load(logits + row * logits_stride + index, mask=inside, other=0.0).to(tl.float32)
    if PENALTY:
        slot = tl.load(slots + row).to(tl.int64)
        word = tl.load(counts + slot * V + index, mask=inside, other=0)
        first, second, third = (
            tl.load(repetition + slot * strides[0]),
            tl.load(presence + slot * strides[1]),
            tl.load(frequency + slot * strides[2]),
        )
        x = _penalized(x, word, first, second, third)
    tl.store(out + row * V + index, x, mask=inside)


@kernel
@triton.jit(do_not_specialize=["logits_stride"], do_not_specialize_on_alignment=["logits"])
def _named(
    logits, out, slots, position, counts, repetition, presence, frequency, bias_ids, bias_values, held_ids, first_stop,
    bad_words, recent, logits_stride, strides,
    V: tl.constexpr, PENALTY: tl.constexpr, BIAS: tl.constexpr, HELD: tl.constexpr, BAD_WORDS: tl.constexpr,
    NUM_BIAS: tl.constexpr, NUM_HELD: tl.constexpr, NUM_WORDS: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr,
    BIAS_BLOCK: tl.constexpr, HELD_BLOCK: tl.constexpr, WORDS_BLOCK: tl.constexpr, LENGTH_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row a program. ``strides``: from a slot to the next, in the order of the tables."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    at = tl.load(position + row)
    out += row * V
    never = float("-inf")
    if BIAS:
        e = tl.arange(0, BIAS_BLOCK)
        ids = tl.load(bias_ids + slot * strides[3] + e, mask=e < NUM_BIAS, other=-1)
        known = ids >= 0
        x = tl.load(logits + row * logits_stride + ids, mask=known, other=0.0).to(tl.float32)
        x += tl.load(bias_values + slot * strides[4] + e, mask=e < NUM_BIAS, other=0.0)
        if PENALTY:
            word = tl.load(counts + slot * V + ids, mask=known, other=0)
            first, second, third = (
                tl.load(repetition + slot * strides[0]),
                tl.load(presence + slot * strides[1]),
                tl.load(frequency + slot * strides[2]),
            )
            x = _penalized(x, word, first, second, third)
        tl.store(out + ids, x, mask=known)
        tl.debug_barrier()  # a ban of the same token comes after
    if HELD:
        h = tl.arange(0, HELD_BLOCK)
        ids = tl.load(held_ids + slot * strides[5] + h, mask=h < NUM_HELD, other=-1)
        early = at < tl.load(first_stop + slot * strides[6])
        tl.store(out + ids, tl.full((HELD_BLOCK,), never, tl.float32), mask=(ids >= 0) & early)
    if BAD_WORDS:
        b, place = tl.arange(0, WORDS_BLOCK)[:, None], tl.arange(0, LENGTH_BLOCK)[None, :]
        tokens = tl.load(
            bad_words + slot * strides[7] + b * LENGTH + place, mask=(b < NUM_WORDS) & (place < LENGTH), other=-1
        )
        before = place < LENGTH - 1
        ring = (at - (LENGTH - 1) + place + RING * LENGTH) % RING
        past = tl.load(recent + slot * strides[8] + ring, mask=before, other=-1)
        others = tl.sum((before & (tokens >= 0) & (tokens != past)).to(tl.int32), axis=1)
        last = tl.sum(tl.where(place == LENGTH - 1, tokens, 0), axis=1)
        tl.store(out + last, tl.full((WORDS_BLOCK,), never, tl.float32), mask=(last >= 0) & (others == 0))


@kernel
@triton.jit
def _count(tokens, slots, position, counts, recent, rows, recent_stride, V: tl.constexpr, RING: tl.constexpr,
           BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):  # fmt: skip
    """``BLOCK`` rows a program."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < rows
    token = tl.load(tokens + n, mask=inside, other=0)
    slot = tl.load(slots + n, mask=inside, other=0).to(tl.int64)
    at = tl.load(position + n, mask=inside, other=0)
    place = counts + slot * V + token
    tl.store(place, tl.load(place, mask=inside, other=0) + 1, mask=inside)
    tl.store(recent + slot * recent_stride + at % RING, token, mask=inside)


def make_adjust(spec: AdjustSpec, target: Target) -> Callable[[torch.Tensor, AdjustInputs], torch.Tensor]:
    """sample.adjust/1. Inner dimensions of the tables lie without gaps, and ``counts`` wholly so."""
    vocabulary, settings = spec.vocabulary, {"OVERLAPS": target.overlaps, "num_warps": WARPS} | target.options

    def adjust(logits: torch.Tensor, inputs: AdjustInputs) -> torch.Tensor:
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        rows, i = logits.shape[0], inputs
        out = torch.empty((rows, vocabulary), dtype=torch.float32, device=logits.device)
        if not rows:
            return out
        tables = (i.repetition, i.presence, i.frequency, i.bias_ids, i.bias_values, i.held_ids, i.first_stop)
        strides = tuple(table.stride(0) for table in (*tables, i.bad_words, i.recent))
        penalties = i.counts, i.repetition, i.presence, i.frequency
        _penalties[(rows, triton.cdiv(vocabulary, TILE))](
            logits, out, i.slots, *penalties, logits.stride(0), strides[:3],
            V=vocabulary, PENALTY=i.any_penalty, TILE=TILE, **settings,
        )  # fmt: skip
        if i.any_bias or i.any_held or i.any_bad_words:
            _named[(rows,)](
                logits, out, i.slots, i.position, *penalties, i.bias_ids, i.bias_values, i.held_ids, i.first_stop,
                i.bad_words, i.recent, logits.stride(0), strides,
                V=vocabulary, PENALTY=i.any_penalty, **_named_sizes(inputs), **settings,
            )  # fmt: skip
        return out

    return adjust


def _named_sizes(i: AdjustInputs) -> dict[str, int | bool]:
    words, length = i.bad_words.shape[1:]
    power = triton.next_power_of_2
    return {
        "BIAS": i.any_bias,
        "HELD": i.any_held,
        "BAD_WORDS": i.any_bad_words,
        "NUM_BIAS": i.bias_ids.shape[1],
        "NUM_HELD": i.held_ids.shape[1],
        "NUM_WORDS": words,
        "LENGTH": length,
        "RING": i.recent.shape[1],
        "BIAS_BLOCK": power(i.bias_ids.shape[1]),
        "HELD_BLOCK": power(i.held_ids.shape[1]),
        "WORDS_BLOCK": power(words),
        "LENGTH_BLOCK": power(length),
    }


def make_count(
    spec: CountSpec, target: Target
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """sample.count/1."""
    settings = {"BLOCK": COUNTED, "OVERLAPS": target.overlaps, "num_warps": WARPS} | target.options

    def count(
        tokens: torch.Tensor, slots: torch.Tensor, position: torch.Tensor, counts: torch.Tensor, recent: torch.Tensor
    ) -> None:
        rows = tokens.shape[0]
        if rows:
            grid, ring = (triton.cdiv(rows, COUNTED),), recent.shape[1]
            parts = tokens, slots, position, counts, recent, rows, recent.stride(0)
            _count[grid](*parts, V=spec.vocabulary, RING=ring, **settings)

    return count
