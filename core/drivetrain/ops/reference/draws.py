"""sample.draw: filters, then one draw a row."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drivetrain.ops.cases.sampling import draw_cases
from drivetrain.ops.reference.kinds import Cost, ReferenceOp, count_up, equal
from drivetrain.ops.reference.philox import gumbel, philox, seed_key
from drivetrain_api.v1 import BatchFacts, DrawSpec, SamplingInputs

NEVER = float("-inf")
Draw = Callable[[torch.Tensor, SamplingInputs, int], torch.Tensor]


def make_draw(spec: DrawSpec) -> Draw:
    """sample.draw/1: ``fn(logits [N, vocabulary], inputs, stream) -> tokens [N] int32``, ids from
    ``vocabulary_offset`` on.

    1. Logits become float32. The mask: tokens whose bit is 0 can't be drawn.
    2. Rows of temperature 0 take the largest logit, ties to the lowest id, and ignore what follows.
    3. scaled = logits / temperature, in float32.
    4. top-k keeps the k largest (ties: the lowest id first), 0 keeps all. top-p keeps, of what is left in
       falling order (same ties), each token before which the probabilities sum to less than p; at least
       one. min-p keeps tokens at least min-p times as likely as the likeliest. Probabilities and their sums
       are float64, and those of top-p are of what top-k left.
    5. The token with the largest scaled + noise, ties to the lowest id. Noise: float64 from the 32-bit word
       (module ``philox``), rounded to float32 before it is added.

    A row whose mask allows nothing gives ``vocabulary_offset``; masks must allow something.
    """

    def draw(logits: torch.Tensor, inputs: SamplingInputs, stream: int) -> torch.Tensor:
        allowed = apply_mask(logits.to(torch.float32), inputs.mask)
        best = allowed.argmax(-1)
        if not inputs.all_greedy:
            greedy = inputs.temperature == 0
            scaled = allowed / torch.where(greedy, 1.0, inputs.temperature).unsqueeze(-1)
            scores = filtered(scaled, inputs) + noise(spec, inputs, stream)
            best = torch.where(greedy, best, scores.argmax(-1))
        return (best + spec.vocabulary_offset).to(torch.int32)

    return draw


def apply_mask(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return logits [N, V] with -inf where the token's bit in mask [N, ceil(V / 32)] is 0."""
    if mask is None:
        return logits
    bits = (mask.unsqueeze(-1) >> count_up(mask, 32)) & 1
    return torch.where(bits.flatten(-2)[:, : logits.shape[-1]] != 0, logits, NEVER)


def filtered(scaled: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Return scaled logits [N, V] with -inf for what top-k, top-p and min-p leave out."""
    if inputs.any_top_k or inputs.any_top_p:
        values, order = scaled.sort(dim=-1, descending=True, stable=True)
        values = _nucleus(_largest(values, inputs), inputs)
        scaled = torch.empty_like(scaled).scatter(-1, order, values)
    if inputs.any_min_p:
        scaled = torch.where(_likelihoods(scaled) >= inputs.min_p.unsqueeze(-1), scaled, NEVER)
    return scaled


def _largest(values: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    if not inputs.any_top_k:
        return values
    top_k = inputs.top_k.unsqueeze(-1)
    keep = (count_up(inputs.top_k, values.shape[-1]) < top_k) | (top_k <= 0)
    return torch.where(keep, values, NEVER)


def _nucleus(values: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """``values``: in falling order, so that a token's rank is its place."""
    if not inputs.any_top_p:
        return values
    top_p = inputs.top_p.unsqueeze(-1)
    weights = _likelihoods(values)
    sums = weights.cumsum(-1)
    before = (sums - weights) / sums[:, -1:]
    keep = (before < top_p) | (top_p >= 1) | (count_up(inputs.top_k, values.shape[-1]) == 0)
    return torch.where(keep, values, NEVER)


def _likelihoods(scaled: torch.Tensor) -> torch.Tensor:
    """Return probabilities as multiples of the likeliest's, float64."""
    exact = scaled.to(torch.float64)
    return (exact - exact.amax(-1, keepdim=True)).exp()


def noise(spec: DrawSpec, inputs: SamplingInputs, stream: int) -> torch.Tensor:
    """Return the noise [N, vocabulary] float32 of ids vocabulary_offset .. + vocabulary - 1."""
    first = spec.vocabulary_offset // 4
    skipped = spec.vocabulary_offset % 4
    count = -(-(skipped + spec.vocabulary) // 4)
    low, high = seed_key(inputs.seed.to(torch.int64).unsqueeze(-1))
    position = inputs.position.to(torch.int64).unsqueeze(-1)
    counter = (
        (count_up(low, count) + first).unsqueeze(0),
        position,
        inputs.sample.to(torch.int64).unsqueeze(-1),
        torch.full_like(position, stream),
    )
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (low, high))), dim=-1).flatten(-2)
    return gumbel(words[:, skipped : skipped + spec.vocabulary])


def draw_cost(spec: DrawSpec, facts: BatchFacts) -> Cost:
    """Read the logits once; one generator call for four tokens of about 100 operations."""
    elements = facts.num_rows * spec.vocabulary
    return Cost(bytes=elements * 4, operations=elements * 60)


DRAW = ReferenceOp(
    op=DrawSpec.op, make=make_draw, invariant=make_draw, cases=draw_cases, tolerance=equal, cost=draw_cost
)
