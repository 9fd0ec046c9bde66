"""Captured steps: buckets of decode rows, and of small steps with prompts, two graphs each.

The first holds a whole forward: preparation from the row tables, attention plans, layers, final norm. The second draws
greedily from its hidden states and keeps the tokens. Both read and write device memory alone, so a step in steady
decode is two launches and one copy to the host; only a change of the batch's rows is uploaded before. A bucket of
small steps takes any mix of few rows and so many query tokens, ids uploaded. Its second graph draws for every row from
its last query token; what a row draws whose prompt goes on is neither told nor read.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from drivetrain.runner.batch import BatchArrays, BatchShape
from drivetrain.runner.dummies import few_layers
from drivetrain.runner.forward import BATCH_ARRAYS
from drivetrain.runner.rows import ADJUSTED, DELTA, DRAFTS, LOGPROBS, NON_GREEDY, POOLING
from drivetrain.runner.sampler import RowUpdate, SampleSet

if TYPE_CHECKING:
    from drivetrain.models.decoder import Decoder
    from drivetrain.runner.forward import ForwardPass
    from drivetrain.runner.sampler import Sampler
    from drivetrain.runner.sizes import RunnerConfig
    from drivetrain.runner.staging import Pack
    from drivetrain.sched.plan import StepPlan
    from drivetrain_api.v1 import Backend, Graph, GraphBudget, Prepared, ShapePolicy

FED = "fed"
DECODE_FED = ("rows", "num_new")
EACH_UP_TO = 8
CHUNK_ROWS = 8
NOTHING = np.zeros(0, np.int32)
CHUNK_TOKENS = (16, 32, 64, 128, 256)
WANTED = 64  # plans that are remembered
WASTE = 1.5  # a larger bucket serves while it is at most so much larger; beyond, an eager step is sooner done

Recorder = Callable[[Callable[[], Any]], tuple["Graph", Any]]


class Unrecorded:
    """Stands for a graph where nothing was recorded."""

    def replay(self) -> None:
        """Nothing is there."""

    def release(self) -> None:
        """Nothing is held."""


UNRECORDED = Unrecorded()


@dataclass(slots=True, kw_only=True, eq=False)
class Captured:
    """One bucket of B rows and T query tokens. The tensors keep their addresses. ``fed``: the batch arrays that steps
    send, flat, in the order of ``names``; ``sent``: what the host sent last; ``rows`` [B]: the part of ``fed`` that is
    the rows; ``query_start`` [B + 1]: the query starts, where rows may have several tokens. ``drawing``: the second
    graph, its results behind it."""

    shape: BatchShape
    names: tuple[str, ...]
    graph: Graph
    fed: torch.Tensor
    rows: torch.Tensor
    prepared: Prepared
    hidden: torch.Tensor  # [T, hidden]
    sent: np.ndarray
    query_start: torch.Tensor | None = None
    drawing: Graph | None = None
    update: RowUpdate | None = None
    packed: torch.Tensor | None = None  # [2 B]

    @property
    def steady(self) -> bool:
        """Whether its steps have one token a row."""
        return self.names == DECODE_FED

    def draws(self, facts: int) -> bool:
        """Return whether the second graph does all that rows of these facts ask for."""
        return self.drawing is not None and not facts & (NON_GREEDY | LOGPROBS | DRAFTS | ADJUSTED)

    def sample_set(self, part: SampleSet, slots: torch.Tensor | None = None) -> None:
        """Let a set of all the bucket's rows see the replayed step. ``slots`` [B]: of rows that have them."""
        part.see(self.rows, slots)
        last = self.query_start
        part.hidden = self.hidden if last is None else self.hidden.index_select(0, last[1:] - 1)
        part.lengths = part.positions = self.prepared.lengths

    def take_drawing(self, record: Recorder, sampler: Sampler, part: SampleSet) -> None:
        """Record the second graph, of a set of all rows."""

        def draw() -> tuple[RowUpdate, list[torch.Tensor]]:
            self.sample_set(part)
            return sampler.run(part, None)

        self.drawing, (self.update, (self.packed,)) = record(draw)

    def ready(self, part: SampleSet) -> None:
        """Let a set of all the bucket's rows be drawn by the second graph."""
        part.views = {"rows": self.rows, "logit_rows": self.rows}

    def draw(self, part: SampleSet) -> tuple[RowUpdate, list[torch.Tensor]]:
        """Queue the second graph, as ``Sampler.run``."""
        assert self.drawing is not None and self.update is not None and self.packed is not None
        self.drawing.replay()
        part.hidden = None
        part.copied = ("packed",)
        return self.update, [self.packed]


