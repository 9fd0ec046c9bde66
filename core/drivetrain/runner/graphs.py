"""Captured decode steps: one graph a row bucket, where backend and attention can. Graphs end at hidden
states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.models.step import ModelStep
from drivetrain.runner.batch import BatchShape

if TYPE_CHECKING:
    from drivetrain.runner.batch import BatchArrays, BatchBuilder
    from drivetrain.runner.forward import ForwardPass
    from drivetrain.sched.plan import StepPlan
    from drivetrain_api.v1 import AttentionBatch, Backend, Graph, GraphBudget, ShapePolicy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Captured:
    """One captured bucket. The tensors keep their addresses; a step copies its inputs into them and
    replays."""

    graph: Graph
    ids: torch.Tensor  # [B]
    positions: torch.Tensor  # [B]
    token_rows: torch.Tensor  # [B]
    plans: tuple[Any, ...]
    hidden: torch.Tensor  # [B, hidden]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """What a decode step feeds a graph: ids, positions and token rows [B], and one batch for each cache
    group."""

    ids: torch.Tensor
    positions: torch.Tensor
    token_rows: torch.Tensor
    batches: tuple[AttentionBatch, ...]


class DecodeGraphs:
    """Graphs by row count. Empty where the backend has no graphs or an attention can't be captured: eager
    then."""

    def __init__(self, backend: Backend, passes: ForwardPass, buckets: Sequence[int], widths: Sequence[int]) -> None:
        self.buckets = tuple(buckets)
        self._backend = backend
        self._passes = passes
        self._widths = tuple(widths)
        self._captured: dict[int, Captured] = {}

    @property
    def count(self) -> int:
        """Graphs that exist now."""
        return len(self._captured)

    def shape(self, plan: StepPlan) -> BatchShape | None:
        """Return the shape of the captured bucket that serves this plan, None when it has to run eagerly."""
        special = plan.embeds or plan.positions or plan.exports
        if not self._captured or plan.num_decode != plan.num_rows or plan.num_rows == 0 or special:
            return None
        rows = min((b for b in self._captured if b >= plan.num_rows), default=None)
        return None if rows is None else BatchShape(rows=rows, tokens=rows, widths=self._widths)

    def capture_shape(self, rows: int) -> BatchShape:
        """Return the shape at which the bucket of ``rows`` is captured."""
        return BatchShape(rows=rows, tokens=rows, widths=self._widths)

    def capture(self, batch: BatchArrays, inputs: StepInputs) -> None:
        """Record the decoder for one bucket; ``inputs`` are a padded step of exactly its shape."""
        runtime, decoder = self._backend.device, self._passes.decoder
        graphs = self._backend.graphs
        assert graphs is not None
        ids, positions, rows = (
            runtime.zeros(tuple(t.shape), t.dtype) for t in (inputs.ids, inputs.positions, inputs.token_rows)
        )
        attention = (decoder.groups[g].attention for g in range(len(decoder.groups)))
        plans = tuple(a.plan_for_capture(b) for a, b in zip(attention, inputs.batches, strict=True))
        step = ModelStep(ids=ids, positions=positions, token_rows=rows, plans=plans, caches=self._passes.caches)

        def run() -> torch.Tensor:
            return decoder.finish(decoder.forward(decoder.embed(ids), step))

        graph, hidden = graphs.capture(run)
        self._captured[batch.shape.rows] = Captured(
            graph=graph, ids=ids, positions=positions, token_rows=rows, plans=plans, hidden=hidden
        )

    def run(self, rows: int, inputs: StepInputs) -> torch.Tensor:
        """Replay a bucket; returns hidden states [B, hidden], valid until the bucket's next replay."""
        captured = self._captured[rows]
        captured.ids.copy_(inputs.ids)
        captured.positions.copy_(inputs.positions)
        captured.token_rows.copy_(inputs.token_rows)
        for group, plan, batch in zip(self._passes.decoder.groups, captured.plans, inputs.batches, strict=True):
            group.attention.update_plan(plan, batch)
        captured.graph.replay()
        return captured.hidden

    def close(self) -> None:
        """Release every graph."""
        for captured in self._captured.values():
            captured.graph.release()
        self._captured.clear()


def decode_graphs(backend: Backend, passes: ForwardPass, builder: BatchBuilder, max_rows: int) -> DecodeGraphs:
    """Return the graphs that this backend and decoder can have; none of them is captured yet."""
    groups = passes.decoder.groups
    capturable = backend.graphs is not None and bool(groups)
    for group in groups:
        attention = group.attention
        can = hasattr(attention, "plan_for_capture") and hasattr(attention, "update_plan")
        capturable = capturable and can and attention.traits.graph != "never"
    buckets = graph_buckets(backend.shapes, backend.graphs.budget, max_rows) if capturable and backend.graphs else ()
    return DecodeGraphs(backend, passes, buckets, builder.max_widths)


def graph_buckets(policy: ShapePolicy, budget: GraphBudget, max_rows: int) -> tuple[int, ...]:
    """Choose row counts to capture: the policy's, else powers of two; thinned evenly to the budget."""
    if policy.rows:
        sizes = [rows for rows in policy.rows if not policy.tokens or rows in policy.tokens]
    else:
        sizes = [1 << i for i in range(max(1, max_rows).bit_length()) if 1 << i < max_rows] + [max_rows]
    limit = budget.max_graphs
    if limit and len(sizes) > limit:
        step = (len(sizes) - 1) / max(1, limit - 1)
        sizes = [sizes[round(i * step)] for i in range(limit)] if limit > 1 else [sizes[-1]]
    return tuple(dict.fromkeys(sizes))
