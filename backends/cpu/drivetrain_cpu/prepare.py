"""input.prepare/1 and sample.keep/1 on the host: array operations over memory that tensors share, compiled where there
is a library."""

from __future__ import annotations

import numpy as np
import torch

from drivetrain_api.v1 import Prepared, PrepareInputs, PrepareSpec, torch_dtype

from .native import Kernels, PrepareGroup, PrepareJob, check
from .threads import Threads

INT32 = ("rows", "start", "num_new", "token_row", "token_offset", "host_ids", "last_tokens", "computed")


class NativePrepare:
    """One spec's preparation by the compiled kernel; results are parts of one new tensor. A step's threads begin
    here."""

    def __init__(self, spec: PrepareSpec, threads: Threads, kernels: Kernels) -> None:
        self._threads, self._kernels = threads, kernels
        self._dtype = torch_dtype(spec.dtype)
        self._groups = (PrepareGroup * len(spec.block_tokens))()
        for group, size in zip(self._groups, spec.block_tokens, strict=True):
            group.block_tokens = size
        wide = int(spec.dtype == "int64")
        self._job = PrepareJob(groups=self._groups, num_groups=len(spec.block_tokens), wide=wide)

    def __call__(self, inputs: PrepareInputs, widths: tuple[int, ...]) -> Prepared:
        """Compute ids, positions, lengths, tables and slots, and advance the rows' counts."""
        job, num_rows, num_tokens = self._job, inputs.rows.shape[0], inputs.token_row.shape[0]
        self._threads.begin_step(num_tokens)
        sizes = [num_tokens, num_tokens, num_rows, num_rows]
        for width in widths:
            sizes += (num_rows * width, num_tokens)
        parts = torch.empty(sum(sizes), dtype=self._dtype).split_with_sizes(sizes)
        job.ids, job.positions, job.base, job.lengths = [part.data_ptr() for part in parts[:4]]
        held = [self._point(inputs, name) for name in INT32]
        job.num_rows, job.num_tokens = num_rows, num_tokens
        job.table_rows, job.places = inputs.last_tokens.shape
        tables = parts[4::2]
        for group, table, width, blocks, slots in zip(
            self._groups, inputs.block_tables, widths, tables, parts[5::2], strict=True
        ):
            check(self._dtype, table)
            if not 0 < width <= table.shape[1]:
                raise IndexError(f"a step wants {width} blocks a row of a table of {table.shape[1]}")
            group.table, group.stride, group.width = table.data_ptr(), table.stride(0), width
            group.blocks, group.slots = blocks.data_ptr(), slots.data_ptr()
        self._kernels.prepare(job)
        del held
        return Prepared(
            ids=parts[0],
            positions=parts[1],
            base=parts[2],
            lengths=parts[3],
            tables=tuple([t.view(num_rows, width) for t, width in zip(tables, widths, strict=True)]),
            slots=parts[5::2],
        )

    def _point(self, inputs: PrepareInputs, name: str) -> torch.Tensor:
        tensor: torch.Tensor = getattr(inputs, name)
        check(torch.int32, tensor)
        setattr(self._job, name, tensor.data_ptr())
        return tensor


class Prepare:
    """The same without a kernel. Same values as the reference, all of the slot dtype. A step's threads begin here."""

    def __init__(self, spec: PrepareSpec, threads: Threads) -> None:
        self._threads = threads
        self._dtype = np.dtype(spec.dtype)
        self._block_tokens = spec.block_tokens

    def __call__(self, inputs: PrepareInputs, widths: tuple[int, ...]) -> Prepared:
        """Compute ids, positions, lengths, tables and slots, and advance the rows' counts."""
        dtype = self._dtype
        self._threads.begin_step(len(inputs.token_row))
        rows, row, offset = inputs.rows.numpy(), inputs.token_row.numpy(), inputs.token_offset.numpy()
        start, num_new, computed = inputs.start.numpy(), inputs.num_new.numpy(), inputs.computed.numpy()
        given = start >= 0
        base = np.where(given, start, computed[rows]).astype(dtype)
        lengths = np.where(num_new > 0, base + num_new, 0).astype(dtype)
        last = inputs.last_tokens.numpy()
        drawn = last[rows[row], np.minimum(offset, last.shape[1] - 1)]
        real = offset < num_new[row]
        ids = np.where(real, np.where(given[row], inputs.host_ids.numpy(), drawn), 0).astype(dtype)
        positions = np.where(real, base[row] + offset, 0).astype(dtype)
        tables, slots = [], []
        for table, width, size in zip(inputs.block_tables, widths, self._block_tokens, strict=True):
            blocks = table.numpy()[rows, :width].astype(dtype, copy=False)
            slot = blocks[row, np.minimum(positions // size, width - 1)] * size + positions % size
            tables.append(torch.from_numpy(blocks))
            slots.append(torch.from_numpy(np.where(real, slot, 0).astype(dtype, copy=False)))
        computed[rows] = lengths
        return Prepared(
            ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions),
            base=torch.from_numpy(base),
            lengths=torch.from_numpy(lengths),
            tables=tuple(tables),
            slots=tuple(slots),
        )


def keep(tokens: torch.Tensor, witness: torch.Tensor, rows: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
    """sample.keep/1 without a kernel: tokens [N], witness [N] and rows [N] -> packed [2 N]."""
    drawn, count = tokens.numpy(), tokens.shape[0]
    last_tokens.numpy()[rows.numpy(), 0] = drawn
    packed = np.empty(2 * count, np.int32)
    packed[:count] = drawn
    packed[count:].view(np.float32)[...] = witness.numpy()
    return torch.from_numpy(packed)