class DecodeGraphs:
    """Buckets by row count, and by query tokens those of small steps. Empty where the backend has no graphs or an
    attention can't be captured: eager then."""

    def __init__(
        self,
        backend: Backend,
        passes: ForwardPass,
        buckets: Buckets,
        widths: Sequence[int],
        sampler: Sampler | None,
    ) -> None:
        """``sampler``: what draws the rows of decode steps."""
        self.buckets, self.chunks = buckets.rows, buckets.chunks
        self._chunks: dict[int, Captured] = {}
        self._backend = backend
        self._passes = passes
        self._widths = tuple(widths)
        self._sampler = sampler if buckets.drawing else None
        self._captured: dict[int, Captured] = {}
        self._given_up = False
        self._wanted = deque[int](maxlen=WANTED)  # row counts of late plans that found no fitting bucket
        self._facts = DELTA if any(rope.sections for rope in getattr(passes.decoder.spec, "ropes", ())) else 0

    @property
    def count(self) -> int:
        """Buckets that are captured now."""
        return len(self._captured) + len(self._chunks)

    @property
    def wanted(self) -> int:
        """Buckets in all."""
        return len(self.buckets) + len(self.chunks)

    @property
    def given_up(self) -> int:
        """Buckets that will not be captured any more."""
        return self.wanted - self.count if self._given_up else 0

    def find(self, plan: StepPlan) -> Captured | None:
        """Return the captured bucket that serves this plan, None when it has to run eagerly."""
        if not self.buckets or plan.embeds or plan.positions or plan.exports or plan.num_rows == 0:
            return None
        if plan.num_decode != plan.num_rows:
            return self._find_chunk(plan)
        best = min((rows for rows in self._captured if rows >= plan.num_rows), default=None)
        if best is not None and best == self._bucket(plan.num_rows):
            return self._captured[best]
        self._wanted.append(plan.num_rows)
        return self._captured[best] if best is not None and best <= WASTE * plan.num_rows else None

    def _find_chunk(self, plan: StepPlan) -> Captured | None:
        """A small step with prompts; rows that pool need the hidden states of all their tokens. A bucket's last row
        carries the padded tokens."""
        if not self._chunks or plan.num_rows >= CHUNK_ROWS or plan.num_verify or plan.dummy:
            return None
        best = min((tokens for tokens in self._chunks if tokens >= plan.num_tokens), default=None)
        if best is None:
            return None
        tables = self._passes.tables
        pools = not tables.plain() and (tables.row_flags(plan.rows) & POOLING).any()
        return None if pools else self._chunks[best]

    def _bucket(self, rows: int) -> int:
        """The bucket that such a plan is meant for; 0 where it is larger than all."""
        return next((bucket for bucket in self.buckets if bucket >= rows), 0)

    def missing(self) -> BatchShape | None:
        """Return the shape of the bucket to capture next: one that plans have missed of late, small steps, then the
        others; None when all are there."""
        if self._given_up:
            return None
        counts = Counter(bucket for rows in self._wanted if (bucket := self._bucket(rows)) not in self._captured)
        counts.pop(0, None)
        if counts:
            return self.capture_shape(counts.most_common(1)[0][0])
        tokens = next((tokens for tokens in self.chunks if tokens not in self._chunks), 0)
        if tokens:
            return BatchShape(rows=CHUNK_ROWS, tokens=tokens, widths=self._widths)
        rows = next((bucket for bucket in self.buckets if bucket not in self._captured), 0)
        return self.capture_shape(rows) if rows else None

    def shapes(self) -> list[BatchShape]:
        """Return the shapes of all buckets, captured or not."""
        chunks = [BatchShape(rows=CHUNK_ROWS, tokens=tokens, widths=self._widths) for tokens in self.chunks]
        return [*map(self.capture_shape, self.buckets), *chunks]

    def capture_shape(self, rows: int) -> BatchShape:
        """Return the shape at which the bucket of ``rows`` decode rows is captured."""
        return BatchShape(rows=rows, tokens=rows, widths=self._widths)

    def capture(self, plan: StepPlan, batch: BatchArrays) -> None:
        """Record the bucket of a dummy plan that fills its shape. The work of a few layers runs once before, so that
        nothing is compiled or loaded meanwhile."""
        made = self._make(plan, batch, self._record)
        if made.steady:
            self._captured[made.shape.rows] = made
        else:
            self._chunks[made.shape.tokens] = made

    def rehearse(self, plan: StepPlan, batch: BatchArrays) -> None:
        """Run a bucket's work once and record nothing; where greedy rows need no logits, draw also as others do."""
        made = self._make(plan, batch, lambda run: (UNRECORDED, run()))
        if self._sampler is not None and self._sampler.skips_logits(batch.shape.rows):
            part = SampleSet.of_whole(plan.num_rows, batch.rows)
            part.facts = NON_GREEDY
            made.sample_set(part)
            self._sampler.run(part, None)

    def _make(self, plan: StepPlan, batch: BatchArrays, record: Recorder) -> Captured:
        passes, shape = self._passes, batch.shape
        batch = replace(batch, bounds=np.full(shape.rows, plan.bounds.max(), np.int32))
        passes.tables.reset_padding()
        decode = plan.num_decode == plan.num_rows
        names = DECODE_FED if decode else BATCH_ARRAYS
        start = flat_of(batch, names)
        fed = self._backend.device.from_host(start)
        parts = dict(zip(names, torch.split(fed, [getattr(batch, name).size for name in names]), strict=True))
        views = passes.tables.steady_inputs(shape.rows) | parts if decode else parts

        def forward() -> tuple[Prepared, torch.Tensor]:
            prepared = passes.prepare(batch, views)
            step = passes.step(plan, batch, views, prepared, self._facts, captured=True)
            decoder = passes.decoder
            return prepared, decoder.finish(decoder.forward(decoder.embed(prepared.ids), step))

        graph, (prepared, hidden) = record(forward)
        made = Captured(
            shape=shape,
            names=names,
            graph=graph,
            fed=fed,
            rows=parts["rows"],
            prepared=prepared,
            hidden=hidden,
            sent=NOTHING,
            query_start=parts.get("query_start"),
        )
        if self._sampler is not None:
            part = SampleSet.of_whole(plan.num_rows, batch.rows)
            try:
                made.take_drawing(record, self._sampler, part)
            except Exception:
                graph.release()
                raise
        return made

    def _record(self, run: Callable[[], Any]) -> tuple[Graph, Any]:
        graphs = self._backend.graphs
        assert graphs is not None
        with few_layers(self._passes.decoder):
            run()
        return graphs.capture(run)

    def pack(self, captured: Captured, batch: BatchArrays, pack: Pack) -> None:
        """Add what the bucket is fed to the upload where it is not what its last step sent."""
        fed = flat_of(batch, captured.names)
        if not np.array_equal(fed, captured.sent):
            pack.add(FED, fed)
            captured.sent = fed

    def run(self, captured: Captured, views: dict[str, torch.Tensor]) -> None:
        """Queue the bucket's forward. What it holds is valid until its next replay."""
        fed = views.get(FED)
        if fed is not None:
            captured.fed.copy_(fed)
        captured.graph.replay()

    def forget_rows(self) -> None:
        """Upload anew with every bucket's next step: an upload may not have come."""
        for captured in (*self._captured.values(), *self._chunks.values()):
            captured.sent = NOTHING

    def give_up(self) -> None:
        """Capture no more."""
        self._given_up = True

    def close(self) -> None:
        """Release every graph."""
        for captured in (*self._captured.values(), *self._chunks.values()):
            captured.graph.release()
            if captured.drawing is not None:
                captured.drawing.release()
        self._captured.clear()
        self._chunks.clear()


