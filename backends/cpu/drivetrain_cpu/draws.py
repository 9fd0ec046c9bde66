"""sample.draw/1: the reference's tokens, with noise computed only where it can decide.

Noise lies in -3.13 .. 22.89. A token can win only if its scaled logit is within the largest noise of the best score
known so far, so groups of four tokens (one generator call) below that are skipped. Among the others a float32
estimate of the score finds the few within ``SLACK`` of the best, and these alone are computed exactly.
"""

from __future__ import annotations

import torch

from drivetrain_api.v1 import DrawSpec, SamplingInputs

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NEVER = float("-inf")
LARGEST_NOISE = 22.89
SMALLEST_NOISE = -3.14
SLACK = 0.5
NUCLEUS = 256
MANY = 4096
CHUNK = 16384


class Draw:
    """One spec's draw."""

    def __init__(self, spec: DrawSpec) -> None:
        self._offset = spec.vocabulary_offset

    def __call__(self, logits: torch.Tensor, inputs: SamplingInputs, stream: int) -> torch.Tensor:
        """logits [N, vocabulary] -> tokens [N] int32."""
        allowed = masked(logits.to(torch.float32), inputs.mask)
        best = allowed.argmax(-1)
        if not inputs.all_greedy:
            for row in (inputs.temperature != 0).nonzero().flatten().tolist():
                scaled = allowed[row] / inputs.temperature[row]
                scaled, ids = filtered(scaled, inputs, row)
                best[row] = self._pick(scaled, ids, inputs, row, stream)
        return (best + self._offset).to(torch.int32)

    def _pick(
        self, scaled: torch.Tensor, ids: torch.Tensor | None, inputs: SamplingInputs, row: int, stream: int
    ) -> int:
        """Return the index of the winner of one row. ``ids``: ascending indices of the candidates, None = all."""
        key = (int(inputs.seed[row]) & MASK, (int(inputs.seed[row]) >> 32) & MASK)
        rest = (int(inputs.position[row]), int(inputs.sample[row]), stream)
        if ids is None:
            ids = self._possible(scaled, key, rest)
        values = scaled[ids]
        words = token_words(ids + self._offset, rest, key)
        estimate = values + quick_noise(words)
        close = (estimate >= estimate.max() - SLACK).nonzero().flatten()
        scores = values[close] + exact_noise(words[close])
        return int(ids[close[scores.argmax()]])

    def _possible(self, scaled: torch.Tensor, key: tuple[int, int], rest: tuple[int, int, int]) -> torch.Tensor:
        """Return, ascending, the indices whose score can reach that of the likeliest tokens."""
        values, likely = scaled.topk(min(64, len(scaled)))
        known = values + exact_noise(token_words(likely + self._offset, rest, key))
        return (scaled >= float(known.max()) - LARGEST_NOISE).nonzero().flatten()


def masked(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return logits with -inf where the token's bit is 0."""
    if mask is None:
        return logits
    bits = (mask.unsqueeze(-1) >> torch.arange(32, dtype=mask.dtype)) & 1
    return logits.masked_fill(bits.flatten(-2)[:, : logits.shape[-1]] == 0, NEVER)


def filtered(scaled: torch.Tensor, inputs: SamplingInputs, row: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a row's scaled logits and the ascending indices that its filters leave (None: all)."""
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
    return scaled, ids


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


def token_words(tokens: torch.Tensor, rest: tuple[int, int, int], key: tuple[int, int]) -> torch.Tensor:
    """Return the 32-bit word of each token id, int64, in the order given. Many ids share their groups' words."""
    if len(tokens) > MANY:
        low, high = (int(end) for end in tokens.aminmax())
        if len(tokens) * 2 > high - low:
            groups = torch.arange(low >> 2, (high >> 2) + 1).split(CHUNK)
            dense = torch.cat([torch.stack(philox(part, rest, key), -1).flatten() for part in groups])
            return dense[tokens - (low >> 2 << 2)]
    words = philox(tokens >> 2, rest, key)
    lane = tokens & 3
    upper = torch.where(lane == 3, words[3], words[2])
    return torch.where(lane < 2, torch.where(lane == 0, words[0], words[1]), upper)


def philox(
    c0: torch.Tensor, rest: tuple[int, int, int], key: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 of counters (c0, *rest): four int64 tensors of 32-bit words. Ten rounds, in place."""
    k0, k1 = key
    first = c0 * MULTIPLIERS[0]
    second = rest[1] * MULTIPLIERS[1]
    x0 = torch.full_like(c0, (second >> 32) ^ rest[0] ^ k0)
    x1 = torch.full_like(c0, second & MASK)
    x2 = (first >> 32).bitwise_and_(MASK).bitwise_xor_(rest[2] ^ k1)
    x3 = first.bitwise_and_(MASK)
    for _ in range(9):
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
        p, r = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0 = (r >> 32).bitwise_and_(MASK).bitwise_xor_(x1).bitwise_xor_(k0)
        x2 = (p >> 32).bitwise_and_(MASK).bitwise_xor_(x3).bitwise_xor_(k1)
        x1, x3 = r.bitwise_and_(MASK), p.bitwise_and_(MASK)
    return x0, x1, x2, x3


def quick_noise(words: torch.Tensor) -> torch.Tensor:
    """Estimate the noise in float32; at the low end, where 1 - u rounds, to within 0.4."""
    u = words.to(torch.float32).add_(0.5).mul_(2.0**-32)
    return u.neg_().log1p_().neg_().log_().neg_().clamp_(min=SMALLEST_NOISE)


def exact_noise(words: torch.Tensor) -> torch.Tensor:
    """Compute the noise in float64, rounded to float32."""
    u = (words.to(torch.float64) + 0.5) * 2.0**-32
    return (-torch.log(-torch.log1p(-u))).to(torch.float32)
