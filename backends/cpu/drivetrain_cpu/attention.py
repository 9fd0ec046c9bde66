"""attention.paged/1 on the host.

Grouped heads are folded into the rows of the products; keys and values are gathered from their blocks and widened to
float32. No row is padded to another's length:

- few queries: each by itself through the wheel's compiled kernel, which reads the blocks where they are;
- without that kernel, many short rows of few queries: tiles of keys at fixed positions, all rows in one batch of
  products; other rows of few queries: one by one, in pieces that stay in the cache;
- many queries (prefill): row by row, in blocks of queries that see only the keys they may.

In invariant mode every query goes by tiles, so that it meets the same sums in any batch and any chunk.
"""

from __future__ import annotations

from functools import partial

import torch

from drivetrain_api.v1 import AttentionBatch, AttentionSpec, AttentionTraits, CacheHandle

from .attention_plan import HostPlan, Piece, Planner, Row, Span
from .attention_spans import SPAN_BYTES, attend_pieces, finish, query_blocks, span_pieces, visible
from .attention_tiles import attend_each_query, attend_tiles
from .native import AttentionJob, Kernels
from .threads import Threads

SCORE_BYTES = 8 << 20
NEVER = float("-inf")
Parts = tuple[torch.Tensor, ...]


class HostAttention:
    """One spec's ``PagedAttention``. ``invariant``: every query's sums are its own, whatever the batch and chunk."""

    traits = AttentionTraits(
        lengths="device", row_order="any", graph="never", workspace_bytes=SCORE_BYTES * 3 + SPAN_BYTES
    )

    def __init__(
        self, spec: AttentionSpec, threads: Threads, kernels: Kernels | None, *, invariant: bool = False, level: int = 0
    ) -> None:
        """``level``: a place in the library's levels."""
        self._spec, self._threads, self._kernels, self._level = spec, threads, kernels, level
        self._planner = Planner(spec, invariant=invariant, compiled=kernels is not None)
        self._groups = spec.num_heads // spec.num_kv_heads
        self._span = partial(attend_each_query, spec, self._planner) if invariant else self._many

    def plan(self, batch: AttentionBatch) -> HostPlan:
        """Cut the batch up; lengths and tables are host memory here."""
        return self._planner.plan(batch)

    def write(self, cache: CacheHandle, k: torch.Tensor, v: torch.Tensor, plan: HostPlan) -> None:
        """Store k and v at the plan's slots."""
        parts = _parts(cache)
        place = plan.place
        if isinstance(place[0], int):
            parts[0][place].copy_(k[0])
            parts[1][place].copy_(v[0])
            return
        parts[0][place] = k.to(parts[0].dtype)
        parts[1][place] = v.to(parts[1].dtype)

    def forward(
        self, q: torch.Tensor, cache: CacheHandle, plan: HostPlan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q [T, H, D] -> [T, H, Dv]."""
        if not plan.seconds:
            return self._forward(q, _parts(cache), plan, sinks)
        self._threads.take(plan.seconds)
        try:
            return self._forward(q, _parts(cache), plan, sinks)
        finally:
            self._threads.give_back()

    def _forward(self, q: torch.Tensor, parts: Parts, plan: HostPlan, sinks: torch.Tensor | None) -> torch.Tensor:
        spec = self._spec
        shape = (q.shape[0], spec.num_heads, spec.v_head_dim)
        out = torch.empty(shape, dtype=torch.float32) if plan.covered else torch.zeros(shape, dtype=torch.float32)
        if plan.entries is not None:
            self._alone(q, parts, plan.entries.job, sinks, out)
        sink = sinks_of(spec, sinks)
        for tiles in plan.tiles:
            count = tiles.entries * tiles.queries
            result = attend_tiles(spec, q[:count] if tiles.tokens is None else q[tiles.tokens], parts, tiles, sink)
            if tiles.tokens is None:
                out[:count] = result
            else:
                out[tiles.tokens] = result
        for row in plan.rows:
            piece = slice(row.first, row.first + row.queries)
            out[piece] = self._row(q[piece], parts, row, sink)
        for span in plan.spans:
            piece = slice(span.first, span.first + span.queries)
            out[piece] = self._span(q[piece], parts, span, sink)
        return out if q.dtype == torch.float32 else out.to(q.dtype)

    def _alone(
        self, q: torch.Tensor, parts: Parts, job: AttentionJob, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Single queries through the compiled kernel. q [T, H, D], out [T, H, Dv]."""
        assert self._kernels is not None
        wide = q if q.dtype == torch.float32 else q.to(torch.float32)
        if wide.stride(2) != 1 or wide.stride(1) != wide.shape[2]:
            wide = wide.contiguous()
        sink = None if sinks is None else sinks.to(torch.float32).contiguous()
        k, v = parts
        job.q, job.k, job.v, job.out = wide.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        job.sinks = None if sink is None else sink.data_ptr()
        job.q_stride, job.half = wide.stride(0), k.dtype == torch.bfloat16
        job.k_block, job.k_slot, job.k_head, _ = k.stride()
        job.v_block, job.v_slot, job.v_head, _ = v.stride()
        self._kernels.attend(job, self._level, self._threads.count)

    def _fold(self, q: torch.Tensor) -> torch.Tensor:
        """q [n, H, D] -> [K, G n, D] float32, scaled."""
        spec, n = self._spec, q.shape[0]
        scaled = q * spec.scale if q.dtype == torch.float32 else q.to(torch.float32) * spec.scale
        if n == 1:
            return scaled.view(spec.num_kv_heads, self._groups, spec.head_dim)
        split = scaled.view(n, spec.num_kv_heads, self._groups, spec.head_dim)
        return split.permute(1, 2, 0, 3).reshape(spec.num_kv_heads, self._groups * n, spec.head_dim)

    def _weights(self, scores: torch.Tensor, hidden: torch.Tensor | None, sink: torch.Tensor | None) -> torch.Tensor:
        """scores [K, G n, L], hidden [n, L] -> softmax over L."""
        cap = self._spec.soft_cap
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        if hidden is not None:
            shape = (scores.shape[0], self._groups, *hidden.shape)
            scores.view(shape).masked_fill_(hidden, NEVER)
        if sink is None:
            return scores.softmax(-1)
        column = sink.repeat_interleave(scores.shape[1] // self._groups, 1).unsqueeze(-1)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1]

    def _unfold(self, sums: torch.Tensor, n: int) -> torch.Tensor:
        """[K, G n, Dv] -> [n, H, Dv]."""
        if n == 1:
            return sums.view(1, self._spec.num_heads, -1)
        return sums.view(self._spec.num_kv_heads, self._groups, n, -1).permute(2, 0, 1, 3).flatten(1, 2)

    def _row(self, q: torch.Tensor, parts: Parts, row: Row, sink: torch.Tensor | None) -> torch.Tensor:
        """q [n, H, D] -> [n, H, Dv] float32, piece by piece of the row's keys, then of its values."""
        folded, pieces = self._fold(q), row.pieces
        found = [torch.bmm(folded, gather(parts[0], p).transpose(1, 2)) for p in pieces]
        scores = found[0] if len(found) == 1 else torch.cat(found, -1)
        weights = self._weights(scores, row.hidden, sink)
        if len(pieces) == 1:
            sums = torch.bmm(weights, gather(parts[1], pieces[0]))
            return self._unfold(sums, row.queries)
        at = 0
        sums = weights.new_zeros((*weights.shape[:2], self._spec.v_head_dim))
        for p in pieces:
            values = gather(parts[1], p)
            sums.baddbmm_(weights[..., at : at + p.end - p.first], values)
            at += p.end - p.first
        return self._unfold(sums, row.queries)

    def _many(self, q: torch.Tensor, parts: Parts, span: Span, sink: torch.Tensor | None) -> torch.Tensor:
        """q [n, H, D] -> [n, H, Dv] float32: blocks of queries, each against the keys it may see, widened at once where
        they are few enough, else in pieces."""
        spec = self._spec
        pieces = span_pieces(spec, self._planner.size, span)
        out = torch.empty((span.queries, spec.num_heads, spec.v_head_dim), dtype=torch.float32)
        step = max(16, min(256, SCORE_BYTES // (4 * spec.num_heads * pieces[0][1].end)))
        blocks, base = query_blocks(span.queries, step), span.length - span.queries
        if len(pieces) > 1:
            for first, end in blocks:
                places = (base + first, base + end)
                state = attend_pieces(
                    spec,
                    self._planner,
                    self._fold(q[first:end]),
                    places,
                    pieces,
                    lambda piece, n: gather(parts[n], piece),
                )
                out[first:end] = self._unfold(finish(state, sink), end - first)
            return out
        k, v = (gather(part, pieces[0][1]) for part in parts)
        for first, end in blocks:
            low, high = visible(spec, (base + first, base + end), span.begin, k.shape[1])
            scores = torch.bmm(self._fold(q[first:end]), k[:, low:high].transpose(1, 2))
            keys = torch.arange(low, high) + span.begin
            hidden = ~self._planner.near(keys, torch.arange(base + first, base + end).unsqueeze(-1))
            weights = self._weights(scores, hidden, sink)
            out[first:end] = self._unfold(torch.bmm(weights, v[:, low:high]), end - first)
        return out


def sinks_of(spec: AttentionSpec, sinks: torch.Tensor | None) -> torch.Tensor | None:
    """sinks [H] -> [K, G] float32."""
    return None if sinks is None else sinks.to(torch.float32).view(spec.num_kv_heads, -1)


def gather(part: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the piece's slots as [K, L, size] float32, laid out slot by slot."""
    if piece.run is None:
        blocks = part.index_select(0, piece.blocks)
    else:
        blocks = part[piece.run : piece.run + len(piece.blocks)]
    wide = blocks if blocks.dtype == torch.float32 else blocks.to(torch.float32)
    return wide.flatten(0, 1)[piece.first : piece.end].transpose(0, 1)


def _parts(cache: CacheHandle) -> Parts:
    """Return a cache's tensors [num_blocks, slots, heads, size], as this backend's storage makes them."""
    parts: Parts | None = getattr(cache, "parts", None)
    if parts is None:
        raise TypeError(f"{type(cache).__name__} was not made by this backend's storage")
    return parts
