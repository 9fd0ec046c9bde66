"""Inputs of attention.paged: caches full of NaN, permuted blocks, loose host bounds, every mix of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from drivetrain.ops.cases.source import Source, int_tensor, on
from drivetrain.ops.reference.kinds import Case, Place
from drivetrain_api.v1 import AttentionBatch, AttentionSpec, CacheHandle, CachePart, CacheSpec, torch_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One kind of layer."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    causal: bool = True


SHAPES = (
    Shape(heads=4, kv_heads=2, head_dim=16, v_head_dim=16),
    Shape(heads=3, kv_heads=1, head_dim=20, v_head_dim=12),
    Shape(heads=4, kv_heads=4, head_dim=16, v_head_dim=16, window=19),
    Shape(heads=6, kv_heads=2, head_dim=8, v_head_dim=8, soft_cap=2.0, sinks=True),
    Shape(heads=4, kv_heads=1, head_dim=16, v_head_dim=16, window=1, sinks=True),
    Shape(heads=2, kv_heads=1, head_dim=16, v_head_dim=16, causal=False),
)

# (length, query tokens) of each row, in a batch's order: decode, verification, prefill; length 0 = padded.
BATCHES: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
    ("one token", ((1, 1),)),
    ("one decode row", ((77, 1),)),
    ("decode", ((1, 1), (130, 1), (16, 1), (17, 1), (300, 1))),
    ("verify", ((40, 4), (4, 4), (21, 4))),
    ("prefill", ((37, 37),)),
    ("chunk", ((150, 23),)),
    ("mixed", ((33, 1), (160, 1), (64, 3), (50, 50), (145, 17), (5, 5))),
    ("padded", ((33, 1), (0, 1), (0, 1))),
    ("nothing", ((0, 1), (0, 0))),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """A batch on the host. ``blocks``: each row's block ids; unused table entries are 0."""

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    bounds: tuple[int, ...]
    blocks: tuple[np.ndarray, ...]
    num_blocks: int
    block_tokens: int

    def slots(self, row: int, first: int, end: int) -> np.ndarray:
        """Return where positions first .. end - 1 of a row lie."""
        at = np.arange(first, end)
        if self.lengths[row] == 0:
            return np.zeros(end - first, np.int64)
        slots: np.ndarray = self.blocks[row][at // self.block_tokens] * self.block_tokens + at % self.block_tokens
        return slots

    def query_slots(self) -> np.ndarray:
        """Return where each query token's k and v go; padded ones to slot 0."""
        spans = [
            self.slots(b, max(0, n - q), max(0, n - q) + q)
            for b, (n, q) in enumerate(zip(self.lengths, self.queries, strict=True))
        ]
        return np.concatenate(spans)


def make_rows(rows: tuple[tuple[int, int], ...], block_tokens: int, slack: int, random: np.random.Generator) -> Rows:
    """Give each row of (length, queries) its own blocks, in random order over a pool with spare blocks.

    ``slack``: by how much the host bounds of rows of up to four queries exceed the lengths.
    """
    lengths = tuple(n for n, _ in rows)
    bounds = tuple(n + slack if 0 < n and q <= 4 else n for n, q in rows)
    needed = [-(-b // block_tokens) for b in bounds]
    num_blocks = sum(needed) + 4
    order = random.permutation(np.arange(1, num_blocks))
    cuts = np.cumsum([0, *needed])
    blocks = tuple(order[a:b] for a, b in pairwise(cuts))
    return Rows(
        lengths=lengths,
        queries=tuple(q for _, q in rows),
        bounds=bounds,
        blocks=blocks,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
    )


def make_batch(place: Place, rows: Rows, slot_dtype: str) -> AttentionBatch:
    """Put a batch on the device."""
    start = np.cumsum([0, *rows.queries]).astype(np.int32)
    table = np.zeros((len(rows.lengths), max(1, *(len(b) for b in rows.blocks)) + 1), np.int64)
    for row, ids in enumerate(rows.blocks):
        table[row, : len(ids)] = ids
    pairs = list(zip(rows.lengths, rows.queries, strict=True))
    positions = np.concatenate([np.arange(q) + max(0, n - q) if n else np.zeros(q) for n, q in pairs])
    queries = np.asarray(rows.queries)
    kinds = np.where(queries <= 1, 0, np.where(queries <= 4, 1, 2))

    def dev(values: Any) -> torch.Tensor:
        tensor: torch.Tensor = on(place, int_tensor(np.asarray(values), slot_dtype))
        return tensor

    return AttentionBatch(
        query_start_dev=dev(start),
        lengths_dev=dev(rows.lengths),
        block_table_dev=dev(table),
        slots_dev=dev(rows.query_slots()),
        token_row_dev=dev(np.repeat(np.arange(len(queries)), queries)),
        positions_dev=dev(positions),
        query_start_host=start,
        length_bounds_host=np.asarray(rows.bounds, np.int32),
        host_lengths_exact=rows.bounds == rows.lengths,
        num_decode_rows=int((kinds == 0).sum()),
        num_verify_rows=int((kinds == 1).sum()),
        num_prefill_rows=int((kinds == 2).sum()),
        max_query_len=int(queries.max()),
        max_length_bound=max(rows.bounds),
    )


def make_spec(place: Place, shape: Shape, dtype: str) -> AttentionSpec:
    """Describe a layer on the place's storage, at its preferred block size."""
    cache = CacheSpec(
        kind="full" if shape.window is None else "window",
        parts=(
            CachePart(name="k", shape=(shape.kv_heads, shape.head_dim), dtype=dtype),
            CachePart(name="v", shape=(shape.kv_heads, shape.v_head_dim), dtype=dtype),
        ),
        window=shape.window,
    )
    return AttentionSpec(
        dtype=dtype,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        scale=shape.head_dim**-0.5,
        layout=place.storage.layout(cache, place.storage.block_tokens[0]),
        window=shape.window,
        soft_cap=shape.soft_cap,
        sinks=shape.sinks,
        causal=shape.causal,
    )


def fill_cache(
    place: Place, spec: AttentionSpec, rows: Rows, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> CacheHandle:
    """Allocate a cache full of NaN that holds each row's positions before its queries."""
    cache = place.storage.allocate(spec.layout, rows.num_blocks)
    slot_dtype, size = spec.layout.slot_dtype, spec.layout.block_tokens
    every = np.arange(rows.num_blocks * size)
    dtype = torch_dtype(spec.dtype)
    garbage = [torch.full((len(every), *part.shape), float("nan"), dtype=dtype) for part in spec.layout.spec.parts]
    cache.write(on(place, int_tensor(every, slot_dtype)), [on(place, g) for g in garbage])
    for row, (length, queries) in enumerate(zip(rows.lengths, rows.queries, strict=True)):
        past = max(0, length - queries)
        if past:
            slots = on(place, int_tensor(rows.slots(row, 0, past), slot_dtype))
            cache.write(slots, (on(place, keys[row][:past]), on(place, values[row][:past])))
    return cache


def attention_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Every shape with every batch, at exact and at loose host bounds."""
    source = Source(dtype, seed)
    for number, shape in enumerate(SHAPES):
        spec = make_spec(place, shape, dtype)
        for name, lengths in BATCHES:
            slack = 0 if (number + len(lengths)) % 2 else 3
            rows = make_rows(lengths, spec.layout.block_tokens, slack, source.random)
            yield attention_case(place, f"{name}, shape {number}, slack {slack}", spec, rows, source)


def attention_case(place: Place, name: str, spec: AttentionSpec, rows: Rows, source: Source) -> Case:
    """Make the case of one batch with random q, k, v and sinks."""
    totals = [max(n, q) for n, q in zip(rows.lengths, rows.queries, strict=True)]
    inputs: dict[str, Any] = {
        "q": source.normal(sum(rows.queries), spec.num_heads, spec.head_dim, scale=1.5),
        "keys": [source.normal(n, spec.num_kv_heads, spec.head_dim) for n in totals],
        "values": [source.normal(n, spec.num_kv_heads, spec.v_head_dim) for n in totals],
        "sinks": source.normal(spec.num_heads) if spec.sinks else None,
        "rows": rows,
    }

    def new(parts: list[torch.Tensor]) -> Any:
        return on(
            place,
            torch.cat([p[len(p) - q : len(p)] for p, q in zip(parts, rows.queries, strict=True)]),
        )

    def run(attention: Any) -> tuple[torch.Tensor, ...]:
        cache = fill_cache(place, spec, rows, inputs["keys"], inputs["values"])
        plan = attention.plan(make_batch(place, rows, spec.layout.slot_dtype))
        attention.write(cache, new(inputs["keys"]), new(inputs["values"]), plan)
        return (attention.forward(on(place, inputs["q"]), cache, plan, on(place, inputs["sinks"])),)

    return Case(name=name, spec=spec, inputs=inputs, run=run)
