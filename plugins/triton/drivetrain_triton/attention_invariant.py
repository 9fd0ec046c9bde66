"""Paged attention of which a query's bits depend on its own row alone: not on other rows, on the chunk it is computed
in, on where keys are cut into shares.

One kernel serves decode rows and prompts, with tiles by the spec alone, so that the matrix instructions are the same.
Keys are cut into ranges of ``RANGE`` positions from position 0. A range is summed from nothing, and ranges are joined
in order by ``joined``: in registers where a program walks all of a row's ranges, by a second kernel where several
programs share them. Keys that a query does not see, but others of its tile do, change nothing: their weights are
exactly 0, and what they multiply by exactly 1.
"""

from __future__ import annotations

import torch
import triton
from triton import language as tl

from drivetrain_api.v1 import AttentionBatch, AttentionSpec, CacheHandle, Decline, OpTraits, Provided

from .attention import WORKSPACE, Part, Plan, TritonAttention, cache_strides
from .attention_choice import MAX_SPLITS, Tiles, fitted, padded, power_of_two, refusal
from .attention_prefill import row_of_tile, sum_tiles
from .attention_tiles import LOG2E, NEVER, nothing_yet
from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier
from .target import Target

RANGE = 512  # positions
PROGRAMS = 2  # wanted a multiprocessor, before a program takes several ranges
LABEL = "shared: Triton, batch-invariant, ranges of keys joined in order"


@triton.jit
def joined(acc, total, top, more, more_total, more_top):
    """acc [M, DV], total [M] and top [M] over some keys, and the same over later ones -> over both.

    Fused operations are written out: a compiler has no choice of roundings.
    """
    higher = tl.maximum(top, more_top)
    level = tl.where(higher == NEVER, 0.0, higher)
    decay, weight = tl.exp2(top - level), tl.exp2(more_top - level)
    acc = tl.fma(acc, tl.broadcast_to(decay[:, None], acc.shape), more * weight[:, None])
    return acc, tl.fma(total, decay, more_total * weight), higher


