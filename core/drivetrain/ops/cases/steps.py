"""Inputs of input.prepare: decode, verification and prefill rows, two groups, padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from drivetrain.ops.cases.source import Source, int_tensor, on
from drivetrain.ops.reference.kinds import Case, Place
from drivetrain_api.v1 import PrepareInputs, PrepareSpec

TABLE_ROWS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One batch row: the table row, its start (-1: from the table), its new tokens and those it is padded
    to.
    """

    row: int
    start: int
    new: int
    padded: int = 0


STEPS: tuple[tuple[str, tuple[StepRow, ...]], ...] = (
    ("one decode row", (StepRow(row=2, start=-1, new=1),)),
    ("decode", tuple(StepRow(row=r, start=-1, new=1) for r in (4, 0, 3))),
    ("verify", (StepRow(row=1, start=-1, new=3), StepRow(row=4, start=-1, new=2))),
    ("prefill", (StepRow(row=0, start=0, new=21), StepRow(row=3, start=32, new=5))),
    (
        "mixed, padded",
        (
            StepRow(row=3, start=-1, new=1),
            StepRow(row=1, start=-1, new=3),
            StepRow(row=0, start=48, new=6),
            StepRow(row=TABLE_ROWS - 1, start=-1, new=0, padded=4),
            StepRow(row=TABLE_ROWS - 1, start=-1, new=0),
        ),
    ),
)


def step_inputs(source: Source, rows: tuple[StepRow, ...], slot_dtype: str) -> PrepareInputs:
    """Return host inputs of one step over a table of six rows, the last of them the padding row."""
    counts = [r.new + r.padded for r in rows]
    computed = source.integers(0, 90, TABLE_ROWS, dtype="int32")
    computed[-1] = 0
    tables = [source.integers(1, 500, TABLE_ROWS, width, dtype=slot_dtype) for width in (12, 7)]
    for table in tables:
        table[-1] = 0
    return PrepareInputs(
        rows=int_tensor([r.row for r in rows], "int32"),
        start=int_tensor([r.start for r in rows], "int32"),
        token_row=int_tensor(np.repeat(np.arange(len(rows)), counts), "int32"),
        token_offset=int_tensor(np.concatenate([np.arange(c) for c in counts]), "int32"),
        host_ids=source.integers(0, 1000, sum(counts), dtype="int32"),
        num_new=int_tensor([r.new for r in rows], "int32"),
        computed=computed,
        last_tokens=source.integers(0, 1000, TABLE_ROWS, 4, dtype="int32"),
        block_tables=tuple(tables),
    )


def prepare_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Every kind of row, both slot dtypes (``dtype`` is not used: there is nothing but integers)."""
    source = Source("float32", seed)
    for slot_dtype in ("int32", "int64"):
        spec = PrepareSpec(dtype=slot_dtype, block_tokens=(8, 16))
        for name, rows in STEPS:
            yield _case(place, f"{name}, {slot_dtype}", spec, step_inputs(source, rows, slot_dtype))


def _case(place: Place, name: str, spec: PrepareSpec, inputs: PrepareInputs) -> Case:
    widths = (12, 7)

    def run(prepare: Any) -> tuple[torch.Tensor, ...]:
        values: dict[str, Any] = {f.name: on(place, getattr(inputs, f.name)) for f in fields(inputs)}
        values["block_tables"] = tuple(on(place, t) for t in inputs.block_tables)
        done = prepare(PrepareInputs(**values), widths)
        return (done.ids, done.positions, done.base, done.lengths, *done.tables, *done.slots, values["computed"])

    return Case(name=name, spec=spec, inputs={"inputs": inputs, "widths": widths}, run=run)
