"""input.prepare/1 on the host: a few array operations over memory that tensors share, instead of some fifty ops."""

from __future__ import annotations

import numpy as np
import torch

from drivetrain_api.v1 import Prepared, PrepareInputs, PrepareSpec


class Prepare:
    """One spec's preparation. Same values as the reference, all of the slot dtype."""

    def __init__(self, spec: PrepareSpec) -> None:
        self._dtype = np.dtype(spec.dtype)
        self._block_tokens = spec.block_tokens

    def __call__(self, inputs: PrepareInputs, widths: tuple[int, ...]) -> Prepared:
        """Compute ids, positions, lengths, tables and slots."""
        dtype = self._dtype
        rows, row, offset = inputs.rows.numpy(), inputs.token_row.numpy(), inputs.token_offset.numpy()
        start, num_new = inputs.start.numpy(), inputs.num_new.numpy()
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