@triton.jit
def finished(acc, total, top, sinks, heads, wanted, SINKS: tl.constexpr):
    """Weighted means [M, DV]; zeros of no key. A sink joins last."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=wanted, other=0.0).to(tl.float32) * LOG2E
        level = tl.maximum(top, sink)
        decay = tl.exp2(top - level)
        total = tl.fma(total, decay, tl.exp2(sink - level))
        acc = acc * decay[:, None]
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def keys_seen(low, high, length, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """The first key that a query at positions low .. high sees, and the end of them."""
    first = tl.maximum(low - WINDOW + 1, 0) if WINDOW else length * 0
    return first, tl.minimum(tl.maximum(high + 1, 0), length) if CAUSAL else length


@kernel
@triton.jit(
    do_not_specialize=["rows", "tiles", "most", "taken", "table_stride"],
    do_not_specialize_on_alignment=["query_start", "lengths", "tables"],
)
def invariant_kernel(
    out, sums, marks, q, keys, values, query_start, lengths, tables, sinks, rows, tiles, most, taken, table_stride,
    q_stride, key_stride, value_stride, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_HEAD: tl.constexpr,
    VALUE_TOKEN: tl.constexpr, VALUE_HEAD: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    SOFT_CAPPED: tl.constexpr, SINKS: tl.constexpr, DIRECT: tl.constexpr, RANGE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV heads, pieces): BLOCK_Q query tokens times the GROUP heads of one KV head, BLOCK_M rows of a dot.

    DIRECT: all ranges of the tile, and out [tokens, HEADS, DV]. Else ``taken`` ranges a piece from the tile's first on;
    range r leaves its sums in sums [tokens, HEADS, most, DV] and (total, top) in marks [tokens, HEADS, most, 2], at
    r % most. RANGE 0: all keys are one range (DIRECT).
    """
    let_next_begin(OVERLAPS)
    tile, kv_head = tiles - 1 - tl.program_id(0), tl.program_id(1)
    lane, columns = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    heads = kv_head * GROUP + lane % GROUP
    wait_for_earlier(OVERLAPS)
    row = row_of_tile(query_start, tile, rows, 0, BLOCK_Q)
    row_begin, row_end = tl.load(query_start + row), tl.load(query_start + row + 1)
    begin_token = row_begin + (tile - row_begin // BLOCK_Q - row) * BLOCK_Q
    if begin_token >= row_end:
        return
    length = tl.load(lengths + row)
    tokens = begin_token + lane // GROUP
    real = (tokens < row_end) & (lane < BLOCK_Q * GROUP)
    positions = length - row_end + tokens
    low = length - row_end + begin_token  # the positions of the tile's first and last query
    high = length - row_end + tl.minimum(begin_token + BLOCK_Q, row_end) - 1
    first, last = keys_seen(low, high, length, WINDOW, CAUSAL)
    q_tile = tl.load(
        q + tokens.to(tl.int64)[:, None] * q_stride + heads[:, None] * D + columns[None, :],
        mask=real[:, None] & (columns < D)[None, :],
        other=0.0,
    )
    table = tables + row.to(tl.int64) * table_stride
    keys, values = keys + kv_head * KEY_HEAD, values + kv_head * VALUE_HEAD
    first_tile, end_tile = first // BLOCK_N, tl.cdiv(last, BLOCK_N)
    place, columns = tokens.to(tl.int64) * HEADS + heads, tl.arange(0, DV_PAD)
    shown = real[:, None] & (columns < DV)[None, :]
    if RANGE == 0:
        acc, total, top = sum_tiles(
            q_tile, first_tile, end_tile, low, high, positions, length, first, table, keys, values, key_stride,
            value_stride, scale, cap, D, DV, D_PAD, DV_PAD, BLOCK_TOKENS, KEY_TOKEN, VALUE_TOKEN, WINDOW, CAUSAL,
            SOFT_CAPPED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        EACH: tl.constexpr = RANGE // BLOCK_N
        begin, end = first // RANGE, tl.cdiv(last, RANGE)
        if not DIRECT:
            begin += tl.program_id(2) * taken
            end = tl.minimum(begin + taken, end)
        acc, total, top = nothing_yet(BLOCK_M, DV_PAD)
        for number in range(begin, end):
            more, more_total, more_top = sum_tiles(
                q_tile, tl.maximum(number * EACH, first_tile), tl.minimum((number + 1) * EACH, end_tile), low, high,
                positions, length, first, table, keys, values, key_stride, value_stride, scale, cap, D, DV, D_PAD,
                DV_PAD, BLOCK_TOKENS, KEY_TOKEN, VALUE_TOKEN, WINDOW, CAUSAL, SOFT_CAPPED, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            if DIRECT:
                acc, total, top = joined(acc, total, top, more, more_total, more_top)
            else:
                spot = place * most + number % most
                tl.store(sums + spot[:, None] * DV + columns[None, :], more, mask=shown)
                tl.store(marks + 2 * spot, more_total, mask=real)
                tl.store(marks + 2 * spot + 1, more_top, mask=real)
    if DIRECT:
        result = finished(acc, total, top, sinks, heads, real, SINKS)
        tl.store(out + place[:, None] * DV + columns[None, :], result.to(out.dtype.element_ty), mask=shown)


@triton.jit
def row_of_token(query_start, token, rows):
    """Return the last row that begins at or before a token."""
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) <= token:
            low = middle
        else:
            high = middle
    return low


@kernel
@triton.jit(do_not_specialize=["rows", "most"], do_not_specialize_on_alignment=["query_start", "lengths"])
def join_kernel(
    out, sums, marks, query_start, lengths, sinks, rows, most, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, SINKS: tl.constexpr,
    RANGE: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, KV heads): join a query token's ranges in order, as ``invariant_kernel`` does. Tokens of no row are
    left as they are."""
    let_next_begin(OVERLAPS)
    token, kv_head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    lane, columns = tl.arange(0, GROUP_PAD), tl.arange(0, DV_PAD)
    real, heads = lane < GROUP, kv_head * GROUP + lane
    wait_for_earlier(OVERLAPS)
    row = row_of_token(query_start, token, rows)
    row_end = tl.load(query_start + row + 1)
    if token >= row_end:
        return
    length = tl.load(lengths + row)
    position = length - row_end + token
    first, last = keys_seen(position, position, length, WINDOW, CAUSAL)
    place = token.to(tl.int64) * (kv_heads * GROUP) + heads
    acc, total, top = nothing_yet(GROUP_PAD, DV_PAD)
    end = tl.cdiv(last, RANGE)
    for number in range(first // RANGE, end, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            there = real & (number + i < end)
            spot = place * most + (number + i) % most
            shown = there[:, None] & (columns < DV)[None, :]
            more = tl.load(sums + spot[:, None] * DV + columns[None, :], mask=shown, other=0.0)
            more_total = tl.load(marks + 2 * spot, mask=there, other=0.0)
            more_top = tl.load(marks + 2 * spot + 1, mask=there, other=NEVER)
            acc, total, top = joined(acc, total, top, more, more_total, more_top)
    result = finished(acc, total, top, sinks, heads, real, SINKS)
    goal = out + place[:, None] * DV + columns[None, :]
    tl.store(goal, result.to(out.dtype.element_ty), mask=real[:, None] & (columns < DV)[None, :])


def invariant_tiles(spec: AttentionSpec, target: Target) -> Tiles:
    """Tiles of every kind of row: by the spec alone."""
    wide = max(padded(spec.head_dim), padded(spec.v_head_dim)) > 128
    if spec.dtype == "float32":
        return fitted(Tiles(16, 16 if wide else 32, 4, 2), spec, target)
    if target.arch < 90:  # operands take registers
        return fitted(Tiles(64, 32, 8 if wide else 4, 2), spec, target)
    return fitted(Tiles(64, 32 if wide else 64, 4, 3), spec, target)


class InvariantAttention(TritonAttention):
    """attention.paged/1 in one kernel for all rows, and a second where few rows leave the device empty."""

    def __init__(self, spec: AttentionSpec, target: Target) -> None:
        super().__init__(spec, target)
        self.tiles = invariant_tiles(spec, target)
        # Wide heads leave no registers for the sums of a range beside those of all.
        wide = max(self._sizes["D_PAD"], self._sizes["DV_PAD"]) > 128
        self._common = self._sizes | {
            "WINDOW": self._rules["WINDOW"],
            "CAUSAL": spec.causal,
            "RANGE": 0 if wide else RANGE,
        }

    def plan(self, batch: AttentionBatch) -> Plan:
        """All rows in one part; several programs a tile only where there are few tiles."""
        tokens, rows, spec = batch.num_tokens, batch.num_rows, self.spec
        if not tokens:
            return Plan(tokens=0, slots=batch.slots_dev, decode=None, prefill=None)
        programs = self._query_tiles(tokens, rows, self.tiles) * spec.num_kv_heads
        most = self._ranges(batch)
        pieces = min(most, MAX_SPLITS, PROGRAMS * self.target.multiprocessors // programs)
        if pieces > 1 and 4 * tokens * spec.num_heads * most * (spec.v_head_dim + 2) <= WORKSPACE:
            shape, device = (tokens, spec.num_heads, most), batch.lengths_dev.device
            partial = torch.empty((*shape, spec.v_head_dim), dtype=torch.float32, device=device)
            marks = torch.empty((*shape, 2), dtype=torch.float32, device=device)
        else:
            pieces, partial, marks = 1, None, None
        part = Part(
            rows=rows, base=0, tokens=tokens, tiles=self.tiles, splits=pieces, query_start=batch.query_start_dev,
            lengths=batch.lengths_dev, tables=batch.block_table_dev, partial=partial, lse=marks,
        )  # fmt: skip
        return Plan(tokens=tokens, slots=batch.slots_dev, decode=None, prefill=part)

    def plan_for_capture(self, batch: AttentionBatch) -> Plan:
        """As ``plan``: host values decide only which programs do the same sums."""
        return self.plan(batch)

    def _ranges(self, batch: AttentionBatch) -> int:
        """Bound the ranges that any tile of queries sees."""
        size, window = int(self._common["RANGE"]), self.spec.window
        if not size:
            return 1
        most = -(-batch.max_length_bound // size)
        if window is None or not self.spec.causal:
            return max(1, most)
        seen = window + self.tiles.block_m // self._group
        return max(1, min(most, -(-seen // size) + 1))

    def _prefill(
        self, part: Part, out: torch.Tensor, q: torch.Tensor, cache: CacheHandle, sinks: torch.Tensor | None
    ) -> None:
        keys, values = cache.parts  # type: ignore[attr-defined]
        tiles, spec, heads = part.tiles, self.spec, self.spec.num_kv_heads
        count = self._query_tiles(part.tokens, part.rows, tiles)
        sums, marks = (out, out) if part.partial is None or part.lse is None else (part.partial, part.lse)
        most = 1 if part.partial is None else part.partial.shape[2]
        terms, direct = q if sinks is None else sinks, part.partial is None
        invariant_kernel[(count, heads, part.splits)](
            out, sums, marks, q, keys, values, part.query_start, part.lengths, part.tables, terms, part.rows, count,
            most, -(-most // part.splits), part.tables.stride(0), q.stride(0), keys.stride(0), values.stride(0),
            spec.scale, self._cap, HEADS=spec.num_heads, GROUP=self._group, SOFT_CAPPED=spec.soft_cap is not None,
            SINKS=sinks is not None, DIRECT=direct, BLOCK_M=tiles.block_m, BLOCK_Q=tiles.block_m // self._group,
            BLOCK_N=tiles.block_n, **cache_strides(keys, values), **self._common, num_warps=tiles.warps,
            num_stages=tiles.stages, **self.target.options,
        )  # fmt: skip
        if direct:
            return
        group, width = power_of_two(self._group), self._common["DV_PAD"]
        join_kernel[(part.tokens, heads)](
            out, sums, marks, part.query_start, part.lengths, terms, part.rows, most, GROUP=self._group,
            GROUP_PAD=group, DV=spec.v_head_dim, DV_PAD=width, WINDOW=self._common["WINDOW"], CAUSAL=spec.causal,
            SINKS=sinks is not None, RANGE=self._common["RANGE"], AT_ONCE=max(1, min(8, 8192 // (group * width))),
            OVERLAPS=self.target.overlaps, num_warps=4, **self.target.options,
        )  # fmt: skip


def provide_invariant(spec: AttentionSpec, target: Target) -> Provided | Decline:
    """Serve a spec with a row's bits its own, or say why not."""
    reason = refusal(spec, target)
    if reason is not None:
        return Decline(reason=reason)
    traits = OpTraits(batch_invariant=True, graph="any")
    return Provided(implementation=InvariantAttention(spec, target), label=LABEL, traits=traits)
