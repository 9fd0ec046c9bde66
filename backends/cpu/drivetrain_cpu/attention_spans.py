"""Attention of a row's many queries over more keys than are widened at once: pieces of keys, joined softmax parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from drivetrain_api.v1 import AttentionSpec

from .attention_plan import Piece, Planner, Span, ascending
from .attention_tiles import Softmax, soften, with_sink

SPAN_BYTES = 8 << 20


def span_pieces(spec: AttentionSpec, block_tokens: int, span: Span) -> list[tuple[int, Piece]]:
    """Cut a span's blocks so that a piece's float32 keys and values stay below ``SPAN_BYTES``: (position of its first
    slot, piece)."""
    key_bytes = 4 * spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
    step = max(1, SPAN_BYTES // (key_bytes * block_tokens))
    if len(span.blocks) <= step:
        return [(span.begin, Piece(blocks=span.blocks, run=span.run, first=0, end=span.length - span.begin))]
    pieces = []
    for at in range(0, len(span.blocks), step):
        blocks, begin = span.blocks[at : at + step], span.begin + at * block_tokens
        end = min(len(blocks) * block_tokens, span.length - begin)
        if end > 0:
            pieces.append((begin, Piece(blocks=blocks, run=ascending(blocks), first=0, end=end)))
    return pieces


def query_blocks(queries: int, step: int) -> list[tuple[int, int]]:
    """Cut queries into runs of ``step``."""
    return [(first, min(first + step, queries)) for first in range(0, queries, step)]


def visible(spec: AttentionSpec, positions: tuple[int, int], begin: int, count: int) -> tuple[int, int]:
    """Return which of the keys ``begin`` .. begin + count - 1 some query at positions first .. end - 1 sees, counted
    from ``begin``; the second is not above the first where none is."""
    first, end = positions
    high = min(count, end - begin) if spec.causal else count
    low = 0 if spec.window is None else max(0, first - spec.window + 1 - begin)
    return low, high


def attend_pieces(
    spec: AttentionSpec,
    planner: Planner,
    folded: torch.Tensor,
    positions: tuple[int, int],
    pieces: Iterable[tuple[int, Piece]],
    gather: Callable[[Piece, int], torch.Tensor],
) -> Softmax:
    """folded [K, G n, D], scaled, of the queries at positions first .. end - 1 -> their softmax parts [K, G n, ..].
    ``gather``: a piece's keys (0) or values (1), [K, L, ..] float32."""
    at = torch.arange(*positions).unsqueeze(-1)
    state: Softmax | None = None
    for begin, piece in pieces:
        low, high = visible(spec, positions, begin, piece.end)
        if high <= low:
            continue
        scores = torch.bmm(folded, gather(piece, 0)[:, low:high].transpose(1, 2))
        hidden = (~planner.near(torch.arange(low, high) + begin, at)).repeat(spec.num_heads // spec.num_kv_heads, 1)
        weights, top, total = soften(spec, scores, hidden, True)
        found = top, total, torch.bmm(weights, gather(piece, 1)[:, low:high])
        state = found if state is None else join(state, found)
    assert state is not None, "a query sees its own key"
    return state


def join(one: Softmax, other: Softmax) -> Softmax:
    """Join the softmax parts of two sets of keys; a part that saw nothing has a maximum of -inf."""
    top = torch.maximum(one[0], other[0])
    safe = torch.where(top == float("-inf"), 0.0, top)
    mine, theirs = (one[0] - safe).exp(), (other[0] - safe).exp()
    return top, one[1] * mine + other[1] * theirs, one[2] * mine + other[2] * theirs


def finish(state: Softmax, sink: torch.Tensor | None) -> torch.Tensor:
    """Divide the weighted values by the sum, in which a sink [K, G] takes part: [K, G n, Dv]."""
    top, total, sums = state
    if sink is not None:
        total, sums = with_sink(
            top, total, sums, sink.repeat_interleave(total.shape[1] // sink.shape[1], 1).unsqueeze(-1)
        )
    return sums / total
