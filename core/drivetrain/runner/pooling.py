"""Pooled vectors for requests that ask for one: sums on the device over the chunks of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from drivetrain.runner.batch import BatchArrays
    from drivetrain.runner.rows import RowTables
    from drivetrain.sched.plan import StepPlan


@dataclass(slots=True)
class _Sum:
    generation: int
    value: torch.Tensor
    count: int


class Pooler:
    """Keeps one float32 vector [hidden] for each row whose pooling spans chunks. ``last`` needs none."""

    def __init__(self, tables: RowTables) -> None:
        self._tables = tables
        self._sums: dict[int, _Sum] = {}

    def run(self, plan: StepPlan, batch: BatchArrays, hidden: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Take in the step's final hidden states [T, hidden]; return (batch row, vector) of rows that are
        complete.

        A row is complete in the plan that would sample it. Only rows that asked for pooling are looked at.
        """
        done: list[tuple[int, torch.Tensor]] = []
        for index in range(plan.num_decode + plan.num_verify, plan.num_rows):
            row = int(plan.rows[index])
            kind = self._tables.pooling.get(row)
            if kind is None:
                continue
            first, end = int(batch.query_start[index]), int(batch.query_start[index + 1])
            vector = self._take(row, kind, int(plan.start[index]), hidden[first:end])
            if plan.sample[index]:
                done.append((index, vector))
                self._sums.pop(row, None)
        return done

    def _take(self, row: int, kind: str, start: int, hidden: torch.Tensor) -> torch.Tensor:
        if kind == "last":
            return hidden[-1].to(torch.float32)
        generation = int(self._tables.generation[row])
        held = self._sums.get(row)
        if held is None or held.generation != generation:
            if start != 0:
                raise ValueError(f"row {row} pools {kind!r} but its first chunk starts at token {start}, not 0")
            held = _Sum(generation, hidden[0].to(torch.float32), 0)
            if kind == "mean":
                held.value = hidden.to(torch.float32).sum(0)
        elif kind == "mean":
            held.value = held.value + hidden.to(torch.float32).sum(0)
        held.count += len(hidden)
        self._sums[row] = held
        return held.value / held.count if kind == "mean" else held.value
