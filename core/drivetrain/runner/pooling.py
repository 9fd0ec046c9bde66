"""Pooled vectors for requests that ask for one: sums on the device over the chunks of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from drivetrain.runner.batch import BatchArrays
    from drivetrain.runner.rows import RowTables
    from drivetrain.sched.plan import StepPlan
    from drivetrain_api.v1 import DeviceRuntime


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pooled:
    """One request's pooled sum: the vector is ``total`` / ``count``, divided on the host."""

    index: int  # batch row
    total: torch.Tensor  # [hidden] float32, on the device
    count: int


@dataclass(slots=True)
class _Sum:
    generation: int
    total: torch.Tensor
    count: int


class Pooler:
    """Adds up, for each row that pools, the hidden states that count: all (mean), the first (cls), the last
    (last).

    Every step sees a [T, hidden] tensor masked by a [T, 1] one, so shapes are those of the batch.
    """

    def __init__(self, runtime: DeviceRuntime, tables: RowTables) -> None:
        self._runtime = runtime
        self._tables = tables
        self._sums: dict[int, _Sum] = {}

    def run(self, plan: StepPlan, batch: BatchArrays, hidden: torch.Tensor) -> list[Pooled]:
        """Take in the step's final hidden states [T, hidden]; return the sums of rows that are complete.

        A row is complete in the plan that would sample it. Only rows that asked for pooling are looked at.
        """
        done: list[Pooled] = []
        for index in range(plan.num_decode + plan.num_verify, plan.num_rows):
            row = int(plan.rows[index])
            kind = self._tables.pooling.get(row)
            if kind is None:
                continue
            start, final = int(plan.start[index]), bool(plan.sample[index])
            counted = np.zeros((batch.shape.tokens, 1), bool)
            first, end = int(batch.query_start[index]), int(batch.query_start[index]) + int(plan.num_new[index])
            if kind == "mean":
                counted[first:end] = True
            elif kind == "cls":
                counted[first] = start == 0
            else:
                counted[end - 1] = final
            held = self._add(row, start if kind != "last" else None, counted, hidden)
            if final:
                done.append(Pooled(index=index, total=held.total, count=held.count))
                self._sums.pop(row, None)
        return done

    def _add(self, row: int, start: int | None, counted: np.ndarray, hidden: torch.Tensor) -> _Sum:
        """Add the counted states to the row's sum. ``start``: None where earlier tokens don't count."""
        generation = int(self._tables.generation[row])
        held = self._sums.get(row)
        fresh = held is None or held.generation != generation
        if fresh and start:
            raise ValueError(f"row {row} pools over its whole prompt, but its first chunk starts at token {start}")
        mask = self._runtime.from_host(counted)
        total = torch.where(mask, hidden.to(torch.float32), 0.0).sum(0)
        if held is None or fresh:
            held = _Sum(generation, torch.zeros_like(total), 0)
        held.total = held.total + total
        held.count += int(counted.sum())
        self._sums[row] = held
        return held
