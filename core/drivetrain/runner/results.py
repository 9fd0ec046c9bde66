"""From host copies to a ``StepResult``, in the plan's row order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from drivetrain.sched.plan import EMPTY, LogprobRows, StepPlan, StepResult

if TYPE_CHECKING:
    from drivetrain.runner.sampler import SampleSet


def assemble(
    plan: StepPlan,
    parts: Sequence[SampleSet],
    copied: Sequence[Sequence[np.ndarray]],
    pooled: Sequence[tuple[int, np.ndarray]],
) -> StepResult:
    """Merge the sampled sets of one plan. ``copied``: for each set its arrays, named by
    ``SampleSet.copied``."""
    if len(parts) == 1 and parts[0].arrays.whole and len(parts[0].copied) == 1:
        return _whole(plan, copied[0][0])
    width = max((p.arrays.spread.shape[1] for p in parts if p.arrays.spread is not None), default=1)
    tokens = np.zeros((plan.num_rows, width), np.int32)
    counts = np.zeros(plan.num_rows, np.int32)
    spoilt: list[np.ndarray] = []
    logprobs: list[LogprobRows] = []
    for part, arrays in zip(parts, copied, strict=True):
        drawn, accepted, finite = _unpack(part, arrays[0])
        index = part.arrays.index
        if part.given_up is not None:
            accepted = np.where(part.given_up, 0, accepted)
            finite = finite | part.given_up
        tokens[index, : drawn.shape[1]] = drawn
        counts[index] = accepted
        if not finite.all():
            spoilt.append(index[~finite])
        if "logprob" in part.copied:
            logprobs.append(_logprobs(part, accepted, dict(zip(part.copied, arrays, strict=False))))
    return StepResult(
        plan_id=plan.plan_id,
        tokens=tokens,
        counts=counts,
        non_finite=np.concatenate(spoilt).astype(np.int32) if spoilt else EMPTY,
        logprobs=_merge(logprobs),
        pooled=tuple((row, np.asarray(vector, np.float32)) for row, vector in pooled),
    )


def _whole(plan: StepPlan, packed: np.ndarray) -> StepResult:
    """The common case: every row drew one token, save prompts that go on, and nothing else was asked for."""
    n, padded = plan.num_rows, len(packed) // 2
    if n == 1:
        counts = np.ones(1, np.int32) if plan.num_decode else plan.sample.astype(np.int32)
        broken = bool(counts[0]) and not math.isfinite(packed[padded : padded + 1].view(np.float32)[0])
        return StepResult(
            plan_id=plan.plan_id,
            tokens=packed[:1].reshape(1, 1),
            counts=counts,
            non_finite=np.zeros(1, np.int32) if broken else EMPTY,
        )
    finite, counts = np.isfinite(packed[padded : padded + n].view(np.float32)), np.full(n, 1, np.int32)
    if plan.num_decode < n:
        finite, counts = finite | ~plan.sample, plan.sample.astype(np.int32)
    spoilt = np.count_nonzero(finite) < n
    return StepResult(
        plan_id=plan.plan_id,
        tokens=packed[:n].reshape(n, 1),
        counts=counts,
        non_finite=np.flatnonzero(~finite).astype(np.int32) if spoilt else EMPTY,
    )


def _unpack(part: SampleSet, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens [n, m], counts [n], finite [n] (bool) of a set's packed int32 array."""
    a = part.arrays
    n, padded = a.count, len(a.rows)
    if a.spread is None:
        return packed[:n].reshape(n, 1), np.ones(n, np.int32), np.isfinite(packed[padded : padded + n].view(np.float32))
    width = a.spread.shape[1]
    drawn = packed[: padded * width].reshape(padded, width)[:n]
    accepted = packed[padded * width : padded * (width + 1)][:n]
    flags = np.isfinite(packed[padded * (width + 1) :].view(np.float32))
    return drawn, accepted, flags[a.spread[:n]].all(axis=1)


def _logprobs(part: SampleSet, accepted: np.ndarray, arrays: dict[str, np.ndarray]) -> LogprobRows:
    """Keep the rows that asked, and of those the tokens that were kept."""
    a = part.arrays
    width = 1 if a.spread is None else a.spread.shape[1]
    place = np.broadcast_to(np.arange(width, dtype=np.int32), (a.count, width))
    assert part.wants_logprobs is not None
    keep = (part.wants_logprobs[:, None] >= 0) & (place < accepted[:, None])
    entry = (np.arange(a.count)[:, None] if a.spread is None else a.spread[: a.count])[keep]
    k = int(part.wants_logprobs.max())
    return LogprobRows(
        index=np.broadcast_to(a.index[:, None], keep.shape)[keep].astype(np.int32),
        place=place[keep],
        logprob=arrays["logprob"][entry],
        rank=arrays["rank"][entry].astype(np.int32),
        top_ids=arrays["top_ids"][entry, :k].astype(np.int32),
        top_logprobs=arrays["top_logprobs"][entry, :k],
    )


def _merge(parts: Sequence[LogprobRows]) -> LogprobRows | None:
    if len(parts) <= 1:
        return parts[0] if parts else None
    k = max(p.top_ids.shape[1] for p in parts)

    def widened(values: np.ndarray, fill: float) -> np.ndarray:
        return np.pad(values, ((0, 0), (0, k - values.shape[1])), constant_values=fill)

    return LogprobRows(
        index=np.concatenate([p.index for p in parts]),
        place=np.concatenate([p.place for p in parts]),
        logprob=np.concatenate([p.logprob for p in parts]),
        rank=np.concatenate([p.rank for p in parts]),
        top_ids=np.concatenate([widened(p.top_ids, -1) for p in parts]),
        top_logprobs=np.concatenate([widened(p.top_logprobs, -np.inf) for p in parts]),
    )


def failed(plan: StepPlan, failure: str, failure_class: str) -> StepResult:
    """Return the result of a plan that failed: no row drew anything."""
    return StepResult(
        plan_id=plan.plan_id,
        tokens=np.zeros((plan.num_rows, 1), np.int32),
        counts=np.zeros(plan.num_rows, np.int32),
        failure=failure,
        failure_class=failure_class,
    )
