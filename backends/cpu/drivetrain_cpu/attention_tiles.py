"""Attention by tiles of keys at fixed positions; each tile gives a part of a softmax, joined in order of position.

A query meets the same products, of the same shapes, whether it comes alone, in a batch or in a prefill chunk: that is
what makes ``attend_tiles`` with one query an entry and ``attend_each_query`` equal bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch

from drivetrain_api.v1 import AttentionSpec

from .attention_plan import Planner, Span, TilePiece, Tiles

SCORE_BYTES = 8 << 20
NEVER = float("-inf")
Parts = tuple[torch.Tensor, ...]
Softmax = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # maximum, sum of weights, weighted sum of values


def attend_tiles(
    spec: AttentionSpec, q: torch.Tensor, parts: Parts, tiles: Tiles, sink: torch.Tensor | None
) -> torch.Tensor:
    """q [R * n, H, D] -> [R * n, H, Dv] float32. ``sink`` [K, G]."""
    n, kv = tiles.queries, spec.num_kv_heads
    groups = spec.num_heads // kv
    rows = groups * n
    folded = q.to(torch.float32) * spec.scale
    if n == 1:
        folded = folded.view(tiles.entries, kv, rows, spec.head_dim)
    else:
        split = folded.view(tiles.entries, n, kv, groups, spec.head_dim)
        folded = split.permute(0, 2, 3, 1, 4).reshape(tiles.entries, kv, rows, spec.head_dim)
    if not tiles.single:
        folded = folded[tiles.owner]
    pieces = [_piece(spec, folded, parts, tiles, piece) for piece in tiles.pieces]
    top, total, sums = (torch.cat(p) if len(p) > 1 else p[0] for p in zip(*pieces, strict=True))
    if not tiles.single:
        top, total, sums = combine(top, total, sums, tiles)
    if sink is not None:
        at = sink.view(1, kv, groups, 1).expand(-1, -1, -1, n).reshape(1, kv, rows, 1)
        total, sums = with_sink(top, total, sums, at)
    result = sums / total
    if n > 1:
        result = result.view(tiles.entries, kv, groups, n, spec.v_head_dim).permute(0, 3, 1, 2, 4)
    return result.reshape(tiles.entries * n, spec.num_heads, spec.v_head_dim)


def _piece(spec: AttentionSpec, folded: torch.Tensor, parts: Parts, tiles: Tiles, piece: TilePiece) -> Softmax:
    """folded [N, K, rows, D] -> the softmax parts of the piece's tiles."""
    q = folded[piece.first : piece.end]
    k = gather_tiles(parts[0], piece.blocks, tiles.size, None)
    v = gather_tiles(parts[1], piece.blocks, tiles.size, piece.outside)
    hidden = piece.hidden
    if hidden is not None and tiles.queries > 1:
        hidden = hidden.repeat(1, q.shape[2] // tiles.queries, 1, 1).flatten(1, 2).unsqueeze(1)
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(*q.shape[:3], tiles.size)
    weights, top, total = soften(spec, scores, hidden, piece.dead)
    sums = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1))
    return top, total, sums.view(*q.shape[:3], -1)


def gather_tiles(part: torch.Tensor, blocks: torch.Tensor, size: int, outside: torch.Tensor | None) -> torch.Tensor:
    """Return tiles [N, K, size, ..] float32 of the blocks, with zeros at the flat places ``outside``."""
    rows = part.index_select(0, blocks).flatten(0, 1)  # [N * size, K, ..]
    if outside is not None and len(outside):
        rows.index_fill_(0, outside, 0.0)
    tiles: torch.Tensor = rows.unflatten(0, (-1, size)).transpose(1, 2)
    return tiles.to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def soften(spec: AttentionSpec, scores: torch.Tensor, hidden: torch.Tensor | None, dead: bool) -> Softmax:
    """scores [N, K, rows, tile] -> weights of the same shape, their maximum and sum [N, K, rows, 1].

    ``dead``: some row may see nothing; its maximum is then -inf and its weights are 0.
    """
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    if hidden is not None:
        scores = scores.masked_fill_(hidden, NEVER)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - (torch.where(top == NEVER, 0.0, top) if dead else top)).exp_()
    return weights, top, weights.sum(-1, keepdim=True)


def combine(top: torch.Tensor, total: torch.Tensor, sums: torch.Tensor, tiles: Tiles) -> Softmax:
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


def attend_each_query(
    spec: AttentionSpec, planner: Planner, q: torch.Tensor, parts: Parts, span: Span, sink: torch.Tensor | None
) -> torch.Tensor:
    """q [n, H, D] -> [n, H, Dv] float32; every query meets the products that it would meet as a decode row."""
    kv, size = spec.num_kv_heads, planner.tile
    groups = spec.num_heads // kv
    places = torch.arange(len(span.blocks) * planner.size) + span.begin
    unseen = ((places >= span.length) | (places < span.low)).nonzero().flatten()
    k = gather_tiles(parts[0], span.blocks, size, None)
    v = gather_tiles(parts[1], span.blocks, size, unseen)
    out = q.new_empty((span.queries, spec.num_heads, spec.v_head_dim), dtype=torch.float32)
    base = span.length - span.queries
    step = max(1, SCORE_BYTES // (4 * spec.num_heads * max(spec.v_head_dim, size) * len(k)))
    for first in range(0, span.queries, step):
        end = min(first + step, span.queries)
        at = torch.arange(base + first, base + end).unsqueeze(-1)
        folded = (q[first:end].to(torch.float32) * spec.scale).view(end - first, kv, groups, -1)
        hidden = ~(planner.near(places, at) & (places < span.length))
        masks = hidden.split(size, -1)
        found = [_one_tile(spec, folded, k[tile], v[tile], part) for tile, part in enumerate(masks)]
        top = torch.stack([f[0] for f in found]).amax(0)
        total, sums = torch.zeros_like(top), torch.zeros((*top.shape[:-1], spec.v_head_dim))
        for tile_top, tile_total, tile_sums in found:
            decay = (tile_top - top).exp()
            total = total + tile_total * decay
            sums = sums + tile_sums * decay
        if sink is not None:
            total, sums = with_sink(top, total, sums, sink.view(1, kv, groups, 1))
        out[first:end] = (sums / total).flatten(1, 2)
    return out


def _one_tile(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> Softmax:
    """q [n, K, G, D], k and v [K, tile, ..], hidden [n, tile]: softmax parts of one tile for each query."""
    count, heads = len(q), range(k.shape[0])
    scores = torch.stack([torch.bmm(q[:, h], k[h].T.expand(count, -1, -1)) for h in heads], 1)
    weights, top, total = soften(spec, scores, hidden[:, None, None], True)
    sums = torch.stack([torch.bmm(weights[:, h], v[h].expand(count, -1, -1)) for h in heads], 1)
    return top, total, sums
