"""attention.paged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from drivetrain.errors import DeviceError
from drivetrain.ops.cases.attention import attention_cases
from drivetrain.ops.reference.kinds import Cost, ReferenceOp, Tolerance, count_up, wide
from drivetrain_api.v1 import (
    AttentionBatch,
    AttentionSpec,
    AttentionTraits,
    BatchFacts,
    CacheHandle,
    dtype_bytes,
)

NEVER = float("-inf")
CHUNK_BYTES = 256 << 20
TILE_KEYS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows with the same number of query tokens, and the cache slots of what they may see.

    R rows of n queries each, L key places; tokens first .. first + R n - 1 of the step.
    """

    first: int
    rows: int
    queries: int
    slots: torch.Tensor  # [R, L]
    key_positions: torch.Tensor  # [R, L]; int
    lengths: torch.Tensor  # [R]
    positions: torch.Tensor  # [R, n]


class ReferenceAttention:
    """attention.paged/1, through ``CacheHandle.read``. The formula is in ``AttentionSpec``.

    Scores, softmax and sums are at least float32; the result is rounded to q's dtype once. Key places
    beyond a row's length, after the query (``causal``) or before its window count nothing, whatever the
    cache holds there, NaN included. A row's keys are gathered up to the largest host bound of the rows that
    are processed with it; rows are processed in chunks so that what is gathered stays below 256 MiB.
    """

    traits = AttentionTraits(lengths="host_bound", row_order="any", graph="never")

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.selected_keys or spec.latent or spec.cross:
            raise DeviceError(f"{spec.op} has no reference for selected keys, latent or cross attention yet")
        self._spec = spec

    def plan(self, batch: AttentionBatch) -> tuple[AttentionBatch, tuple[Chunk, ...]]:
        """Lay out chunks of rows."""
        return batch, tuple(self._chunk(batch, *run) for run in self._runs(batch))

    def write(
        self,
        cache: CacheHandle,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: tuple[AttentionBatch, tuple[Chunk, ...]],
    ) -> None:
        """Store k and v at the batch's slots."""
        cache.write(plan[0].slots_dev, (k, v))

    def forward(
        self,
        q: torch.Tensor,
        cache: CacheHandle,
        plan: tuple[AttentionBatch, tuple[Chunk, ...]],
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, H, D] -> [T, H, Dv]."""
        out = q.new_zeros((q.shape[0], self._spec.num_heads, self._spec.v_head_dim))
        for chunk in plan[1]:
            count = chunk.rows * chunk.queries
            piece = q[chunk.first : chunk.first + count].unflatten(0, (chunk.rows, chunk.queries))
            out[chunk.first : chunk.first + count] = self._attend(piece, cache, chunk, sinks).flatten(0, 1)
        return out

    def _runs(self, batch: AttentionBatch) -> Iterator[tuple[int, int]]:
        """Yield (first row, end row) of rows with equally many queries, cut by memory, without empty rows."""
        queries = batch.query_start_host[1:] - batch.query_start_host[:-1]
        spec = self._spec
        key_bytes = 4 * spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * 2
        first = 0
        while first < len(queries):
            end = first + 1
            longest = int(batch.length_bounds_host[first])
            while end < len(queries) and queries[end] == queries[first]:
                longest = max(longest, int(batch.length_bounds_host[end]))
                score_bytes = 4 * spec.num_heads * int(queries[first])
                if (end + 1 - first) * max(longest, 1) * max(key_bytes, score_bytes) > CHUNK_BYTES:
                    break
                end += 1
            bounds = batch.length_bounds_host[first:end]
            if queries[first] > 0 and bounds.max() > 0:
                yield first, end
            first = end

    def _chunk(self, batch: AttentionBatch, first: int, end: int) -> Chunk:
        size = self._spec.layout.block_tokens
        start = int(batch.query_start_host[first])
        queries = int(batch.query_start_host[first + 1]) - start
        rows = end - first
        lengths = batch.lengths_dev[first:end]
        table = batch.block_table_dev[first:end]
        blocks = -(-int(batch.length_bounds_host[first:end].max()) // size)
        begin = lengths.new_zeros(rows)
        if self._spec.window is not None:
            begin = (lengths - queries - self._spec.window + 1).clamp(min=0) // size
            blocks = min(blocks, (queries + self._spec.window - 1) // size + 2)
        columns = begin.unsqueeze(-1) + count_up(lengths, blocks)
        ids = table.gather(1, columns.clamp(max=table.shape[1] - 1).to(torch.int64))
        inside = count_up(lengths, size)
        positions = batch.positions_dev[start : start + rows * queries]
        return Chunk(
            first=start,
            rows=rows,
            queries=queries,
            slots=(ids.unsqueeze(-1) * size + inside).flatten(1),
            key_positions=(columns.unsqueeze(-1) * size + inside).flatten(1),
            lengths=lengths,
            positions=positions.unflatten(0, (rows, queries)),
        )

    def _attend(self, q: torch.Tensor, cache: CacheHandle, chunk: Chunk, sinks: torch.Tensor | None) -> torch.Tensor:
        """q [R, n, H, D] -> [R, n, H, Dv], in pieces of queries whose scores stay below the chunk's bytes."""
        rows, keys = chunk.slots.shape
        inside = chunk.key_positions < chunk.lengths.unsqueeze(-1)
        k, v = cache.read(torch.where(inside, chunk.slots, 0).flatten())
        k = _only(k.unflatten(0, (rows, keys)), inside).permute(0, 2, 3, 1)  # [R, K, D, L]
        v = _only(v.unflatten(0, (rows, keys)), inside).transpose(1, 2)  # [R, K, L, Dv]
        step = max(1, CHUNK_BYTES // (4 * rows * keys * self._spec.num_heads))
        pieces = [
            self._piece(piece, (k, v), sees(self._spec, chunk.key_positions, at, inside), sinks)
            for piece, at in zip(q.split(step, 1), chunk.positions.split(step, 1), strict=True)
        ]
        return torch.cat(pieces, 1)

    def _piece(
        self,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [R, n, H, D], seen [R, n, L] -> [R, n, H, Dv]."""
        spec, (k, v) = self._spec, kv
        count = q.shape[1]
        heads = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)
        folded = wide(q).unflatten(2, heads).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [R, K, G n, D]
        scores = capped(folded @ k * spec.scale, spec.soft_cap).unflatten(2, (heads[1], count))
        scores = scores.masked_fill(~seen[:, None, None], NEVER)  # [R, K, G, n, L]
        top = scores.amax(-1, keepdim=True)
        if sinks is not None:
            sink = wide(sinks).view(*heads, 1, 1)
            top = torch.maximum(top, sink)
        top = torch.where(top == NEVER, 0.0, top)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sink - top).exp()
        total = torch.where(total == 0, 1.0, total)
        out: torch.Tensor = (weights.flatten(2, 3) @ v).unflatten(2, (heads[1], count)) / total
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)


class InvariantAttention(ReferenceAttention):
    """The same, each query token alone: its keys in tiles of ``TILE_KEYS`` at fixed positions, taken in
    order by an online softmax. A token meets the same sums whatever the batch, the chunk and the host
    bounds are.
    """

    def _attend(self, q: torch.Tensor, cache: CacheHandle, chunk: Chunk, sinks: torch.Tensor | None) -> torch.Tensor:
        spec = self._spec
        element = 4 * TILE_KEYS * spec.num_heads * max(spec.head_dim, spec.v_head_dim)
        step = max(1, CHUNK_BYTES // (4 * element * chunk.rows))
        pieces = [
            self._tiles(piece, at, cache, chunk, sinks)
            for piece, at in zip(q.split(step, 1), chunk.positions.split(step, 1), strict=True)
        ]
        return torch.cat(pieces, 1)

    def _tiles(
        self,
        q: torch.Tensor,
        positions: torch.Tensor,
        cache: CacheHandle,
        chunk: Chunk,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [R, n, H, D], positions [R, n] -> [R, n, H, Dv]."""
        spec = self._spec
        heads = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)
        q32 = wide(q).unflatten(2, heads)
        top = q32.new_full((*q.shape[:2], *heads, 1), NEVER)
        if sinks is not None:
            top = wide(sinks).view(*heads, 1).expand_as(top)
        total = (top > NEVER).to(q32.dtype)
        sums = q32.new_zeros((*q.shape[:2], *heads, spec.v_head_dim))
        for places, seen in self._places(positions, chunk):
            k, v = cache.read(torch.where(seen, places, 0).flatten())
            keys = _only(k.unflatten(0, seen.shape), seen).permute(0, 1, 3, 2, 4).unsqueeze(3)
            values = _only(v.unflatten(0, seen.shape), seen).permute(0, 1, 3, 4, 2).unsqueeze(3)
            scores = capped((q32.unsqueeze(-2) * keys).sum(-1) * spec.scale, spec.soft_cap)
            scores = scores.masked_fill(~seen[:, :, None, None], NEVER)  # [R, n, K, G, tile]
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            safe = torch.where(higher == NEVER, 0.0, higher)
            weights, decay = (scores - safe).exp(), (top - safe).exp()
            total = total * decay + weights.sum(-1, keepdim=True)
            sums = sums * decay + (values * weights.unsqueeze(-2)).sum(-1)
            top = higher
        out: torch.Tensor = sums / torch.where(total == 0, 1.0, total)
        return out.flatten(2, 3).to(q.dtype)

    def _places(self, positions: torch.Tensor, chunk: Chunk) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, tile by tile, the slots [R, n, tile] of each query's keys and which of them it sees."""
        spec, keys = self._spec, chunk.slots.shape[1]
        begin = positions * 0
        count = -(-keys // TILE_KEYS) + 1
        if spec.window is not None:
            begin = (positions - spec.window + 1).clamp(min=0) // TILE_KEYS * TILE_KEYS
            if spec.causal:
                count = min(count, (spec.window - 1) // TILE_KEYS + 2)
        lengths = chunk.lengths[:, None, None]
        for tile in range(count):
            at = (begin + tile * TILE_KEYS).unsqueeze(-1) + count_up(positions, TILE_KEYS)
            column = at - chunk.key_positions[:, :1].unsqueeze(-1)
            inside = (at < lengths) & (column >= 0) & (column < keys)
            index = column.clamp(0, keys - 1).flatten(1).to(torch.int64)
            places = chunk.slots.gather(1, index).unflatten(1, at.shape[1:])
            yield places, inside & near(spec, at, positions.unsqueeze(-1))


def _only(values: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Return values [..., heads, size] widened, zero where ``inside`` [...] is False, NaN or not."""
    return wide(values).masked_fill(~inside[..., None, None], 0.0)


def capped(scores: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """Return soft_cap * tanh(scores / soft_cap), or the scores where there is no cap."""
    return scores if soft_cap is None else torch.tanh(scores / soft_cap) * soft_cap


def near(spec: AttentionSpec, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return where a key's position is allowed by causality and window for a query's position."""
    allowed = keys <= queries if spec.causal else keys >= 0
    return allowed if spec.window is None else allowed & (keys > queries - spec.window)


def sees(
    spec: AttentionSpec, key_positions: torch.Tensor, positions: torch.Tensor, inside: torch.Tensor
) -> torch.Tensor:
    """key_positions [R, L], positions [R, n], inside [R, L] -> bool [R, n, L]."""
    return inside.unsqueeze(1) & near(spec, key_positions.unsqueeze(1), positions.unsqueeze(-1))


def attention_tolerance(dtype: str) -> Tolerance:
    """An average of values of unit variance: the dtype's rounding of the result, float32 softmax inside."""
    rtol = {"float64": 1e-11, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    return Tolerance(rtol=rtol, atol=rtol)


def attention_cost(spec: AttentionSpec, facts: BatchFacts) -> Cost:
    """Each row's keys and values once, queries in, results out. Every row at the largest length."""
    keys = facts.max_length_bound if spec.window is None else min(facts.max_length_bound, spec.window)
    size = dtype_bytes(spec.dtype)
    per_key = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * size
    per_token = spec.num_heads * (spec.head_dim + spec.v_head_dim)
    return Cost(
        bytes=facts.num_rows * keys * per_key + facts.num_tokens * per_token * size,
        operations=2 * facts.num_tokens * keys * per_token,
    )


ATTENTION = ReferenceOp(
    op=AttentionSpec.op,
    make=ReferenceAttention,
    invariant=InvariantAttention,
    cases=attention_cases,
    tolerance=attention_tolerance,
    cost=attention_cost,
)
