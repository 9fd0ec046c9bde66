"""From a plan to host arrays: bucketed shapes, query places, and which query tokens are sampled. No device
here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from drivetrain.errors import StepError
from drivetrain_api.v1 import ShapePolicy, bucket

if TYPE_CHECKING:
    from drivetrain.sched.plan import StepPlan

KEPT_TOKENS, KEPT_PLACES = 256, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What one plan may hold at most: batch rows, query tokens, blocks in a row's table (0: no limit)."""

    rows: int
    tokens: int
    blocks_per_row: int


def step_limits(policy: ShapePolicy, max_num_seqs: int, max_num_batched_tokens: int) -> StepLimits:
    """Return the limits under a shape policy. One row of the largest bucket stays free: it carries padded
    tokens."""
    rows = min(max_num_seqs, policy.rows[-1] - 1) if policy.rows else max_num_seqs
    tokens = min(max_num_batched_tokens, policy.tokens[-1]) if policy.tokens else max_num_batched_tokens
    return StepLimits(
        rows=rows, tokens=tokens, blocks_per_row=policy.blocks_per_row[-1] if policy.blocks_per_row else 0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Padded sizes of one step. ``widths``: block table width of each paged group; ``longest``: the largest bound of a
    row's length (0: not known)."""

    rows: int
    tokens: int
    widths: tuple[int, ...]
    longest: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchArrays:
    """A step on the host, padded. Padded rows follow the real ones; they carry the padded tokens, if any.

    ``steady``: one-token decode rows and no padding, so that all arrays but ``rows`` and ``bounds`` are constants.
    """

    shape: BatchShape
    rows: np.ndarray  # [B]
    start: np.ndarray  # [B]
    num_new: np.ndarray  # [B] 0 for padded rows
    query_start: np.ndarray  # [B + 1]
    token_row: np.ndarray  # [T]
    token_offset: np.ndarray  # [T]
    host_ids: np.ndarray  # [T]
    bounds: np.ndarray  # [B]
    max_query_len: int
    steady: bool = False


class QueryPlaces(NamedTuple):
    """Where a step's query tokens lie, with padding: see ``BatchArrays``. Never written."""

    query_start: np.ndarray
    token_row: np.ndarray
    token_offset: np.ndarray
    max_query_len: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleArrays:
    """Rows of one step that sample together: n of them, N logits rows (verification rows have one a query
    token).

    ``index`` [n] batch rows; ``rows`` [n'] table rows, padded; ``tokens`` [N'] query token of each logits
    row, padded;
    ``logit_rows`` [N'] table row of each logits row, padded; ``spread`` [n', k + 1] logits row of each place
    (only with verification), ``num_drafts`` [n']; ``num_logits`` N.
    """

    index: np.ndarray
    rows: np.ndarray
    batch_rows: np.ndarray
    tokens: np.ndarray
    logit_rows: np.ndarray
    num_logits: int
    spread: np.ndarray | None
    num_drafts: np.ndarray | None
    whole: bool = False

    @property
    def count(self) -> int:
        """Rows that sample, without padding."""
        return len(self.index)


class BatchBuilder:
    """Builds arrays for a shape policy. ``block_tokens`` and ``max_widths``: one for each paged group."""

    def __init__(
        self,
        policy: ShapePolicy,
        *,
        padding_row: int,
        max_drafts: int,
        block_tokens: tuple[int, ...],
        max_widths: tuple[int, ...],
    ) -> None:
        self.policy = policy
        self._padding_row = padding_row
        self._max_drafts = max_drafts
        self.block_tokens = block_tokens
        self.max_widths = max_widths
        self._count = np.arange(64, dtype=np.int32)
        self._kept: dict[tuple[int, int, int], QueryPlaces] = {}  # rows and tokens of a shape, tokens of its one row
        self._fill_constants(64)

    def shape(self, plan: StepPlan) -> BatchShape:
        """Return the padded sizes for a plan. StepError when a bucket is too small: the scheduler's limits
        are off."""
        policy = self.policy
        longest = int(plan.bounds.max()) if plan.num_rows else 0
        if policy.dynamic:
            widths = tuple([max(1, -(-longest // size)) for size in self.block_tokens])
            return BatchShape(rows=plan.num_rows, tokens=token_count(plan), widths=widths, longest=longest)
        try:
            tokens = bucket(policy.tokens, plan.num_tokens)
            rows = bucket(policy.rows, plan.num_rows + (1 if tokens > plan.num_tokens else 0))
            widths = tuple(
                min(limit, bucket(policy.blocks_per_row, max(1, -(-longest // size))))
                for size, limit in zip(self.block_tokens, self.max_widths, strict=True)
            )
        except ValueError as error:
            raise StepError(
                f"plan {plan.plan_id} ({plan.num_rows} rows, {plan.num_tokens} tokens, longest {longest}) fits no "
                f"bucket: {error}",
                fix="give the scheduler the limits of drivetrain.runner.batch.step_limits",
            ) from error
        return BatchShape(rows=rows, tokens=tokens, widths=widths, longest=longest)

    def arrays(self, plan: StepPlan, shape: BatchShape) -> BatchArrays:
        """Lay a plan out in a shape at least as large as its own."""
        tokens = token_count(plan)
        if plan.num_decode == plan.num_rows == shape.rows == shape.tokens and not plan.dummy:
            return self._steady(plan, shape)
        places = self._places(plan, shape, tokens)
        host_ids = np.full(shape.tokens, self.policy.pad_token, np.int32)
        first = tokens - len(plan.prompt_ids)
        host_ids[first:tokens] = plan.prompt_ids
        return BatchArrays(
            shape=shape,
            rows=padded_to(plan.rows, shape.rows, self._padding_row),
            start=padded_to(plan.start, shape.rows, 0),
            num_new=padded_to(plan.num_new, shape.rows, 0),
            query_start=places.query_start,
            token_row=places.token_row,
            token_offset=places.token_offset,
            host_ids=host_ids,
            bounds=padded_to(plan.bounds, shape.rows, 0),
            max_query_len=places.max_query_len,
        )

    def _places(self, plan: StepPlan, shape: BatchShape, tokens: int) -> QueryPlaces:
        """Say where the query tokens lie; those of one row in a small shape are kept."""
        kept = plan.num_rows == 1 and shape.tokens <= KEPT_TOKENS
        found = self._kept.get((shape.rows, shape.tokens, tokens)) if kept else None
        if found is not None:
            return found
        counts = np.zeros(shape.rows, np.int32)
        real = plan.num_rows
        padded, excess = shape.rows - real, shape.tokens - tokens
        counts[:real] = plan.num_new
        if excess:
            counts[real:] = excess // padded
            counts[real : real + excess % padded] += 1
        query_start = np.zeros(shape.rows + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        count = self.count(max(shape.tokens, shape.rows))
        token_row = np.repeat(count[: shape.rows], counts)
        token_offset = count[: shape.tokens] - query_start[token_row]
        found = QueryPlaces(query_start, token_row, token_offset, int(counts.max(initial=0)))
        if kept:
            if len(self._kept) >= KEPT_PLACES:
                self._kept.clear()
            self._kept[shape.rows, shape.tokens, tokens] = found
        return found

    def _steady(self, plan: StepPlan, shape: BatchShape) -> BatchArrays:
        rows = shape.rows
        count = self.count(rows + 1)
        return BatchArrays(
            shape=shape,
            rows=plan.rows,
            start=self._minus[:rows],
            num_new=self._ones[:rows],
            query_start=count,
            token_row=count[:rows],
            token_offset=self._zeros[:rows],
            host_ids=self._pads[:rows],
            bounds=plan.bounds,
            max_query_len=1,
            steady=True,
        )

    def whole(self, plan: StepPlan, rows: np.ndarray) -> SampleArrays:
        """Lay out the sampling of every row of a steady batch. ``rows`` [B]: the plan's, padded."""
        return every_row(self.count(max(plan.num_rows, len(rows))), plan.num_rows, rows)

    def samples(self, plan: StepPlan, batch: BatchArrays, index: np.ndarray) -> SampleArrays:
        """Lay out the sampling of the batch rows ``index`` (ascending)."""
        count = len(index)
        verify = index[(index >= plan.num_decode) & (index < plan.num_decode + plan.num_verify)]
        last = batch.query_start[index + 1] - 1
        rows = count if self.policy.dynamic else batch.shape.rows
        if len(verify) == 0:
            padded_rows = padded_to(plan.rows[index], rows, self._padding_row)
            return SampleArrays(
                index=index,
                rows=padded_rows,
                batch_rows=padded_to(index, rows, batch.shape.rows - 1),
                tokens=padded_to(last, rows, batch.shape.tokens - 1),
                logit_rows=padded_rows,
                num_logits=count,
                spread=None,
                num_drafts=None,
            )
        drafts = np.zeros(count, np.int32)
        is_verify = (index >= plan.num_decode) & (index < plan.num_decode + plan.num_verify)
        drafts[is_verify] = plan.num_new[index[is_verify]] - 1
        ends = np.cumsum(drafts + 1, dtype=np.int32)
        total = int(ends[-1])
        owner = np.repeat(self.count(count), drafts + 1)
        place = self.count(total) - (ends - drafts - 1)[owner]
        logits = total if self.policy.dynamic else self.logit_rows(batch.shape)
        places = np.minimum(self.count(self._max_drafts + 1)[None, :], drafts[:, None])
        return SampleArrays(
            index=index,
            rows=padded_to(plan.rows[index], rows, self._padding_row),
            batch_rows=padded_to(index, rows, batch.shape.rows - 1),
            tokens=padded_to((last - drafts)[owner] + place, logits, batch.shape.tokens - 1),
            logit_rows=padded_to(plan.rows[index][owner], logits, self._padding_row),
            num_logits=total,
            spread=padded_to((ends - drafts - 1)[:, None] + places, rows, 0),
            num_drafts=padded_to(drafts, rows, 0),
        )

    def logit_rows(self, shape: BatchShape) -> int:
        """Return the logits rows of a step with verification under fixed shapes: a bucket that holds the most
        that such a step can have."""
        most = min(shape.tokens, shape.rows * (self._max_drafts + 1))
        return next((size for size in sorted({*self.policy.rows, *self.policy.tokens}) if size >= most), most)

    def _fill_constants(self, size: int) -> None:
        values = (self.policy.pad_token, -1, 0, 1)
        self._pads, self._minus, self._zeros, self._ones = (np.full(size, v, np.int32) for v in values)

    def count(self, n: int) -> np.ndarray:
        """Return 0 .. n - 1 as int32, a view that must not be written."""
        if len(self._count) < n:
            size = max(n, 2 * len(self._count))
            self._count = np.arange(size, dtype=np.int32)
            self._fill_constants(size)
        return self._count[:n]


def every_row(count: np.ndarray, num_rows: int, rows: np.ndarray) -> SampleArrays:
    """Lay out the sampling of one token of each of ``num_rows`` rows, ``rows`` [B] with padding; ``count`` [B]."""
    return SampleArrays(
        index=count[:num_rows],
        rows=rows,
        batch_rows=count,
        tokens=count,
        logit_rows=rows,
        num_logits=num_rows,
        spread=None,
        num_drafts=None,
        whole=True,
    )


def token_count(plan: StepPlan) -> int:
    """Return the plan's query tokens."""
    return plan.num_rows if plan.num_decode == plan.num_rows else plan.num_tokens


def padded_to(values: np.ndarray, length: int, fill: int) -> np.ndarray:
    """Return int32 values padded along the first axis; the same array where nothing is missing."""
    missing = length - len(values)
    if missing == 0 and values.dtype == np.int32:
        return values
    out = np.full((length, *values.shape[1:]), fill, np.int32)
    out[: len(values)] = values
    return out
