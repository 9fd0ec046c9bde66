"""How a step's rows are cut up for attention on the host. Integers only; made once a step and group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drivetrain_api.v1 import AttentionBatch, AttentionSpec

from .native import AttentionJob
from .threads import work_seconds

TILE = 64
FEW_QUERIES = 8
SHORT_KEYS = 512
PIECE_BYTES = 2 << 20
SCRATCH_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePiece:
    """Tiles first .. end - 1, processed together.

    ``outside``: flat places [of N * tile] beyond the length or before the window, None where there are none.
    ``hidden`` bool [N, 1, n, tile]: True where a query does not see a key; None where all are seen. ``dead``: some
    query sees no key of some tile.
    """

    first: int
    end: int
    blocks: torch.Tensor  # [N * blocks a tile]
    outside: torch.Tensor | None
    hidden: torch.Tensor | None
    dead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Entries (R of them, n queries each) and their tiles (N in all, in order of entry, then position).

    ``tokens``: [R * n] where the entries' queries are in the step, or None where they are 0 .. R n - 1 in order.
    """

    size: int  # keys a tile
    entries: int
    queries: int
    tokens: torch.Tensor | None
    owner: torch.Tensor  # [N] the entry of each tile, ascending
    starts: np.ndarray  # [R] the first tile of each entry
    pieces: tuple[TilePiece, ...]
    single: bool  # one tile an entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some blocks of one row; of their slots, ``first`` .. ``end`` - 1 hold keys that some query sees.

    ``run``: the first block id where the ids ascend one by one (no copy is needed then), else None.
    """

    blocks: torch.Tensor
    run: int | None
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row with few queries: tokens first .. first + queries - 1 of the step.

    ``hidden`` bool [n, L] over the pieces' keys, None where every query sees them all.
    """

    first: int
    queries: int
    pieces: tuple[Piece, ...]
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One row with many queries: tokens first .. first + queries - 1 of the step, keys from ``begin`` on."""

    first: int
    queries: int
    length: int
    run: int | None  # as in ``Piece``
    low: int  # first key position that any query sees
    begin: int  # position of the first block's first slot, a multiple of the tile
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Single queries for the compiled kernel: a job that lacks only the layer's tensors, and what it points to."""

    job: AttentionJob
    held: tuple[torch.Tensor | np.ndarray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """A step of one group."""

    place: tuple[int, int] | tuple[torch.Tensor, torch.Tensor]  # block and offset of each token's own k and v, [T] each
    entries: Entries | None
    tiles: tuple[Tiles, ...] = ()
    rows: tuple[Row, ...] = ()
    spans: tuple[Span, ...] = ()
    seconds: float = 0.0  # about what one thread takes for tiles, rows and spans
    covered: bool = True  # every token of the step is in a tile, a row or a span


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """The batch's host values."""

    starts: np.ndarray
    lengths: np.ndarray
    table: np.ndarray


class Planner:
    """Cuts batches of one spec. ``invariant``: each query becomes an entry of its own. ``compiled``: there is a kernel
    for single queries, which then takes all rows of few queries."""

    def __init__(self, spec: AttentionSpec, *, invariant: bool, compiled: bool) -> None:
        self._spec, self._invariant, self._compiled = spec, invariant, compiled
        self.size = spec.layout.block_tokens
        self.tile = max(TILE, self.size)
        key_bytes = 4 * spec.num_kv_heads * max(spec.head_dim, spec.v_head_dim)
        self._piece_blocks = max(1, PIECE_BYTES // (key_bytes * self.size))
        self._blank = AttentionJob(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            v_dim=spec.v_head_dim,
            block_tokens=self.size,
            scale=spec.scale,
            soft_cap=spec.soft_cap or 0.0,
            window=spec.window or 0,
        )

    def plan(self, batch: AttentionBatch) -> HostPlan:
        """Rows of few queries become tiles where they are many and short, else rows; the others become spans."""
        place = self._place(batch.slots_dev)
        if self._compiled and 0 < batch.num_decode_rows == batch.num_tokens == batch.num_rows:
            return HostPlan(place=place, entries=self._each_row(batch))
        starts = batch.query_start_host
        host = _Host(starts=starts, lengths=batch.lengths_dev.numpy(), table=batch.block_table_dev.numpy())
        queries = np.diff(starts)
        used = (queries > 0) & (host.lengths > 0)
        few = used & (queries <= FEW_QUERIES)
        tiles: list[Tiles] = []
        rows: list[Row] = []
        entries = None
        if self._compiled:
            alone = used if self._invariant else few
            entries = self._entries(np.flatnonzero(alone), queries, host) if alone.any() else None
            used, few = used & ~alone, few & ~alone
        for n in sorted(set(queries[few].tolist())):
            same = np.flatnonzero(few & (queries == n))
            if self._invariant or (len(same) > 2 and self._keys(host.lengths[same], n) <= SHORT_KEYS):
                tiles.append(self._tiles(same, n, host))
            else:
                rows.extend(self._row(int(row), n, host) for row in same)
        spans = [self._span(int(row), host) for row in np.flatnonzero(used & ~few)]
        return HostPlan(
            place=place,
            entries=entries,
            tiles=tuple(tiles),
            rows=tuple(rows),
            spans=tuple(spans),
            seconds=self._seconds(queries[used], host.lengths[used]) if used.any() else 0.0,
            covered=bool((host.lengths[queries > 0] > 0).all()),
        )

    def _place(self, slots: torch.Tensor) -> tuple[int, int] | tuple[torch.Tensor, torch.Tensor]:
        """Return block and offset of slots [T]; numbers for one alone."""
        if slots.shape[0] == 1:
            return divmod(int(slots.item()), self.size)
        block, offset = np.divmod(slots.numpy(), self.size)
        return torch.from_numpy(block), torch.from_numpy(offset)

    def _each_row(self, batch: AttentionBatch) -> Entries:
        """Make an entry of every row of a batch of decode rows: the kernel counts them itself."""
        table, ends = (t.to(torch.int64).contiguous() for t in (batch.block_table_dev, batch.lengths_dev))
        job = AttentionJob.from_buffer_copy(self._blank)
        job.table, job.width = table.data_ptr(), table.shape[1]
        job.ends, job.entries = ends.data_ptr(), ends.shape[0]
        return Entries(job=job, held=(table, ends))

    def _entries(self, rows: np.ndarray, queries: np.ndarray, host: _Host) -> Entries:
        """Make an entry of each query of the rows."""
        counts = queries[rows]
        owner = np.repeat(rows, counts)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = host.lengths[owner] - queries[owner] + place
        ends = positions + 1 if self._spec.causal else host.lengths[owner]
        return self._job(host.table, host.starts[owner] + place, owner, positions, ends)

    def _job(
        self, blocks: np.ndarray, tokens: np.ndarray, rows: np.ndarray, positions: np.ndarray, ends: np.ndarray
    ) -> Entries:
        """Make the job of queries: each one's token of the step, row of the table [B, W], position, and end of keys."""
        spec = self._spec
        lows = np.zeros_like(ends) if spec.window is None else np.maximum(positions - spec.window + 1, 0)
        held = tuple(np.ascontiguousarray(part, np.int64) for part in (blocks, tokens, rows, lows, ends))
        table = held[0]
        job = AttentionJob.from_buffer_copy(self._blank)
        for name, part in zip(("table", "tokens", "rows", "lows", "ends"), held, strict=True):
            setattr(job, name, part.ctypes.data)
        job.width, job.entries = table.shape[1], len(tokens)
        return Entries(job=job, held=held)

    def near(self, keys: Any, queries: Any) -> Any:
        """Say where causality and the window let a query see a key, both given by position."""
        allowed = keys <= queries if self._spec.causal else (keys >= 0) & (queries >= 0)
        return allowed if self._spec.window is None else allowed & (keys > queries - self._spec.window)

    def _keys(self, lengths: np.ndarray, n: int) -> float:
        """Return the mean number of keys that a row reads."""
        window = self._spec.window
        return float((lengths if window is None else np.minimum(lengths, window + n - 1)).mean())

    def _seconds(self, queries: np.ndarray, lengths: np.ndarray) -> float:
        """About one thread's time for the keys that the queries see, gathered and widened, and their products."""
        spec, window = self._spec, self._spec.window
        keys = lengths if window is None else np.minimum(lengths, window + queries - 1)
        size = spec.head_dim + spec.v_head_dim
        moved = 4.0 * spec.num_kv_heads * size * 4.0 * float(keys.sum())
        return work_seconds(moved, 2.0 * spec.num_heads * size * float((keys * queries).sum()))

    def _low(self, position: Any) -> Any:
        """Return the first key position that a query at ``position`` sees."""
        return position * 0 if self._spec.window is None else np.maximum(position - self._spec.window + 1, 0)

    def _blocks(self, table: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
        """Return block ids, flat; places beyond the table are block 0."""
        ids = table[rows, np.minimum(columns, table.shape[1] - 1)]
        return torch.from_numpy(np.where(columns < table.shape[1], ids, 0).ravel().astype(np.int64))

    def _tiles(self, rows: np.ndarray, n: int, host: _Host) -> Tiles:
        """Lay out the tiles of rows with n queries each."""
        first, ends = host.starts[rows].astype(np.int64), host.lengths[rows].astype(np.int64)
        positions = ends[:, None] - n + np.arange(n)
        if self._invariant and n > 1:
            first = (first[:, None] + np.arange(n)).ravel()
            ends = positions.ravel() + 1 if self._spec.causal else np.repeat(ends, n)
            rows, positions, n = np.repeat(rows, n), positions.reshape(-1, 1), 1
        low = self._low(positions[:, 0])
        begin = low // self.tile
        count = -(-ends // self.tile) - begin
        owner, starts = np.repeat(np.arange(len(rows)), count), np.cumsum(count) - count
        tile = begin[owner] + np.arange(len(owner)) - starts[owner]
        keys = tile[:, None] * self.tile + np.arange(self.tile)
        inside = (keys < ends[owner, None]) & (keys >= low[owner, None])
        seen = inside[:, None, :] & self.near(keys[:, None, :], positions[owner][:, :, None])
        tokens = (first[:, None] + np.arange(n)).ravel()
        columns = tile[:, None] * (self.tile // self.size) + np.arange(self.tile // self.size)
        blocks = self._blocks(host.table, rows[owner][:, None], columns)
        return Tiles(
            size=self.tile,
            entries=len(rows),
            queries=n,
            tokens=None if (tokens == np.arange(len(tokens))).all() else torch.from_numpy(tokens),
            owner=torch.from_numpy(owner),
            starts=starts,
            pieces=tuple(self._tile_pieces(blocks, inside, seen)),
            single=bool((count == 1).all()),
        )

    def _tile_pieces(self, blocks: torch.Tensor, inside: np.ndarray, seen: np.ndarray) -> Iterator[TilePiece]:
        """Cut tiles so that a piece's float32 keys and values stay below ``SCRATCH_BYTES``."""
        spec, per_tile = self._spec, self.tile // self.size
        key_bytes = 4 * spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
        step = max(1, SCRATCH_BYTES // (key_bytes * self.tile))
        for first in range(0, len(inside), step):
            end = min(first + step, len(inside))
            some, outside = seen[first:end], np.flatnonzero(~inside[first:end])
            yield TilePiece(
                first=first,
                end=end,
                blocks=blocks[first * per_tile : end * per_tile],
                outside=torch.from_numpy(outside) if len(outside) else None,
                hidden=None if some.all() else torch.from_numpy(~some).unsqueeze(1),
                dead=not some.any(-1).all(),
            )

    def _row(self, row: int, n: int, host: _Host) -> Row:
        """Cut one row's blocks into pieces whose float32 keys stay below ``PIECE_BYTES``."""
        length = int(host.lengths[row])
        low = int(self._low(length - n))
        pieces = []
        for first in range(low // self.size, -(-length // self.size), self._piece_blocks):
            columns = np.arange(first, min(first + self._piece_blocks, -(-length // self.size)))
            base = first * self.size
            blocks = self._blocks(host.table, np.full(len(columns), row), columns)
            pieces.append(
                Piece(
                    blocks=blocks,
                    run=ascending(blocks),
                    first=max(0, low - base),
                    end=min(len(columns) * self.size, length - base),
                )
            )
        hidden = None
        if n > 1:
            seen = self.near(np.arange(low, length), np.arange(length - n, length)[:, None])
            hidden = torch.from_numpy(~seen)
        return Row(first=int(host.starts[row]), queries=n, pieces=tuple(pieces), hidden=hidden)

    def _span(self, row: int, host: _Host) -> Span:
        queries, length = int(host.starts[row + 1] - host.starts[row]), int(host.lengths[row])
        low = int(self._low(length - queries))
        per_tile = self.tile // self.size
        columns = np.arange(low // self.tile * per_tile, -(-length // self.tile) * per_tile)
        blocks = self._blocks(host.table, np.full(len(columns), row), columns)
        return Span(
            first=int(host.starts[row]),
            queries=queries,
            length=length,
            low=low,
            begin=low // self.tile * self.tile,
            run=ascending(blocks),
            blocks=blocks,
        )


def ascending(blocks: torch.Tensor) -> int | None:
    """Return the first id where ids ascend one by one, else None."""
    ids = blocks.numpy()
    return int(ids[0]) if (np.diff(ids) == 1).all() else None
