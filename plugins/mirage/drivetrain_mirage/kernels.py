"""The device's own kernels: small torch bodies over buffers, run by a stream. They may look at values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.nn import functional

from drivetrain_api.v1 import AttentionSpec, RmsNormSpec

from .arenas import Arenas

TILE_ROWS = 16


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One product for all rows."""
    return functional.linear(x, weight, bias)


def tiled_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Products of ``TILE_ROWS`` rows each, so that a row's result does not depend on the others."""
    rows = x.shape[0]
    tiles = functional.pad(x, (0, 0, 0, -rows % TILE_ROWS)).split(TILE_ROWS)
    return torch.cat([functional.linear(tile, weight, bias) for tile in tiles])[:rows]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, spec: RmsNormSpec) -> torch.Tensor:
    """norm.rms/1 in one piece."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + spec.eps)
    if spec.round_before_weight:
        scale = weight + spec.offset if spec.offset else weight
        return normed.to(x.dtype) * scale
    scale = weight.to(torch.float32) + spec.offset if spec.offset else weight.to(torch.float32)
    return (normed * scale).to(x.dtype)


class AttentionKernel:
    """attention.paged/1 over one layer's arenas, row by row; with ``alone``, query by query, so that a token's
    result depends on its own position and keys only."""

    def __init__(self, spec: AttentionSpec, alone: bool) -> None:
        self._spec = spec
        self._alone = alone

    def __call__(
        self,
        q: torch.Tensor,
        arenas: Arenas,
        step: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [T, H, D]; step: query_start [B + 1], lengths [B], block table [B, W], positions [T]."""
        query_start, lengths, table, positions = step
        out = q.new_zeros((q.shape[0], self._spec.num_heads, self._spec.v_head_dim))
        for b, first, end in self._runs(query_start):
            length = int(lengths[b])
            if length:
                out[first:end] = self._row(q[first:end], arenas, (table[b], length), positions[first:end], sinks)
        return out

    def _runs(self, query_start: torch.Tensor) -> Iterator[tuple[int, int, int]]:
        for b, (first, end) in enumerate(pairwise(query_start.tolist())):
            if self._alone:
                yield from ((b, t, t + 1) for t in range(first, end))
            elif end > first:
                yield b, first, end

    def _row(
        self,
        q: torch.Tensor,
        arenas: Arenas,
        blocks: tuple[torch.Tensor, int],
        positions: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [n, H, D], positions [n] -> [n, H, Dv]."""
        spec, (table, length) = self._spec, blocks
        low, high = int(positions.min()), int(positions.max())
        first = 0 if spec.window is None else max(0, low - spec.window + 1)
        end = min(length, high + 1) if spec.causal else length
        arenas.there(table[first // arenas[0].shape[2] : -(-end // arenas[0].shape[2])])
        k, v = (_keys(arena, table, first, end).to(torch.float32) for arena in arenas)
        groups, count = spec.num_heads // spec.num_kv_heads, q.shape[0]
        folded = q.to(torch.float32).unflatten(1, (spec.num_kv_heads, groups)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = folded @ k.transpose(1, 2) * spec.scale  # [K, G n, L]
        if spec.soft_cap is not None:
            scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        scores = scores.unflatten(1, (groups, count)).masked_fill(~_sees(spec, first, end, positions), float("-inf"))
        if sinks is not None:
            column = sinks.to(torch.float32).view(spec.num_kv_heads, groups, 1, 1).expand(-1, -1, count, 1)
            scores = torch.cat((scores, column), -1)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., : end - first].flatten(1, 2)
        out: torch.Tensor = (weights @ v).unflatten(1, (groups, count)).permute(2, 0, 1, 3).flatten(1, 2)
        return out.to(q.dtype)


def _keys(arena: torch.Tensor, table: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Return positions first .. end - 1 of a row, [heads, end - first, size]."""
    size = arena.shape[2]
    begin = first // size
    blocks = arena[table[begin : -(-end // size)]]  # [n, heads, slot, size]
    return blocks.transpose(0, 1).flatten(1, 2)[:, first - begin * size : end - begin * size]


def _sees(spec: AttentionSpec, first: int, end: int, positions: torch.Tensor) -> torch.Tensor:
    """Return bool [n, end - first]."""
    keys = torch.arange(first, end, dtype=positions.dtype)
    at = positions.unsqueeze(1)
    seen = keys <= at if spec.causal else torch.ones_like(keys <= at)
    return seen if spec.window is None else seen & (keys > at - spec.window)
