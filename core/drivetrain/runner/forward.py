"""The forward pass of one plan: rows -> inputs -> attention plans -> the decoder's layers. Nothing here
waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from drivetrain.models.step import ModelStep
from drivetrain.runner.rows import DELTA, RowTables
from drivetrain_api.v1 import AttentionBatch, PrepareInputs, PrepareSpec

if TYPE_CHECKING:
    from drivetrain.models.decoder import Decoder
    from drivetrain.models.step import Carry
    from drivetrain.ops import Ops
    from drivetrain.runner.batch import BatchArrays
    from drivetrain.runner.staging import Pack
    from drivetrain.sched.plan import StepPlan
    from drivetrain_api.v1 import Backend, CacheHandle, Prepared


BATCH_ARRAYS = ("rows", "start", "num_new", "query_start", "token_row", "token_offset", "host_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """The plan of a recurrent group's step. Row b's state lies in block ``state_blocks[b]``; 0 for padded
    rows.

    ``exports`` [n, 3] of (batch row, offset, block): store the state after ``offset`` tokens of the row in
    the block.
    """

    state_blocks: torch.Tensor  # [B]
    query_start_dev: torch.Tensor  # [B + 1]
    query_start_host: np.ndarray  # [B + 1]
    exports: torch.Tensor | None
    exports_host: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """One cache group of the decoder: its place in the plan, in the tables, and among the paged groups (or
    None)."""

    plan_group: int
    paged: int | None
    layers: tuple[int, ...]


class ForwardPass:
    """Runs plans through one decoder (or one stage of it). ``group_ids``: the plan's group of each decoder
    group."""

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        caches: Sequence[CacheHandle | None],
        ops: Ops,
        tables: RowTables,
        group_ids: Sequence[int],
    ) -> None:
        self._backend = backend
        self.decoder = decoder
        self.caches = tuple(caches)
        self.tables = tables
        self.places = group_places(decoder, group_ids)
        self._paged = [g for g, place in enumerate(self.places) if place.paged is not None]
        self._index_dtype = tables.tables[0].dtype if tables.tables else torch.int64
        self._prepare = ops.bind(
            PrepareSpec(
                dtype=tables.shape.slot_dtype,
                block_tokens=tuple(decoder.groups[g].layout.block_tokens for g in self._paged),
            )
        )

    def pack(self, plan: StepPlan, batch: BatchArrays, pack: Pack) -> None:
        """Add the batch's arrays, and the plan's rarer sections, to the step's upload."""
        for name in ("rows",) if batch.steady else BATCH_ARRAYS:
            pack.add(name, getattr(batch, name))
        if plan.positions:
            grid = np.full((3, batch.shape.tokens), -1, np.int32)
            for run in plan.positions:
                grid[:, run.offset : run.offset + run.values.shape[1]] = run.values
            pack.add("grid", grid)
        for g, place in enumerate(self.places):
            exports = self._exports(plan, place.plan_group)
            if exports:
                pack.add(f"exports{g}", np.array(exports, np.int32))

    def prepare(self, batch: BatchArrays, views: dict[str, torch.Tensor]) -> Prepared:
        """Compute ids, positions, lengths, tables and slots from the rows, and advance the rows' counts."""
        tables = self.tables
        if batch.steady:
            views |= tables.steady_inputs(batch.shape.rows)
        prepared: Prepared = self._prepare(
            PrepareInputs(
                rows=views["rows"],
                start=views["start"],
                token_row=views["token_row"],
                token_offset=views["token_offset"],
                host_ids=views["host_ids"],
                num_new=views["num_new"],
                computed=tables.computed,
                last_tokens=tables.last_tokens,
                block_tables=tuple(tables.tables[g] for g in self._paged),
            ),
            batch.shape.widths,
        )
        return prepared

    def step(
        self,
        plan: StepPlan,
        batch: BatchArrays,
        views: dict[str, torch.Tensor],
        prepared: Prepared,
        facts: int,
        *,
        captured: bool = False,
    ) -> ModelStep:
        """Plan every group's attention and gather what the decoder's layers need. ``captured``: for a graph."""
        attention = self.attention_batches(plan, batch, views, prepared)
        plans: list[Any] = []
        for g, place in enumerate(self.places):
            if place.paged is None:
                plans.append(self._state_plan(plan, batch, views, g))
            else:
                planner = self.decoder.groups[g].attention
                plans.append((planner.plan_for_capture if captured else planner.plan)(attention[place.paged]))
        states = [p.state_blocks if isinstance(p, StatePlan) else None for p in plans]
        return ModelStep(
            ids=prepared.ids,
            positions=self.positions(views, prepared, facts),
            token_rows=views["token_row"],
            plans=tuple(plans),
            caches=self.caches,
            state_blocks=tuple(states),
            exports=tuple(views.get(f"exports{g}") for g in range(len(plans))),
        )

    def attention_batches(
        self, plan: StepPlan, batch: BatchArrays, views: dict[str, torch.Tensor], prepared: Prepared
    ) -> tuple[AttentionBatch, ...]:
        """Return one batch for each paged group."""
        dtype = self._index_dtype
        num_prefill = plan.num_rows - plan.num_decode - plan.num_verify
        if batch.steady:
            query_start, token_row = self.tables.steady_places(batch.shape.rows)
        else:
            query_start, token_row = views["query_start"].to(dtype), views["token_row"].to(dtype)
        lengths, positions = prepared.lengths, prepared.positions
        exact = self.tables.shape.max_drafts == 0 or num_prefill == plan.num_rows
        longest = batch.shape.longest or int(batch.bounds.max(initial=0))
        batches = [
            AttentionBatch(
                query_start_dev=query_start,
                lengths_dev=lengths,
                block_table_dev=table,
                slots_dev=slots,
                token_row_dev=token_row,
                positions_dev=positions,
                query_start_host=batch.query_start,
                length_bounds_host=batch.bounds,
                host_lengths_exact=exact,
                num_decode_rows=plan.num_decode,
                num_verify_rows=plan.num_verify,
                num_prefill_rows=num_prefill,
                max_query_len=batch.max_query_len,
                max_length_bound=longest,
            )
            for table, slots in zip(prepared.tables, prepared.slots, strict=True)
        ]
        return tuple(batches)

    def embed(self, plan: StepPlan, ids: torch.Tensor) -> Carry:
        """Look the ids up; embeddings that the plan brings replace their tokens' own."""
        carry = self.decoder.embed(ids)
        if not plan.embeds:
            return carry
        hidden, device = carry["hidden"], self._backend.device
        given = np.zeros(hidden.shape, np.float32)
        replaced = np.zeros((len(given), 1), bool)
        for run in plan.embeds:
            given[run.offset : run.offset + len(run.values)] = run.values
            replaced[run.offset : run.offset + len(run.values)] = True
        values = device.from_host(given).to(hidden.dtype)
        return {**carry, "hidden": torch.where(device.from_host(replaced), values, hidden)}

    def repeatable(self) -> bool:
        """Whether layers may be run once more over the same inputs: writing a slot twice changes nothing, advancing a
        state twice would."""
        return all(place.paged is not None for place in self.places)

    def close(self) -> None:
        """Drop the caches."""
        self.caches = ()

    def positions(self, views: dict[str, torch.Tensor], prepared: Prepared, facts: int) -> torch.Tensor:
        positions = prepared.positions
        if facts & DELTA:
            delta = self.tables.ints[2].index_select(0, views["rows"])
            positions = positions + delta[views["token_row"]]
        grid = views.get("grid")
        if grid is not None:
            positions = torch.where(grid >= 0, grid, positions.unsqueeze(0).to(grid.dtype))
        return positions

    def _exports(self, plan: StepPlan, group: int) -> tuple[tuple[int, int, int], ...]:
        """The group's exports; under fixed shapes filled up with exports of nothing to the null block."""
        found = [(e.index, e.offset, e.block) for e in plan.exports if e.group == group]
        missing = -len(found) % self.tables.shape.chunk if self.tables.shape.chunk else 0
        return tuple(found + [(0, 0, 0)] * missing)

    def _state_plan(self, plan: StepPlan, batch: BatchArrays, views: dict[str, torch.Tensor], group: int) -> StatePlan:
        return StatePlan(
            state_blocks=self.tables.tables[group][views["rows"], 0],
            query_start_dev=views["query_start"],
            query_start_host=batch.query_start,
            exports=views.get(f"exports{group}"),
            exports_host=self._exports(plan, self.places[group].plan_group),
        )


def group_places(decoder: Decoder, group_ids: Sequence[int]) -> tuple[GroupPlace, ...]:
    """Number the decoder's groups: recurrent ones keep states, all others are paged."""
    places, paged = [], 0
    for group, plan_group in zip(decoder.groups, group_ids, strict=True):
        recurrent = group.spec.kind == "recurrent"
        places.append(GroupPlace(plan_group=plan_group, paged=None if recurrent else paged, layers=group.layers))
        paged += 0 if recurrent else 1
    return tuple(places)
