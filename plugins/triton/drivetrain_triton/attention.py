"""Paged attention on Triton: plans on the host, kernels for decode rows and for the others, and the provider."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from drivetrain_api.v1 import AttentionBatch, AttentionSpec, AttentionTraits, CacheHandle, Decline, OpTraits, Provided

from .attention_choice import (
    MAX_SPLITS,
    Stream,
    Tiles,
    decode_stream,
    decode_tiles,
    padded,
    power_of_two,
    prefill_tiles,
    refusal,
    shares_at_once,
    splits_of,
    streamable,
)
from .attention_decode import decode_kernel, merge_kernel
from .attention_prefill import prefill_kernel
from .attention_token import token_kernel
from .attention_write import write_kernel
from .target import Target

MERGED_AT_ONCE = 16  # a merge of few shares need not hold room for all 64

PROGRAMS = 2  # prefill programs wanted a multiprocessor
SHORT, SHORT_PROGRAMS = 64, 8  # of captured rows with so few queries times heads, so many
STREAM_ROWS = 128  # query rows that ``attention_stream`` is made for

WORKSPACE = 32 << 20  # parts of split rows, and what arrives of them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Consecutive rows that one kernel serves: ``tokens`` query tokens from ``base`` on.

    ``partial`` [tokens, heads, splits, DV] and ``lse`` [tokens, heads, splits], float32, where ``splits`` > 1, and for
    decode rows ``arrivals`` [rows, KV heads] int32, zero between kernels; all layers of the group use them in turn.
    """

    rows: int
    base: int
    tokens: int
    tiles: Tiles
    splits: int
    query_start: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    partial: torch.Tensor | None
    lse: torch.Tensor | None
    arrivals: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """One step of one group. Tensors are the batch's own, read when kernels run."""

    tokens: int
    slots: torch.Tensor
    decode: Part | None
    prefill: Part | None