def flat_of(batch: BatchArrays, names: Sequence[str]) -> np.ndarray:
    """Return those arrays of a batch as one."""
    return np.concatenate([getattr(batch, name) for name in names])


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """What may be captured: row counts of decode steps, whether these draw too, query tokens of small steps."""

    rows: tuple[int, ...] = ()
    drawing: bool = False
    chunks: tuple[int, ...] = ()

    @property
    def graphs(self) -> int:
        """Graphs in all."""
        return (len(self.rows) + len(self.chunks)) * (2 if self.drawing else 1)

    @property
    def most_rows(self) -> int:
        """Rows of the largest."""
        return max(self.drawn, default=0)

    @property
    def drawn(self) -> tuple[int, ...]:
        """Rows that each kind of bucket draws."""
        return (*self.rows, CHUNK_ROWS) if self.chunks else self.rows

    @property
    def most_tokens(self) -> int:
        """Query tokens of the largest."""
        return max((*self.rows, *self.chunks), default=0)


def buckets_of(backend: Backend, decoder: Decoder, config: RunnerConfig) -> Buckets:
    """Return the buckets that this backend, decoder and configuration can have. One row can fill each of the small
    steps, as it does when they are captured."""
    traits = [getattr(group.attention, "traits", None) for group in decoder.groups]
    able = all(hasattr(group.attention, "plan_for_capture") for group in decoder.groups)
    if backend.graphs is None or not traits or not able or any(t is None or t.graph == "never" for t in traits):
        return Buckets()
    budget = backend.graphs.budget
    drawing = budget.max_graphs != 1 and not config.max_drafts
    share = replace(budget, max_graphs=budget.max_graphs // 2) if drawing else budget
    rows = graph_buckets(backend.shapes, share, config.max_num_seqs if config.first and config.last else 0)
    mixed = bool(rows) and backend.shapes.dynamic and not budget.max_graphs
    mixed = mixed and all(t is not None and t.graph == "any" for t in traits)
    longest = min(config.max_model_len, config.max_num_batched_tokens) if mixed else 0
    chunks = tuple(tokens for tokens in CHUNK_TOKENS if tokens <= longest)
    return Buckets(rows=rows, drawing=drawing, chunks=chunks)


def graph_buckets(policy: ShapePolicy, budget: GraphBudget, max_rows: int) -> tuple[int, ...]:
    """Choose row counts to capture: the policy's, else all up to eight and then steps of an eighth to a quarter;
    thinned evenly to the budget."""
    if max_rows < 1:
        return ()
    if policy.rows:
        sizes = [rows for rows in policy.rows if not policy.tokens or rows in policy.tokens]
    else:
        sizes = _dense_sizes(max_rows)
    limit = budget.max_graphs
    if limit and len(sizes) > limit:
        step = (len(sizes) - 1) / max(1, limit - 1)
        sizes = [sizes[round(i * step)] for i in range(limit)] if limit > 1 else [sizes[-1]]
    return tuple(dict.fromkeys(sizes))


def _dense_sizes(max_rows: int) -> list[int]:
    sizes, rows = [], 1
    while rows < max_rows:
        sizes.append(rows)
        rows += 1 if rows < EACH_UP_TO else 1 << (rows.bit_length() - 3)
    return [*sizes, max_rows]
