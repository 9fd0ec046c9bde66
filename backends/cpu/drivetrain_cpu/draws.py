"""sample.draw/1: the reference's tokens, with noise computed only where it can decide.

Let s be the score of the likeliest token. A token of scaled logit l can win only if its noise is at least s - l, that
is if its 32-bit word is at most 2^32 e^(l - s) (as -log1p(-u) >= u). A word costs a fifth of a noise, most tokens fail
this test, and those that pass are computed exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from drivetrain_api.v1 import DrawSpec, SamplingInputs

from .threads import Threads, work_seconds

MASK = 0xFFFFFFFF
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
HALF, LOW = np.uint64(32), np.uint64(MASK)
NEVER = float("-inf")
MARGIN = 1.0001  # float32 rounding of scores and of the bound
NUCLEUS = 256
FEW = 64
DENSE = 4
CHUNK = 16384

Words = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one row's noise comes from: the generator's key and the counter's last three words."""

    key: tuple[int, int]
    rest: tuple[int, int, int]


class Draw:
    """One spec's draw."""

    def __init__(self, spec: DrawSpec, threads: Threads) -> None:
        self._offset, self._threads = spec.vocabulary_offset, threads

    def __call__(self, logits: torch.Tensor, inputs: SamplingInputs, stream: int) -> torch.Tensor:
        """logits [N, vocabulary] -> tokens [N] int32."""
        self._threads.take(work_seconds(4.0 * logits.numel(), 0.0))
        try:
            return self._draw(logits, inputs, stream)
        finally:
            self._threads.give_back()

    def _draw(self, logits: torch.Tensor, inputs: SamplingInputs, stream: int) -> torch.Tensor:
        allowed = masked(logits.to(torch.float32), inputs.mask)
        best = torch.from_numpy(allowed.numpy().argmax(-1))  # numpy's is ten times faster
        if not inputs.all_greedy:
            largest = allowed.gather(1, best.unsqueeze(1)).squeeze(1)
            # A row whose largest logit is infinite or no number keeps it: the caller sees what it drew.
            for row in ((inputs.temperature != 0) & largest.isfinite()).nonzero().flatten().tolist():
                seed = int(inputs.seed[row])
                source = Source(
                    key=(seed & MASK, (seed >> 32) & MASK),
                    rest=(int(inputs.position[row]), int(inputs.sample[row]), stream),
                )
                scaled = allowed[row] / inputs.temperature[row]
                best[row] = self._pick(scaled, filtered(scaled, inputs, row), int(best[row]), source)
        return (best + self._offset).to(torch.int32)

    def _pick(self, scaled: torch.Tensor, ids: torch.Tensor | None, likeliest: int, source: Source) -> int:
        """Return the index of the winner of one row. ``ids``: ascending indices of what filters left, None = all."""
        if ids is None or len(ids) > FEW:
            ids = self._possible(scaled, ids, likeliest, source)
        words = token_words(ids.numpy() + self._offset, source)
        scores = scaled[ids] + exact_noise(torch.from_numpy(words.astype(np.int64)))
        return int(ids[scores.argmax()])

    def _possible(self, scaled: torch.Tensor, ids: torch.Tensor | None, likeliest: int, source: Source) -> torch.Tensor:
        """Return, ascending, those of the indices whose noise can lift them to the likeliest token's score."""
        word = token_words(np.asarray([likeliest + self._offset]), source)
        known = float(scaled[likeliest] + exact_noise(torch.from_numpy(word.astype(np.int64))))
        values = scaled if ids is None else scaled[ids]
        limits = (values - known).exp_().mul_(2.0**32 * MARGIN).add_(1.0)
        hopeful = limits > 1.4  # below, even a word of 0 is too large
        if ids is None and int(hopeful.sum()) * DENSE > len(scaled):
            return torch.from_numpy(self._below(limits.numpy(), source))
        places = hopeful.nonzero().flatten()
        words = token_words((places if ids is None else ids[places]).numpy() + self._offset, source)
        kept = places[torch.from_numpy(words.astype(np.float32)) <= limits[places]]
        return kept if ids is None else ids[kept]

    def _below(self, limits: np.ndarray, source: Source) -> np.ndarray:
        """Return, ascending, the indices whose word is at most their limit; limits float32 [vocabulary]."""
        first, skipped = self._offset >> 2, self._offset & 3
        count = (skipped + len(limits) + 3) >> 2
        padded = np.full(4 * count, -1.0, np.float32)
        padded[skipped : skipped + len(limits)] = limits
        lanes = padded.reshape(count, 4)
        found = []
        for start in range(0, count, CHUNK):
            end = min(start + CHUNK, count)
            words = philox(np.arange(first + start, first + end), source)
            for lane, word in enumerate(words):
                below = np.flatnonzero(word.astype(np.float32) <= lanes[start:end, lane])
                found.append((below + start) * 4 + lane)
        result: np.ndarray = np.sort(np.concatenate(found)) - skipped
        return result


