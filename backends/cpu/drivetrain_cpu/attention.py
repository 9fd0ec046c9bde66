"""attention.paged/1 on the host.

Rows with few queries are cut into tiles of ``TILE`` keys at fixed positions; the tiles of all rows form one batch of
products, so nothing is padded to the longest row and a step costs few calls. Rows with many queries (prefill) are
taken one by one, in blocks of queries that see only the keys they may. Grouped heads are folded into the rows of the
products. Keys and values are gathered from their blocks and widened to float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drivetrain_api.v1 import AttentionBatch, AttentionSpec, AttentionTraits, CacheHandle

TILE = 64
FEW_QUERIES = 8
SCRATCH_BYTES = 4 << 20
SCORE_BYTES = 8 << 20
NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Entries (R of them, n queries each) and their tiles (N in all, in order of entry, then position).

    ``tokens``: [R * n] where the entries' queries are in the step, or None where they are 0 .. R n - 1 in order.
    ``outside``: flat places [.. of N * tile] that are beyond the length or before the window.
    """

    entries: int
    queries: int
    tokens: torch.Tensor | None
    owner: torch.Tensor  # [N] the entry of each tile, ascending
    starts: np.ndarray  # [R] the first tile of each entry
    blocks: torch.Tensor  # [N * blocks a tile]
    outside: torch.Tensor
    hidden: torch.Tensor  # bool [N, n, tile], True where a query does not see a key
    single: bool  # one tile an entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One row with many queries: tokens first .. first + queries - 1 of the step, keys from ``begin`` on."""

    first: int
    queries: int
    length: int
    low: int  # first key position that any query sees
    begin: int  # first key position kept, a multiple of the tile
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """A step of one group."""

    block: torch.Tensor  # [T] where each token's own k and v go
    offset: torch.Tensor  # [T]
    tiles: tuple[Tiles, ...]
    spans: tuple[Span, ...]
    covered: bool  # every token of the step is in a tile or a span


