"""Logits and draws, some rows at a time so that a large vocabulary does not decide the memory of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from drivetrain_api.v1 import AdjustInputs, AdjustSpec, DrawSpec, LogprobsSpec, SamplingInputs
from drivetrain_api.v1.sampling import STREAM_TARGET

if TYPE_CHECKING:
    from drivetrain.models.parameters import GreedyHead
    from drivetrain.ops import Ops
    from drivetrain_api.v1 import OpSpec

LOGIT_BYTES = 256 << 20  # float32 logits held at once
DRAW_BYTES = 256 << 20  # what the reference may hold beside them
BESIDE_BYTES = 128 << 20  # the same for filtered draws of a backend's own, and for log-probabilities alone: no more
# than the logits took in a type of two bytes before they were float32
SCALED_ELEMENT = 4  # bytes a token of the scaled logits that a backend's own filters hold
ADJUST_ELEMENT = 32  # the same while the reference changes logits; a backend's own holds its result alone
DRAW_ELEMENT = 48  # bytes a token that the reference's noise, filters and sorts hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """N rows: ``tokens`` [N] int32; ``witness`` [N] float32, finite where all of the row's logits are.

    ``logprobs`` by name: logprob [N], rank [N], top_ids [N, k], top_logprobs [N, k]; empty without a report.
    """

    tokens: torch.Tensor
    witness: torch.Tensor
    logprobs: dict[str, torch.Tensor]


class Drawer:
    """Bound draws and log-probabilities over one head, by its logits where anything but greedy tokens is wanted."""

    def __init__(
        self,
        ops: Ops,
        *,
        vocabulary: int,
        fixed_shapes: bool,
        logits: Callable[[torch.Tensor], torch.Tensor],
        greedy: GreedyHead | None = None,
    ) -> None:
        """``greedy``: what gives tokens of greedy rows without their logits."""
        draw = DrawSpec(dtype="float32", vocabulary=vocabulary)
        logprobs = LogprobsSpec(dtype="float32", vocabulary=vocabulary)
        self._draw, self._logprobs = ops.bind(draw), ops.bind(logprobs)
        self.vocabulary = vocabulary
        self.fixed = fixed_shapes
        self._logits = logits
        self._greedy = greedy
        self._dear_draw, self._dear_logprobs = on_reference(ops, draw), on_reference(ops, logprobs)
        self._adjust = ops.bind(AdjustSpec(dtype="float32", vocabulary=vocabulary))
        self._adjust_element = adjust_element(ops, vocabulary)

    def skips_logits(self, count: int) -> bool:
        """Return whether ``count`` greedy rows are drawn without their logits, where nothing else wants these."""
        return self._greedy is not None and self._greedy.takes(count)

    def run(
        self,
        hidden: torch.Tensor,
        inputs: SamplingInputs,
        alternatives: int | None,
        adjust: AdjustInputs | None = None,
    ) -> Drawn:
        """hidden [N, hidden] -> N draws, and log-probabilities with that many alternatives (None: no report).

        ``adjust``: what changes logits before the draw; log-probabilities are of those before.
        """
        count = hidden.shape[0]
        wanted = not inputs.all_greedy or inputs.mask is not None or alternatives is not None or adjust is not None
        if self._greedy is not None and not wanted and self.skips_logits(count):
            tokens, best = self._greedy(hidden)
            return Drawn(tokens=tokens, witness=best, logprobs={})
        step = count if self.fixed else rows_at_once(count, self.vocabulary, LOGIT_BYTES, 4)
        if step == count:
            return self._rows(hidden, inputs, alternatives, adjust)
        pieces = []
        for a in range(0, count, step):
            some = rows_of(inputs, a, a + step), alternatives, adjusts_of(adjust, a, a + step)
            pieces.append(self._rows(hidden[a : a + step], *some))
        return _joined(pieces)

    def _rows(
        self, hidden: torch.Tensor, inputs: SamplingInputs, alternatives: int | None, adjust: AdjustInputs | None
    ) -> Drawn:
        logits = self._logits(hidden)
        count = logits.shape[0]
        step = count if self.fixed else self._at_once(count, inputs, alternatives)
        if adjust is not None and not self.fixed:
            step = min(step, rows_at_once(count, self.vocabulary, BESIDE_BYTES, self._adjust_element))
        if step == count:
            return self._some(logits, inputs, alternatives, adjust)
        pieces = []
        for a in range(0, count, step):
            some = rows_of(inputs, a, a + step), alternatives, adjusts_of(adjust, a, a + step)
            pieces.append(self._some(logits[a : a + step], *some))
        return _joined(pieces)

    def _at_once(self, count: int, inputs: SamplingInputs, alternatives: int | None) -> int:
        """How many of ``count`` rows are drawn and reported at once."""
        if self._dear_draw and not inputs.all_greedy:
            return rows_at_once(count, self.vocabulary, DRAW_BYTES, DRAW_ELEMENT)
        if self._dear_logprobs and alternatives is not None:
            return rows_at_once(count, self.vocabulary, BESIDE_BYTES, DRAW_ELEMENT)
        if not inputs.all_greedy and (inputs.any_top_k or inputs.any_top_p or inputs.any_min_p):
            return rows_at_once(count, self.vocabulary, BESIDE_BYTES, SCALED_ELEMENT)
        return count

    def _some(
        self, logits: torch.Tensor, inputs: SamplingInputs, alternatives: int | None, adjust: AdjustInputs | None
    ) -> Drawn:
        wished = logits if adjust is None else self._adjust(logits, adjust)
        tokens = self._draw(wished, inputs, STREAM_TARGET).to(torch.int32)
        named: dict[str, torch.Tensor] = {}
        if alternatives is not None:
            names = ("logprob", "rank", "top_ids", "top_logprobs")
            named = dict(zip(names, self._logprobs(logits, tokens, alternatives), strict=True))
        return Drawn(tokens=tokens, witness=witness(logits, tokens), logprobs=named)


def witness(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the drawn logits [N] float32. A row with a logit that is no number, or is +inf, draws such a one: it
    counts as the largest. So finiteness costs no pass over logits or hidden states."""
    return logits.gather(1, tokens.to(torch.int64).unsqueeze(1)).squeeze(1)


