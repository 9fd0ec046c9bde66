"""sample.adjust and sample.count: what a request's own tokens and wishes do to its logits before a draw."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drivetrain.ops.cases.adjust import adjust_cases, count_cases
from drivetrain.ops.reference.kinds import Cost, ReferenceOp, Tolerance, count_up, equal
from drivetrain_api.v1 import AdjustInputs, AdjustSpec, BatchFacts, CountSpec
from drivetrain_api.v1.sampling import PROMPT_BIT

NEVER = float("-inf")
Adjust = Callable[[torch.Tensor, AdjustInputs], torch.Tensor]
Count = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def make_adjust(spec: AdjustSpec) -> Adjust:
    """sample.adjust/1: ``fn(logits [N, vocabulary], inputs) -> [N, vocabulary] float32``, a new tensor.

    1. Logits become float32.
    2. Bias is added to its tokens.
    3. Tokens of the prompt or of the row's draws: above 0 divided by the repetition penalty, else multiplied by it.
    4. Less frequency times the draws of the token; then less presence where there is a draw.
    5. -inf: end tokens before their first position, and tokens that would complete a bad word.

    No step adds tokens up over rows or the vocabulary, so a row's bits are its own.
    """

    def adjust(logits: torch.Tensor, inputs: AdjustInputs) -> torch.Tensor:
        x = logits.to(torch.float32)
        if inputs.any_bias:
            ids = inputs.bias_ids.index_select(0, inputs.slots)
            x = _put(x, ids, ids >= 0, inputs.bias_values.index_select(0, inputs.slots))
        if inputs.any_penalty:
            x = _penalized(x, inputs)
        if inputs.any_held:
            ids = inputs.held_ids.index_select(0, inputs.slots)
            early = inputs.position < inputs.first_stop.index_select(0, inputs.slots)
            x = _put(x, ids, (ids >= 0) & early.unsqueeze(-1))
        if inputs.any_bad_words:
            ids, completed = _completed(inputs)
            x = _put(x, ids, completed)
        return x.clone() if x is logits else x

    return adjust


def _put(x: torch.Tensor, ids: torch.Tensor, which: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [N, V] with ``more`` [N, E] added to tokens ids [N, E], or -inf there; only ``which`` of them count. A
    column behind the vocabulary takes the others."""
    wider = torch.nn.functional.pad(x, (0, 1))
    places = torch.where(which, ids, x.shape[-1]).to(torch.int64)
    values = wider.gather(-1, places)
    values = torch.full_like(values, NEVER) if more is None else values + more
    return wider.scatter(-1, places, values)[:, :-1].contiguous()


def _penalized(x: torch.Tensor, inputs: AdjustInputs) -> torch.Tensor:
    counts = inputs.counts.index_select(0, inputs.slots)
    repetition, presence, frequency = (
        values.index_select(0, inputs.slots).unsqueeze(-1)
        for values in (inputs.repetition, inputs.presence, inputs.frequency)
    )
    drawn = counts & (PROMPT_BIT - 1)
    x = torch.where(counts != 0, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * drawn.to(torch.float32) - presence * (drawn > 0).to(torch.float32)


def _completed(inputs: AdjustInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last ids [N, B] of bad words, and whether what comes before each has just been drawn."""
    words = inputs.bad_words.index_select(0, inputs.slots)
    before, last = words[:, :, :-1], words[:, :, -1]
    length, ring = before.shape[-1], inputs.recent.shape[-1]
    back = count_up(inputs.position, length) - length  # -length .. -1
    places = (inputs.position.unsqueeze(-1) + back + ring * length).remainder(ring).to(torch.int64)
    past = inputs.recent.index_select(0, inputs.slots).gather(-1, places).unsqueeze(1)
    others = ((before >= 0) & (before != past)).to(torch.int32).sum(-1)
    return last, (last >= 0) & (others == 0)


def make_count(spec: CountSpec) -> Count:
    """sample.count/1: ``fn(tokens [N], slots [N], position [N], counts [S, vocabulary], recent [S, W]) -> None``.

    counts[slots[n], tokens[n]] += 1; recent[slots[n], position[n] mod W] = tokens[n]. What a slot named twice holds is
    not defined.
    """

    def count(
        tokens: torch.Tensor, slots: torch.Tensor, position: torch.Tensor, counts: torch.Tensor, recent: torch.Tensor
    ) -> None:
        counts[slots, tokens] = counts[slots, tokens] + 1
        recent[slots, position.remainder(recent.shape[-1])] = tokens

    return count


def adjust_tolerance(dtype: str) -> Tolerance:
    """Four roundings of float32, and what multiplying and adding in one step leaves out."""
    return Tolerance(rtol=1e-6, atol=4e-6)


def adjust_cost(spec: AdjustSpec, facts: BatchFacts) -> Cost:
    """Read logits and counts, write the result."""
    elements = facts.num_rows * spec.vocabulary
    return Cost(bytes=elements * 12, operations=elements * 8)


def count_cost(spec: CountSpec, facts: BatchFacts) -> Cost:
    """Read a token, its slot, place and count; write two of them."""
    return Cost(bytes=facts.num_rows * 24, operations=facts.num_rows)


ADJUST = ReferenceOp(
    op=AdjustSpec.op,
    make=make_adjust,
    invariant=make_adjust,
    cases=adjust_cases,
    tolerance=adjust_tolerance,
    cost=adjust_cost,
)
COUNT = ReferenceOp(
    op=CountSpec.op, make=make_count, invariant=make_count, cases=count_cases, tolerance=equal, cost=count_cost
)