class HostAttention:
    """One spec's ``PagedAttention``. ``invariant``: every query's sums are its own, whatever the batch and chunk."""

    traits = AttentionTraits(lengths="device", row_order="any", graph="never", workspace_bytes=SCORE_BYTES * 3)

    def __init__(self, spec: AttentionSpec, *, invariant: bool = False) -> None:
        self._spec, self._invariant = spec, invariant
        self._size = spec.layout.block_tokens
        self._tile = max(TILE, self._size)
        self._groups = spec.num_heads // spec.num_kv_heads

    def plan(self, batch: AttentionBatch) -> HostPlan:
        """Cut the batch into tiles and spans; lengths and tables are host memory here."""
        starts = batch.query_start_host
        queries = np.diff(starts)
        lengths = batch.lengths_dev.numpy()
        table = batch.block_table_dev.numpy()
        used = (queries > 0) & (lengths > 0)
        few = used & (queries <= FEW_QUERIES)
        tiles = []
        for n in np.unique(queries[few]):
            rows = np.flatnonzero(few & (queries == n))
            tiles.append(self._tiles(rows, int(n), starts, lengths, table))
        spans = [self._span(int(row), starts, lengths, table) for row in np.flatnonzero(used & (queries > FEW_QUERIES))]
        slots = batch.slots_dev
        return HostPlan(
            block=slots // self._size,
            offset=slots % self._size,
            tiles=tuple(tiles),
            spans=tuple(spans),
            covered=bool(used[queries > 0].all()),
        )

    def write(self, cache: CacheHandle, k: torch.Tensor, v: torch.Tensor, plan: HostPlan) -> None:
        """Store k and v at the plan's slots."""
        parts = _parts(cache)
        parts[0][plan.block, plan.offset] = k
        parts[1][plan.block, plan.offset] = v

    def forward(
        self, q: torch.Tensor, cache: CacheHandle, plan: HostPlan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q [T, H, D] -> [T, H, Dv]."""
        spec = self._spec
        shape = (q.shape[0], spec.num_heads, spec.v_head_dim)
        out = q.new_empty(shape) if plan.covered else q.new_zeros(shape)
        sink = None if sinks is None else sinks.to(torch.float32).view(spec.num_kv_heads, self._groups)
        for tiles in plan.tiles:
            picked = q[: tiles.entries * tiles.queries] if tiles.tokens is None else q[tiles.tokens]
            result = self._few(picked, _parts(cache), tiles, sink)
            if tiles.tokens is None:
                out[: len(result)] = result
            else:
                out[tiles.tokens] = result.to(out.dtype)
        for span in plan.spans:
            piece = slice(span.first, span.first + span.queries)
            run = self._each_query if self._invariant else self._many
            out[piece] = run(q[piece], _parts(cache), span, sink)
        return out

    # Planning.

    def _tiles(self, rows: np.ndarray, n: int, starts: np.ndarray, lengths: np.ndarray, table: np.ndarray) -> Tiles:
        """Lay out the tiles of rows with n queries each; in invariant mode each query becomes an entry."""
        first = starts[rows].astype(np.int64)
        ends = lengths[rows].astype(np.int64)
        if self._invariant and n > 1:
            offset = np.arange(n)
            first = (first[:, None] + offset).ravel()
            ends = (ends[:, None] - n + 1 + offset).ravel() if self._spec.causal else np.repeat(ends, n)
            positions = (lengths[rows].astype(np.int64)[:, None] - n + offset).reshape(-1, 1)
            rows, n = np.repeat(rows, n), 1
        else:
            positions = ends[:, None] - n + np.arange(n)
        low = np.zeros(len(rows), np.int64)
        if self._spec.window is not None:
            low = np.maximum(positions[:, 0] - self._spec.window + 1, 0)
        begin, count = low // self._tile, -(-ends // self._tile) - low // self._tile
        owner = np.repeat(np.arange(len(rows)), count)
        ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        tile = begin[owner] + ordinal
        keys = tile[:, None] * self._tile + np.arange(self._tile)
        inside = (keys < ends[owner, None]) & (keys >= low[owner, None])
        seen = inside[:, None, :] & self._near(keys[:, None, :], positions[owner][:, :, None])
        tokens = (first[:, None] + np.arange(n)).ravel()
        whole = bool((tokens == np.arange(len(tokens))).all())
        return Tiles(
            entries=len(rows),
            queries=n,
            tokens=None if whole else torch.from_numpy(tokens),
            owner=torch.from_numpy(owner),
            starts=np.cumsum(count) - count,
            blocks=torch.from_numpy(self._blocks(table, rows[owner], tile)),
            outside=torch.from_numpy(np.flatnonzero(~inside.ravel())),
            hidden=torch.from_numpy(~seen),
            single=bool((count == 1).all()),
        )

    def _span(self, row: int, starts: np.ndarray, lengths: np.ndarray, table: np.ndarray) -> Span:
        queries, length = int(starts[row + 1] - starts[row]), int(lengths[row])
        low = 0 if self._spec.window is None else max(0, length - queries - self._spec.window + 1)
        tiles = np.arange(low // self._tile, -(-length // self._tile))
        return Span(
            first=int(starts[row]),
            queries=queries,
            length=length,
            low=low,
            begin=low // self._tile * self._tile,
            blocks=torch.from_numpy(self._blocks(table, np.full(len(tiles), row), tiles)),
        )

    def _blocks(self, table: np.ndarray, rows: np.ndarray, tiles: np.ndarray) -> np.ndarray:
        """Return the block ids of tiles, flat; places beyond the table are block 0."""
        per_tile = self._tile // self._size
        columns = tiles[:, None] * per_tile + np.arange(per_tile)
        ids = table[rows[:, None], np.minimum(columns, table.shape[1] - 1)]
        flat: np.ndarray = np.where(columns < table.shape[1], ids, 0).ravel().astype(np.int64)
        return flat

    def _near(self, keys: Any, queries: Any) -> Any:
        """Say where causality and the window let a query see a key, both given by position."""
        allowed = keys <= queries if self._spec.causal else (keys >= 0) & (queries >= 0)
        return allowed if self._spec.window is None else allowed & (keys > queries - self._spec.window)

    # Few queries: one batch of tiles.

    def _few(
        self, q: torch.Tensor, parts: tuple[torch.Tensor, ...], tiles: Tiles, sink: torch.Tensor | None
    ) -> torch.Tensor:
        """q [R * n, H, D] -> [R * n, H, Dv] float32."""
        spec, n = self._spec, tiles.queries
        kv, rows = spec.num_kv_heads, self._groups * n
        folded = q.to(torch.float32) * spec.scale
        if n == 1:
            folded = folded.view(tiles.entries, kv, rows, spec.head_dim)
        else:
            folded = folded.view(tiles.entries, n, kv, self._groups, spec.head_dim).permute(0, 2, 3, 1, 4)
            folded = folded.reshape(tiles.entries, kv, rows, spec.head_dim)
        if not tiles.single:
            folded = folded[tiles.owner]
        pieces = self._pieces(folded, parts, tiles)
        top, total, sums = (torch.cat(p) if len(p) > 1 else p[0] for p in zip(*pieces, strict=True))
        if not tiles.single:
            top, total, sums = combine(top, total, sums, tiles)
        if sink is not None:
            at = sink.view(1, kv, self._groups, 1).expand(-1, -1, -1, n).reshape(1, kv, rows, 1)
            total, sums = with_sink(top, total, sums, at)
        result = sums / total
        if n > 1:
            result = result.view(tiles.entries, kv, self._groups, n, spec.v_head_dim).permute(0, 3, 1, 2, 4)
        return result.reshape(tiles.entries * n, spec.num_heads, spec.v_head_dim)

    def _pieces(
        self, folded: torch.Tensor, parts: tuple[torch.Tensor, ...], tiles: Tiles
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """folded [N, K, rows, D] -> per piece of tiles: top, total [.., K, rows, 1] and sums [.., K, rows, Dv]."""
        spec, per_tile = self._spec, self._tile // self._size
        count = len(tiles.owner)
        step = max(1, SCRATCH_BYTES // (4 * self._tile * spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)))
        done = []
        for first in range(0, count, step):
            end = min(first + step, count)
            blocks = tiles.blocks[first * per_tile : end * per_tile]
            outside = tiles.outside
            if step < count:
                outside = outside[(outside >= first * self._tile) & (outside < end * self._tile)] - first * self._tile
            k = self._gather(parts[0], blocks, None)
            v = self._gather(parts[1], blocks, outside)
            done.append(self._products(folded[first:end], k, v, tiles.hidden[first:end]))
        return done

    def _gather(self, part: torch.Tensor, blocks: torch.Tensor, outside: torch.Tensor | None) -> torch.Tensor:
        """Return tiles [N, K, tile, size] float32 of the blocks, with zeros at the flat places ``outside``."""
        rows = part.index_select(0, blocks).view(-1, *part.shape[2:])  # [N * tile, K, size]
        if outside is not None and len(outside):
            rows.index_fill_(0, outside, 0.0)
        tiles = rows.view(-1, self._tile, *part.shape[2:]).transpose(1, 2)
        return tiles.to(torch.float32, memory_format=torch.contiguous_format).contiguous()

    def _products(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [N, K, rows, D], k and v [N, K, tile, ..], hidden [N, n, tile]: softmax parts of each tile."""
        count, kv, rows = q.shape[:3]
        scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(count, kv, rows, self._tile)
        if self._spec.soft_cap is not None:
            scores = torch.tanh(scores / self._spec.soft_cap) * self._spec.soft_cap
        hidden = hidden.unsqueeze(1)
        if rows != hidden.shape[2] and hidden.shape[2] > 1:
            hidden = hidden.unsqueeze(2).expand(-1, -1, self._groups, -1, -1).flatten(2, 3)
        scores = scores.masked_fill(hidden, NEVER)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - torch.where(top == NEVER, 0.0, top)).exp_()
        total = weights.sum(-1, keepdim=True)
        sums = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).view(count, kv, rows, -1)
        return top, total, sums

    # Many queries: one row at a time.

    def _whole(self, parts: tuple[torch.Tensor, ...], span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a span's keys and values [K, L, ..] float32, zeros outside the length."""
        found = []
        for part in parts:
            rows = part.index_select(0, span.blocks).flatten(0, 1)[: span.length - span.begin]
            found.append(rows.transpose(0, 1).to(torch.float32).contiguous())
        return found[0], found[1]

    def _many(
        self, q: torch.Tensor, parts: tuple[torch.Tensor, ...], span: Span, sink: torch.Tensor | None
    ) -> torch.Tensor:
        """q [n, H, D] -> [n, H, Dv] float32: blocks of queries, each against the keys it may see."""
        spec, kv, groups = self._spec, self._spec.num_kv_heads, self._groups
        k, v = self._whole(parts, span)
        out = q.new_empty((span.queries, spec.num_heads, spec.v_head_dim), dtype=torch.float32)
        step = max(16, min(256, SCORE_BYTES // (4 * spec.num_heads * k.shape[1])))
        base = span.length - span.queries
        for first in range(0, span.queries, step):
            end = min(first + step, span.queries)
            high = base + end - span.begin if spec.causal else k.shape[1]
            low = 0 if spec.window is None else max(0, base + first - spec.window + 1 - span.begin)
            folded = (q[first:end].to(torch.float32) * spec.scale).view(end - first, kv, groups, -1)
            folded = folded.permute(1, 2, 0, 3).reshape(kv, groups * (end - first), -1)
            scores = torch.bmm(folded, k[:, low:high].transpose(1, 2))
            if spec.soft_cap is not None:
                scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
            at = torch.arange(low, high) + span.begin
            hidden = ~self._near(at, torch.arange(base + first, base + end).unsqueeze(-1))
            scores = scores.view(kv, groups, end - first, high - low).masked_fill_(hidden, NEVER)
            weights = softmax(scores, sink)
            sums = torch.bmm(weights.flatten(1, 2), v[:, low:high])
            out[first:end] = sums.view(kv, groups, end - first, -1).permute(2, 0, 1, 3).flatten(1, 2)
        return out

    def _each_query(
        self, q: torch.Tensor, parts: tuple[torch.Tensor, ...], span: Span, sink: torch.Tensor | None
    ) -> torch.Tensor:
        """As ``_many``; every query meets the products that it would meet as a decode row."""
        spec, kv, groups = self._spec, self._spec.num_kv_heads, self._groups
        empty = torch.zeros(0, dtype=torch.int64)
        places = torch.arange(len(span.blocks) * self._size) + span.begin
        beyond = ((places >= span.length) | (places < span.low)).nonzero().flatten()
        k, v = self._gather(parts[0], span.blocks, empty), self._gather(parts[1], span.blocks, beyond)
        out = q.new_empty((span.queries, spec.num_heads, spec.v_head_dim), dtype=torch.float32)
        base, count = span.length - span.queries, len(k)
        step = max(1, SCORE_BYTES // (4 * spec.num_heads * max(spec.v_head_dim, self._tile) * count))
        for first in range(0, span.queries, step):
            end = min(first + step, span.queries)
            at = torch.arange(base + first, base + end)
            folded = (q[first:end].to(torch.float32) * spec.scale).view(end - first, kv, groups, -1)
            hidden = ~(self._near(places, at.unsqueeze(-1)) & (places < span.length))
            found = [
                self._one_tile(folded, k[tile], v[tile], part) for tile, part in enumerate(hidden.split(self._tile, -1))
            ]
            top = torch.stack([f[0] for f in found]).amax(0)
            total = torch.zeros_like(top)
            sums = torch.zeros((*top.shape[:-1], spec.v_head_dim))
            for tile_top, tile_total, tile_sums in found:
                decay = (tile_top - top).exp()
                total = total + tile_total * decay
                sums = sums + tile_sums * decay
            if sink is not None:
                total, sums = with_sink(top, total, sums, sink.view(1, kv, groups, 1))
            out[first:end] = (sums / total).flatten(1, 2)
        return out

    def _one_tile(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [n, K, G, D], k and v [K, tile, ..], hidden [n, tile]: softmax parts of one tile for each query."""
        count = len(q)
        heads = range(k.shape[0])
        scores = torch.stack([torch.bmm(q[:, h], k[h].T.expand(count, -1, -1)) for h in heads], 1)
        if self._spec.soft_cap is not None:
            scores = torch.tanh(scores / self._spec.soft_cap) * self._spec.soft_cap
        scores = scores.masked_fill(hidden[:, None, None], NEVER)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - torch.where(top == NEVER, 0.0, top)).exp_()
        total = weights.sum(-1, keepdim=True)
        sums = torch.stack([torch.bmm(weights[:, h], v[h].expand(count, -1, -1)) for h in heads], 1)
        return top, total, sums


def _parts(cache: CacheHandle) -> tuple[torch.Tensor, ...]:
    """Return a cache's tensors [num_blocks, slots, heads, size], as this backend's storage makes them."""
    parts: tuple[torch.Tensor, ...] | None = getattr(cache, "parts", None)
    if parts is None:
        raise TypeError(f"{type(cache).__name__} was not made by this backend's storage")
    return parts


def combine(
    top: torch.Tensor, total: torch.Tensor, sums: torch.Tensor, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Join the softmax parts of tiles [N, ..] into those of their entries [R, ..], tile by tile in order."""
    owner, entries = tiles.owner, tiles.entries
    best = torch.from_numpy(np.maximum.reduceat(top.numpy(), tiles.starts, axis=0))
    decay = (top - best[owner]).exp()
    totals = total.new_zeros((entries, *total.shape[1:])).index_add_(0, owner, total * decay)
    return best, totals, sums.new_zeros((entries, *sums.shape[1:])).index_add_(0, owner, sums * decay)


def with_sink(
    top: torch.Tensor, total: torch.Tensor, sums: torch.Tensor, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a sink's logit to the denominator; returns total and sums relative to the new maximum."""
    best = torch.maximum(top, sink)
    decay = (top - best).exp()
    return total * decay + (sink - best).exp(), sums * decay


def softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Softmax of [K, G, n, L] over L, with a sink [K, G] in the denominator where there is one."""
    if sink is None:
        return scores.softmax(-1)
    column = sink[:, :, None, None].expand(-1, -1, scores.shape[2], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]
