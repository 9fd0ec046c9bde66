"""input.prepare/1 on the host: a few array operations over memory that tensors share, instead of some fifty ops."""

from __future__ import annotations

import numpy as np
import torch

from drivetrain_api.v1 import Prepared, PrepareInputs, PrepareSpec

from .threads import Threads


class Prepare:
    """One spec's preparation. Same values as the reference, all of the slot dtype. A step's threads begin here."""

    def __init__(self, spec: PrepareSpec, threads: Threads) -> None:
        self._threads = threads
        self._dtype = np.dtype(spec.dtype)
        self._block_tokens = spec.block_tokens

    def __call__(self, inputs: PrepareInputs, widths: tuple[int, ...]) -> Prepared:
        """Compute ids, positions, lengths, tables and slots."""
        dtype = self._dtype
        self._threads.begin_step(len(inputs.token_row))
        rows, row, offset = inputs.rows.numpy(), inputs.token_row.numpy(), inputs.token_offset.numpy()
        start, num_new = inputs.start.numpy(), inputs.num_new.numpy()
        if len(row) == len(rows) and num_new.min() == 1 == num_new.max() and start.max() < 0:
            return self._decode(inputs, rows, widths)
        given = start >= 0
        base = np.where(given, start, inputs.computed.numpy()[rows]).astype(dtype)
        lengths = np.where(num_new > 0, base + num_new, 0).astype(dtype)
        last = inputs.last_tokens.numpy()
        drawn = last[rows[row], np.minimum(offset, last.shape[1] - 1)]
        ids = np.where(given[row], inputs.host_ids.numpy(), drawn).astype(dtype)
        positions = base[row] + offset
        real = offset < num_new[row]
        padded = not real.all()
        if padded:
            ids, positions = np.where(real, ids, 0), np.where(real, positions, 0)
        tables, slots = [], []
        for table, width, size in zip(inputs.block_tables, widths, self._block_tokens, strict=True):
            blocks = table.numpy()[rows, :width].astype(dtype, copy=False)
            slot = blocks[row, np.minimum(positions // size, width - 1)] * size + positions % size
            tables.append(torch.from_numpy(blocks))
            slots.append(torch.from_numpy((np.where(real, slot, 0) if padded else slot).astype(dtype, copy=False)))
        return Prepared(
            ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions.astype(dtype, copy=False)),
            base=torch.from_numpy(base),
            lengths=torch.from_numpy(lengths),
            tables=tuple(tables),
            slots=tuple(slots),
        )

    def _decode(self, inputs: PrepareInputs, rows: np.ndarray, widths: tuple[int, ...]) -> Prepared:
        """One token a row, all of them from the tables, none padded."""
        dtype = self._dtype
        base = inputs.computed.numpy()[rows].astype(dtype)
        tables, slots = [], []
        for table, width, size in zip(inputs.block_tables, widths, self._block_tokens, strict=True):
            blocks = table.numpy()
            column, inside = np.divmod(base, size)
            slots.append(torch.from_numpy(blocks[rows, np.minimum(column, width - 1)] * size + inside))
            tables.append(torch.from_numpy(blocks[rows, :width]))
        positions = torch.from_numpy(base)
        return Prepared(
            ids=torch.from_numpy(inputs.last_tokens.numpy()[rows, 0].astype(dtype)),
            positions=positions,
            base=positions,
            lengths=positions + 1,
            tables=tuple(tables),
            slots=tuple(slots),
        )
