"""sample.draw without a sort: pieces of the vocabulary in parallel, then one choice a row.

What is compared is an ordered key: the value's bits as an integer that rises with the value (NaN above all), and below
it the complement of the token id, in one int64. Its maximum is the largest value, ties to the lowest id, whatever the
order in which pieces are compared; so neither the number of pieces nor the batch has a part in the result.

Greedy and plain temperature: two launches. With filters two more go ahead: keys of the scaled logits into a scratch
[N, vocabulary] int32, and each row's limits (module ``filters``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton import language as tl

from drivetrain_api.v1 import DrawSpec, SamplingInputs

from .filters import find_limits
from .keys import LOWEST, joined, key_of, lowest, upper, value_of
from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier
from .target import Target

TILE = 1024
MOST_PIECES = 128
WARPS = 4
PER_PROCESSOR = 12  # programs of _scan that a multiprocessor is given before a row is cut into fewer pieces


@triton.jit
def gumbel(words):
    """-log(-log(1 - u)), u = (x + 1/2) 2^-32: computed in float64, rounded to float32. 1 - u is exact."""
    rest = (tl.full((), 4294967295.5, tl.float64) - words.to(tl.float64)) * tl.full((), 2.0**-32, tl.float64)
    return (-tl.log(-tl.log(rest))).to(tl.float32)


@triton.jit
def _noise(first, seed, position, sample, stream, TILE: tl.constexpr):
    """Noise [TILE] of the tokens from ``first``, a multiple of 4, on: four words a generator call."""
    quad = (first // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    same = tl.zeros((TILE // 4,), tl.uint32)
    a, b, c, d = tl.philox(
        seed, quad, same + position.to(tl.uint32), same + sample.to(tl.uint32), same + stream.to(tl.uint32)
    )
    return gumbel(tl.join(tl.join(a, c), tl.join(b, d)).reshape(TILE))


@triton.jit
def _allowed(logits, mask, index, inside, MASKED: tl.constexpr):
    """Logits in float32, -inf where the mask's bit is 0 and outside."""
    value = tl.load(logits + index, mask=inside, other=float("-inf")).to(tl.float32)
    if MASKED:
        word = tl.load(mask + index // 32, mask=inside, other=0)
        value = tl.where((word >> (index % 32)) & 1 != 0, value, float("-inf"))
    return value


@kernel
@triton.jit(
    do_not_specialize=["tiles", "stream"],
    do_not_specialize_on_alignment=["temperature", "seed", "position", "sample", "limits", "min_p"],
)
def _scan(
    logits,  # [N, V], rows logits_stride apart; with FILTERED keys of the scaled logits, int32
    temperature,
    seed,
    position,
    sample,
    mask,
    limits,  # [3, N] int32: smallest key kept, largest id kept of that key, key of the likeliest; with FILTERED
    min_p,
    best,  # [N, pieces] int64
    logits_stride,
    mask_stride,
    tiles,
    stream,
    V: tl.constexpr,
    OFFSET: tl.constexpr,
    GREEDY: tl.constexpr,
    MASKED: tl.constexpr,
    FILTERED: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The best key of ``tiles`` tiles of one row. Tiles are cut where the token id is a multiple of 4."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row, piece = tl.program_id(0), tl.program_id(1)
    SKIPPED: tl.constexpr = OFFSET % 4
    logits += row.to(tl.int64) * logits_stride
    mask += row.to(tl.int64) * mask_stride
    heat = tl.load(temperature + row)
    greedy = heat == 0.0
    found = tl.full((TILE,), LOWEST, tl.int64)
    for tile in range(piece * tiles, (piece + 1) * tiles):
        first = tile * TILE
        index = first + tl.arange(0, TILE) - SKIPPED
        inside = (index >= 0) & (index < V)
        if FILTERED:
            key = tl.load(logits + index, mask=inside, other=0)
            score = value_of(key)
        else:
            score = _allowed(logits, mask, index, inside, MASKED)
        if not GREEDY:
            if not greedy:
                if FILTERED:
                    score = _kept(score, key, index, limits, min_p, row, tl.num_programs(0))
                else:
                    score = tl.div_rn(score, heat)
                drawn = _noise(
                    OFFSET - SKIPPED + first,
                    tl.load(seed + row),
                    tl.load(position + row),
                    tl.load(sample + row),
                    stream,
                    TILE,
                )
                score += drawn
        found = tl.maximum(found, tl.where(inside, joined(key_of(score), index), LOWEST))
    tl.store(best + row * tl.num_programs(1) + piece, tl.max(found, axis=0))


@triton.jit
def _kept(score, key, index, limits, min_p, row, rows):
    """-inf for what the filters leave out."""
    least = tl.load(limits + row)
    last = tl.load(limits + rows + row)
    top = value_of(tl.load(limits + 2 * rows + row))
    floor = tl.load(min_p + row)
    keep = (key > least) | ((key == least) & (index <= last))
    if (floor > 0.0) & (top < float("inf")) & (top > float("-inf")):
        keep = keep & (tl.exp(score.to(tl.float64) - top.to(tl.float64)) >= floor.to(tl.float64))
    return tl.where(keep, score, float("-inf"))


@kernel
@triton.jit(do_not_specialize=["pieces"])
def _choose(
    best, tokens, logits, pieces, OFFSET: tl.constexpr, PIECES: tl.constexpr, TOLD: tl.constexpr, OVERLAPS: tl.constexpr
):
    """best [N, pieces], PIECES at a time -> tokens [N]; with TOLD also logits [N], those that the keys are of."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    found = tl.full((PIECES,), LOWEST, tl.int64)
    for first in range(0, pieces, PIECES):
        piece = first + tl.arange(0, PIECES)
        found = tl.maximum(found, tl.load(best + row * pieces + piece, mask=piece < pieces, other=LOWEST))
    key = tl.max(found, axis=0)
    tl.store(tokens + row, (lowest(key) + OFFSET).to(tl.int32))
    if TOLD:
        tl.store(logits + row, value_of(upper(key)))


@kernel
@triton.jit(do_not_specialize_on_alignment=["temperature"])
def _scale(
    logits,
    temperature,
    mask,
    keys,  # [N, V] int32
    logits_stride,
    mask_stride,
    V: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Keys of the masked logits over the temperature; of a greedy row, of the masked logits."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * TILE + tl.arange(0, TILE)
    heat = tl.load(temperature + row)
    score = _allowed(logits + row * logits_stride, mask + row * mask_stride, index, index < V, MASKED)
    score = tl.div_rn(score, tl.where(heat == 0.0, 1.0, heat))
    tl.store(keys + row * V + index, key_of(score), mask=index < V)


class Draw:
    """sample.draw/1 of one spec. Where the host says that a batch needs no filter, none is paid for.

    A row whose largest scaled logit is NaN or infinite draws the first such token, whatever its filters.
    """

    def __init__(self, spec: DrawSpec, target: Target) -> None:
        self._spec, self._target = spec, target
        self._tiles = triton.cdiv(spec.vocabulary + spec.vocabulary_offset % 4, TILE)
        self._scan_settings = {
            "V": spec.vocabulary,
            "OFFSET": spec.vocabulary_offset,
            "TILE": TILE,
            "OVERLAPS": target.overlaps,
            "num_warps": WARPS,
        } | target.options

    def cut(self, rows: int) -> tuple[int, int]:
        """(pieces, tiles of each) of a row: enough programs to fill the device, no more than one launch can join."""
        wanted = triton.cdiv(PER_PROCESSOR * self._target.multiprocessors, rows)
        tiles = triton.cdiv(self._tiles, min(wanted, self._tiles, MOST_PIECES))
        return triton.cdiv(self._tiles, tiles), tiles

    def __call__(self, logits: torch.Tensor, inputs: SamplingInputs, stream: int) -> torch.Tensor:
        """logits [N, vocabulary] -> tokens [N] int32."""
        rows = logits.shape[0]
        tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
        if not rows:
            return tokens
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        pieces, tiles = self.cut(rows)
        best = torch.empty((rows, pieces), dtype=torch.int64, device=logits.device)
        filtered = not inputs.all_greedy and (inputs.any_top_k or inputs.any_top_p or inputs.any_min_p)
        mask, limits = inputs.mask, tokens
        if filtered:
            logits = self._scaled(logits, inputs)
            limits = find_limits(logits, inputs, self._target)
            mask = None
        _scan[(rows, pieces)](
            logits,
            inputs.temperature,
            inputs.seed,
            inputs.position,
            inputs.sample,
            tokens if mask is None else mask,
            limits,
            inputs.min_p,
            best,
            logits.stride(0),
            0 if mask is None else mask.stride(0),
            tiles,
            stream,
            GREEDY=inputs.all_greedy,
            MASKED=mask is not None,
            FILTERED=filtered,
            **self._scan_settings,
        )
        _choose[(rows,)](
            best,
            tokens,
            tokens,
            pieces,
            OFFSET=self._spec.vocabulary_offset,
            PIECES=MOST_PIECES,
            TOLD=False,
            OVERLAPS=self._target.overlaps,
            num_warps=1,
            **self._target.options,
        )
        return tokens

    def _scaled(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        rows, vocabulary = logits.shape
        mask = inputs.mask
        keys = torch.empty((rows, vocabulary), dtype=torch.int32, device=logits.device)
        _scale[(rows, triton.cdiv(vocabulary, TILE))](
            logits,
            inputs.temperature,
            keys if mask is None else mask,
            keys,
            logits.stride(0),
            0 if mask is None else mask.stride(0),
            V=vocabulary,
            MASKED=mask is not None,
            TILE=TILE,
            OVERLAPS=self._target.overlaps,
            num_warps=WARPS,
            **self._target.options,
        )
        return keys


def choose_best(best: torch.Tensor, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """best [N, pieces] int64, joined keys -> (tokens [N] int32, the logits [N] float32 of their keys)."""
    rows, pieces = best.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=best.device)
    logits = torch.empty(rows, dtype=torch.float32, device=best.device)
    settings = {"OFFSET": 0, "PIECES": TILE, "TOLD": True, "OVERLAPS": target.overlaps, "num_warps": WARPS}
    _choose[(rows,)](best, tokens, logits, pieces, **settings, **target.options)
    return tokens, logits


def make_draw(spec: DrawSpec, target: Target) -> Callable[[torch.Tensor, SamplingInputs, int], torch.Tensor]:
    """sample.draw/1."""
    return Draw(spec, target)