class TritonAttention:
    """attention.paged/1 over strided caches. See ``AttentionSpec`` for the formula.

    Decode rows: one program a KV head, row and share of the row's keys; the last share to be ready adds them all.
    Other rows: query tokens and grouped heads as the rows of matrix products, shares put together by a second kernel.
    """

    traits = AttentionTraits(lengths="device", row_order="decode_first", graph="any", workspace_bytes=WORKSPACE)
    programs_wanted = 4  # decode programs a multiprocessor, where keys suffice
    decode_tiles: Tiles | None = None  # instead of the table's, to measure
    prefill_tiles: Tiles | None = None
    streamed = True  # long prompts by bulk copies where these can bring the cache; False only to measure
    decode_streamed = True  # decode rows too; False only to measure

    def __init__(self, spec: AttentionSpec, target: Target) -> None:
        self.spec, self.target = spec, target
        self._group = spec.num_heads // spec.num_kv_heads
        self.early = target.overlaps  # decode programs read lengths and tables before they wait
        self._arrivals: torch.Tensor | None = None
        self._cap = 1.0 if spec.soft_cap is None else spec.soft_cap
        self._streams = streamable(spec, target) and self._group <= STREAM_ROWS
        self._boxes = WeakKeyDictionary[Any, tuple[Any, Any] | None]()  # by cache: a description holds its memory
        self._sizes: dict[str, Any] = {
            "D": spec.head_dim,
            "DV": spec.v_head_dim,
            "D_PAD": padded(spec.head_dim),
            "DV_PAD": padded(spec.v_head_dim),
            "BLOCK_TOKENS": spec.layout.block_tokens,
            "OVERLAPS": target.overlaps,
        }
        self._sums: dict[str, Any] = {
            "GROUP_PAD": power_of_two(self._group),
            "MOST": MAX_SPLITS,
            "CHUNK": shares_at_once(spec),
        }
        self._rules: dict[str, Any] = {
            "HEADS": spec.num_heads,
            "GROUP": self._group,
            "WINDOW": spec.window or 0,
            "SOFT_CAPPED": spec.soft_cap is not None,
        }

    def plan(self, batch: AttentionBatch) -> Plan:
        """Choose kernels and shares from host values; starts no work on the device."""
        starts = batch.query_start_host
        first = batch.num_decode_rows if len(starts) > batch.num_decode_rows else len(starts) - 1
        base, tokens = int(starts[first]), int(starts[-1])
        return Plan(
            tokens=tokens,
            slots=batch.slots_dev,
            decode=self._decode_part(batch, base, tokens == base) if base else None,
            prefill=self._prefill_part(batch, first, base, tokens - base) if tokens > base else None,
        )

    def plan_for_capture(self, batch: AttentionBatch) -> Plan:
        """As ``plan``: it holds the graph's own tensors, and its host bounds hold for every replay.

        Where rows may have several tokens, all rows take the prefill kernel, which finds them on the device: replays
        may share the graph's tokens out over its rows as they like. Most of a graph's rows may be padded then, and few
        have many keys: short rows are cut into more shares than would fill the device if all were there.
        """
        tokens = batch.num_tokens
        if batch.max_query_len <= 1 or not tokens:
            return self.plan(batch)
        short = batch.max_query_len * self._group <= SHORT
        part = self._prefill_part(batch, 0, 0, tokens, SHORT_PROGRAMS if short else PROGRAMS)
        return Plan(tokens=tokens, slots=batch.slots_dev, decode=None, prefill=part)

    def write(self, cache: CacheHandle, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
        """Store k [T, num_kv_heads, head_dim] and v [T, num_kv_heads, v_head_dim], innermost contiguous."""
        if not plan.tokens:
            return
        keys, values = cache.parts  # type: ignore[attr-defined]
        k, v = inner_contiguous(k), inner_contiguous(v)
        write_kernel[(plan.tokens,)](
            k, v, keys, values, plan.slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0),
            values.stride(0), KV_HEADS=self.spec.num_kv_heads, KV_PAD=power_of_two(self.spec.num_kv_heads),
            **cache_strides(keys, values), **self._sizes, num_warps=4, **self.target.options,
        )  # fmt: skip

    def forward(
        self, q: torch.Tensor, cache: CacheHandle, plan: Plan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q [T, num_heads, head_dim] -> [T, num_heads, v_head_dim]."""
        spec = self.spec
        if q.stride(2) != 1 or q.stride(1) != spec.head_dim:
            q = q.contiguous()
        out = q.new_empty((q.shape[0], spec.num_heads, spec.v_head_dim))
        if plan.decode is not None:
            self._decode(plan.decode, out, q, cache, sinks)
        if plan.prefill is not None:
            self._prefill(plan.prefill, out, q, cache, sinks)
        return out

    def _decode_part(self, batch: AttentionBatch, rows: int, alone: bool) -> Part:
        """Cut rows until ``programs_wanted`` run. Rows beyond the tokens are padded ones without a token."""
        programs, wanted = rows * self.spec.num_kv_heads, self.programs_wanted * self.target.multiprocessors
        tiles = self.decode_tiles or decode_tiles(self.spec, self.target, programs, alone)
        if alone and self.decode_streamed and self.decode_tiles is None:
            stream = decode_stream(self.spec, self.target, programs, batch.max_length_bound)
            tiles = replace(tiles, stream=stream)
        splits = splits_of(programs, wanted, self._most(batch, tiles, 1))
        arrivals = self._counters(programs, batch.lengths_dev.device) if splits > 1 else None
        return self._part(batch, 0, rows, 0, rows, tiles, splits, arrivals)

    def _counters(self, count: int, device: torch.device) -> torch.Tensor:
        """Return counters that are zero between kernels; older ones live on in their plans."""
        if self._arrivals is None or self._arrivals.numel() < count or self._arrivals.device != device:
            wanted = self.programs_wanted * self.target.multiprocessors
            self._arrivals = torch.zeros(max(count, wanted), dtype=torch.int32, device=device)
        return self._arrivals

    def _prefill_part(self, batch: AttentionBatch, first: int, base: int, tokens: int, wanted: int = PROGRAMS) -> Part:
        """One program a multiprocessor fills it; shares only where a few short rows meet many keys."""
        rows = len(batch.query_start_host) - 1 - first
        tiles = self.prefill_tiles or prefill_tiles(self.spec, self.target, batch.max_query_len)
        programs = self._query_tiles(tokens, rows, tiles) * self.spec.num_kv_heads
        # Shares of fewer than four tiles would cost more than they give.
        most = self._most(batch, tiles, batch.max_query_len) // 4
        most = min(most, WORKSPACE // (10 * tokens * self.spec.num_heads * self.spec.v_head_dim))
        splits = splits_of(programs, wanted * self.target.multiprocessors, most)
        return self._part(batch, first, rows, base, tokens, tiles, splits)

    def _most(self, batch: AttentionBatch, tiles: Tiles, queries: int) -> int:
        """Bound the tiles of keys of any row."""
        keys = batch.max_length_bound
        if self.spec.window is not None:
            keys = min(keys, self.spec.window + queries + tiles.block_n)
        return -(-keys // tiles.block_n)

    def _query_tiles(self, tokens: int, rows: int, tiles: Tiles) -> int:
        return tokens // (tiles.block_m // self._group) + rows

    def _part(
        self,
        batch: AttentionBatch,
        first: int,
        rows: int,
        base: int,
        tokens: int,
        tiles: Tiles,
        splits: int,
        arrivals: torch.Tensor | None = None,
    ) -> Part:
        partial = lse = None
        if splits > 1:
            shape, device = (tokens, self.spec.num_heads, splits), batch.lengths_dev.device
            partial = torch.empty((*shape, self.spec.v_head_dim), dtype=torch.float32, device=device)
            lse = torch.empty(shape, dtype=torch.float32, device=device)
        return Part(
            rows=rows,
            base=base,
            tokens=tokens,
            tiles=tiles,
            splits=splits,
            query_start=batch.query_start_dev[first:] if first else batch.query_start_dev,
            lengths=batch.lengths_dev[first:] if first else batch.lengths_dev,
            tables=batch.block_table_dev[first:] if first else batch.block_table_dev,
            partial=partial,
            lse=lse,
            arrivals=arrivals,
        )

    def _decode(
        self, part: Part, out: torch.Tensor, q: torch.Tensor, cache: CacheHandle, sinks: torch.Tensor | None
    ) -> None:
        keys, values = cache.parts  # type: ignore[attr-defined]
        tiles = part.tiles
        decode_kernel[(self.spec.num_kv_heads, part.rows, part.splits)](
            out, *shares_of(part, out), q, keys, values, part.lengths, part.tables, q if sinks is None else sinks,
            part.tables.stride(0), q.stride(0), keys.stride(0), values.stride(0), self.spec.scale, self._cap,
            SINKS=sinks is not None, DIRECT=part.splits == 1, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            EARLY=self.early, **cache_strides(keys, values), **self._rules, **self._sums, **self._sizes,
            num_warps=tiles.warps, num_stages=tiles.stages, **self.target.options,
        )  # fmt: skip

    def decode_whole(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: CacheHandle,
        plan: Plan,
        sinks: torch.Tensor | None,
        turn: tuple[float, dict[str, Any]],
    ) -> torch.Tensor:
        """Norm, rotate, write and attend to decode rows in one kernel: x [rows, H + 2 KV, D] -> out [rows, H, DV].

        x's heads one after another; ``turn``: eps, and the kernel's constants of norm and rotation.
        """
        assert plan.decode is not None
        keys, values = cache.parts  # type: ignore[attr-defined]
        spec, part, tiles = self.spec, plan.decode, plan.decode.tiles
        out = x.new_empty((x.shape[0], spec.num_heads, spec.v_head_dim))
        boxes = self._described(cache) if tiles.stream is not None and sinks is None else None
        if boxes is not None and tiles.stream is not None:
            self._stream_whole(tiles.stream, out, x, weight, (cos, sin), cache, boxes, plan, turn)
            return out
        token_kernel[(spec.num_kv_heads, part.rows, part.splits)](
            out, *shares_of(part, out), x, x if weight is None else weight, cos, sin, keys, values, plan.slots,
            part.lengths, part.tables, x if sinks is None else sinks, part.tables.stride(0), part.tables.shape[1],
            x.stride(0), keys.stride(0), values.stride(0), spec.scale, self._cap, turn[0], SINKS=sinks is not None,
            DIRECT=part.splits == 1, BLOCK_M=max(tiles.block_m, power_of_two(self._group + 1)), BLOCK_N=tiles.block_n,
            AHEAD=tiles.ahead, EARLY=self.early, **turn[1], **cache_strides(keys, values), **self._rules, **self._sums,
            **self._sizes, num_warps=tiles.warps, num_stages=1 if tiles.ahead else tiles.stages,
            **self.target.options,
        )  # fmt: skip
        return out

    def _prefill(
        self, part: Part, out: torch.Tensor, q: torch.Tensor, cache: CacheHandle, sinks: torch.Tensor | None
    ) -> None:
        keys, values = cache.parts  # type: ignore[attr-defined]
        tiles, direct = part.tiles, part.splits == 1
        count = self._query_tiles(part.tokens, part.rows, tiles)
        if self.streamed and self._streams and direct and tiles.block_m == STREAM_ROWS and sinks is None:
            boxes = self._described(cache)
            if boxes is not None:
                self._stream(part, out, q, boxes, count)
                return
        prefill_kernel[(count, self.spec.num_kv_heads, part.splits)](
            out, out if direct else part.partial, out if direct else part.lse, q, keys, values, part.query_start,
            part.lengths, part.tables, q if sinks is None else sinks, part.rows, part.base, count,
            part.tables.stride(0), q.stride(0), keys.stride(0), values.stride(0), self.spec.scale, self._cap,
            CAUSAL=self.spec.causal, SINKS=sinks is not None, DIRECT=direct, BLOCK_M=tiles.block_m,
            BLOCK_Q=tiles.block_m // self._group, BLOCK_N=tiles.block_n, **cache_strides(keys, values),
            **self._rules, **self._sizes, num_warps=tiles.warps, num_stages=tiles.stages, **self.target.options,
        )  # fmt: skip
        if not direct:
            self._merge(part, out[part.base :], sinks)

    def _described(self, cache: CacheHandle) -> tuple[Any, Any] | None:
        """Describe a layer's cache to the copy engine, once; None where it can't bring it."""
        if cache not in self._boxes:
            from . import attention_stream as stream  # not everywhere: it needs Triton's Gluon

            keys, values = cache.parts  # type: ignore[attr-defined]
            able = stream.fits(keys) and stream.fits(values)
            self._boxes[cache] = (stream.boxes(keys), stream.boxes(values)) if able else None
        return self._boxes[cache]

    def _stream_whole(
        self,
        stream: Stream,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: CacheHandle,
        boxes: tuple[Any, Any],
        plan: Plan,
        turn: tuple[float, dict[str, Any]],
    ) -> None:
        from .attention_token_stream import token_stream_kernel

        part = plan.decode
        assert part is not None
        ratios = [box.base.stride(0) // box.base.stride(1) for box in boxes]
        keys, values = cache.parts  # type: ignore[attr-defined]
        token_stream_kernel[(self.spec.num_kv_heads, part.rows, part.splits)](
            out, *shares_of(part, out), x, x if weight is None else weight, *angles, *boxes, keys, values, plan.slots,
            part.lengths, part.tables, part.tables.stride(0), part.tables.shape[1], x.stride(0), self.spec.scale,
            turn[0], HEADS=self.spec.num_heads, GROUP=self._group, **turn[1], KEY_RATIO=ratios[0],
            VALUE_RATIO=ratios[1], DIRECT=part.splits == 1, TOKENS=stream.tokens, STAGES=stream.stages,
            LEAST=stream.least, EARLY=self.early, OVERLAPS=self.target.overlaps, num_warps=stream.warps,
            **self.target.options,
        )  # fmt: skip

    def _stream(self, part: Part, out: torch.Tensor, q: torch.Tensor, boxes: tuple[Any, Any], count: int) -> None:
        from .attention_stream import prompt_kernel

        ratios = [box.base.stride(0) // box.base.stride(1) for box in boxes]
        prompt_kernel[(count, self.spec.num_kv_heads)](
            out, q, *boxes, part.query_start, part.lengths, part.tables, part.rows, part.base, count,
            part.tables.stride(0), q.stride(0), self.spec.scale, HEADS=self.spec.num_heads, GROUP=self._group,
            BLOCK_Q=part.tiles.block_m // self._group, KEY_RATIO=ratios[0], VALUE_RATIO=ratios[1], STAGES=2,
            OVERLAPS=self.target.overlaps, num_warps=4, **self.target.options,
        )  # fmt: skip

    def _merge(self, part: Part, out: torch.Tensor, sinks: torch.Tensor | None) -> None:
        merge_kernel[(part.tokens, self.spec.num_heads)](
            out, part.partial, part.lse, out if sinks is None else sinks, part.splits, HEADS=self.spec.num_heads,
            DV=self.spec.v_head_dim, DV_PAD=self._sizes["DV_PAD"], SINKS=sinks is not None,
            SPLITS_PAD=max(MERGED_AT_ONCE, power_of_two(part.splits)), OVERLAPS=self.target.overlaps, num_warps=4,
            **self.target.options,
        )  # fmt: skip


def shares_of(part: Part, out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return where shares of rows meet; any tensor where there is one a row."""
    return (out, out, out) if part.splits == 1 else (part.partial, part.lse, part.arrivals)


def inner_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return x with a contiguous last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def cache_strides(keys: torch.Tensor, values: torch.Tensor) -> dict[str, int]:
    """Return the strides inside a block, in elements, as the kernels name them."""
    return {
        "KEY_TOKEN": keys.stride(1),
        "KEY_HEAD": keys.stride(2),
        "VALUE_TOKEN": values.stride(1),
        "VALUE_HEAD": values.stride(2),
    }


def provide_attention(spec: AttentionSpec, target: Target) -> Provided | Decline:
    """Serve a spec, or say why not."""
    reason = refusal(spec, target)
    if reason is not None:
        return Decline(reason=reason)
    return Provided(
        implementation=TritonAttention(spec, target),
        label="shared: Triton, split keys",
        traits=OpTraits(graph="any"),
    )
