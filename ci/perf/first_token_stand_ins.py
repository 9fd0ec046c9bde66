"""Captured steps without their kernels, so that only the host's part of a step is left; see first_token.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from drivetrain.runner import graphs
from drivetrain.runner.batch import BatchShape
from drivetrain.runner.forward import BATCH_ARRAYS
from drivetrain.runner.rows import RowTables
from drivetrain.runner.sampler import RowUpdate


class Lengths:
    """Stands for what a graph has prepared."""

    lengths = torch.zeros(8, dtype=torch.int32)


def put_stand_ins(runner: Any) -> None:
    """Let steps with prompts and single decode rows run as captured ones of which only the host's part is left: no
    layers and no draws, the first token is whatever lies in memory. Rows are kept as on an accelerator, in words."""
    tokens = (16, 32, 8192)
    runner.tables = RowTables(runner.runtime, replace(runner.tables.shape, slot_dtype="int32"))
    runner.passes.tables = runner.tables
    runner.graphs.buckets = (1,)
    runner.graphs._captured = {1: _stand_in(runner, 1, 1, graphs.DECODE_FED, [1, 1])}
    rows = graphs.CHUNK_ROWS
    runner.graphs._chunks = {
        count: _stand_in(runner, rows, count, BATCH_ARRAYS, [rows, rows, rows, rows + 1, count, count, count])
        for count in tokens
    }


def _stand_in(runner: Any, rows: int, tokens: int, names: tuple[str, ...], sizes: list[int]) -> graphs.Captured:
    device = runner.runtime.device
    fed = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
    update = RowUpdate(rows=fed[:rows], computed=fed[:rows], last_tokens=fed[:rows])
    prepared: Any = Lengths()
    return graphs.Captured(
        shape=BatchShape(rows=rows, tokens=tokens, widths=runner.builder.max_widths),
        names=names,
        graph=graphs.UNRECORDED,
        fed=fed,
        rows=fed[:rows],
        prepared=prepared,
        hidden=torch.zeros(tokens, 64, device=device),
        sent=graphs.NOTHING,
        query_start=None if rows == tokens else fed[: rows + 1],
        drawing=graphs.UNRECORDED,
        update=update,
        packed=torch.zeros(2 * rows, dtype=torch.int32, device=device),
    )