def masked(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return logits with -inf where the token's bit is 0."""
    if mask is None:
        return logits
    bits = (mask.unsqueeze(-1) >> torch.arange(32, dtype=mask.dtype)) & 1
    return logits.masked_fill(bits.flatten(-2)[:, : logits.shape[-1]] == 0, NEVER)


def filtered(scaled: torch.Tensor, inputs: SamplingInputs, row: int) -> torch.Tensor | None:
    """Return, ascending, the indices that a row's filters leave; None for all."""
    top_k = int(inputs.top_k[row]) if inputs.any_top_k else 0
    top_p = float(inputs.top_p[row]) if inputs.any_top_p else 1.0
    min_p = float(inputs.min_p[row]) if inputs.any_min_p else 0.0
    ids = None
    if 0 < top_k < len(scaled):
        ids = largest(scaled, top_k)
    if top_p < 1:
        ids = nucleus(scaled, ids, top_p)
    if min_p > 0:
        values = (scaled if ids is None else scaled[ids]).to(torch.float64)
        kept = ((values - values.max()).exp() >= inputs.min_p[row]).nonzero().flatten()
        ids = kept if ids is None else ids[kept]
    return ids


def largest(scaled: torch.Tensor, count: int) -> torch.Tensor:
    """Return, ascending, the indices of the ``count`` largest; of equal ones the lowest."""
    least = scaled.topk(count, sorted=False).values.min()
    above = (scaled > least).nonzero().flatten()
    equal = (scaled == least).nonzero().flatten()[: count - len(above)]
    return torch.cat((above, equal)).sort().values


def nucleus(scaled: torch.Tensor, ids: torch.Tensor | None, top_p: float) -> torch.Tensor:
    """Return, ascending, the indices of the likeliest tokens before which the probabilities sum to less than p."""
    values = scaled if ids is None else scaled[ids]
    count = min(NUCLEUS, len(values))
    while True:
        places = largest(values, count) if count < len(values) else torch.arange(len(values))
        order = places[values[places].sort(descending=True, stable=True).indices]
        exact = values.to(torch.float64)
        weights = (exact - exact.max()).exp()
        picked = weights[order]
        before = (picked.cumsum(0) - picked) / weights.sum()
        kept = int((before < top_p).sum())
        if kept < count or count == len(values):
            break
        count = min(count * 8, len(values))
    chosen = order[: max(kept, 1)].sort().values
    return chosen if ids is None else ids[chosen]


def token_words(tokens: np.ndarray, source: Source) -> np.ndarray:
    """Return the 32-bit word of each token id, uint64, in the order given."""
    words = np.stack(philox(tokens >> 2, source))
    picked: np.ndarray = words[tokens & 3, np.arange(len(tokens))]
    return picked


def philox(groups: np.ndarray, source: Source) -> Words:
    """Philox4x32-10 of counters (group, *rest): four uint64 arrays of 32-bit words."""
    k0, k1 = source.key
    x0 = groups.astype(np.uint64)
    x1, x2, x3 = (np.full(len(groups), word, np.uint64) for word in source.rest)
    p, r = np.empty_like(x0), np.empty_like(x0)
    for _ in range(10):
        np.multiply(x0, MULTIPLIERS[0], out=p)
        np.multiply(x2, MULTIPLIERS[1], out=r)
        for x, product, other, key in ((x0, r, x1, k0), (x2, p, x3, k1)):
            np.right_shift(product, HALF, out=x)
            np.bitwise_xor(x, other, out=x)
            np.bitwise_xor(x, np.uint64(key), out=x)
        np.bitwise_and(r, LOW, out=x1)
        np.bitwise_and(p, LOW, out=x3)
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return x0, x1, x2, x3


def exact_noise(words: torch.Tensor) -> torch.Tensor:
    """Compute the noise in float64, rounded to float32."""
    u = (words.to(torch.float64) + 0.5) * 2.0**-32
    return (-torch.log(-torch.log1p(-u))).to(torch.float32)