def on_reference(ops: Ops, spec: OpSpec) -> bool:
    """Return whether a bound spec is served by the reference."""
    return any(choice.spec == spec and choice.provider == "reference" for choice in ops.report)


def adjust_element(ops: Ops, vocabulary: int) -> int:
    """Return the bytes a logit that are held beside it where logits are changed before a draw."""
    adjust = AdjustSpec(dtype="float32", vocabulary=vocabulary)
    ops.bind(adjust)
    return ADJUST_ELEMENT if on_reference(ops, adjust) else 4 + SCALED_ELEMENT


def rows_at_once(count: int, vocabulary: int, limit: int, element: int) -> int:
    """Return how many of ``count`` rows of ``element`` bytes a token are done at once within ``limit`` bytes."""
    return max(1, min(count, limit // (element * vocabulary)))


def rows_of(inputs: SamplingInputs, first: int, end: int) -> SamplingInputs:
    """Return the inputs of rows first .. end - 1."""
    return replace(
        inputs,
        temperature=inputs.temperature[first:end],
        top_k=inputs.top_k[first:end],
        top_p=inputs.top_p[first:end],
        min_p=inputs.min_p[first:end],
        seed=inputs.seed[first:end],
        position=inputs.position[first:end],
        sample=inputs.sample[first:end],
        mask=None if inputs.mask is None else inputs.mask[first:end],
    )


def adjusts_of(inputs: AdjustInputs | None, first: int, end: int) -> AdjustInputs | None:
    """Return the inputs of rows first .. end - 1."""
    if inputs is None:
        return None
    return replace(inputs, slots=inputs.slots[first:end], position=inputs.position[first:end])


def _joined(pieces: list[Drawn]) -> Drawn:
    names = pieces[0].logprobs
    return Drawn(
        tokens=torch.cat([p.tokens for p in pieces]),
        witness=torch.cat([p.witness for p in pieces]),
        logprobs={name: torch.cat([p.logprobs[name] for p in pieces]) for name in names},
    )
