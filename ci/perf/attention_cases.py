"""Cases of paged attention on a device: shapes, variants, batches, and the check against float64."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "plugins" / name) for name in ("api", "triton")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from drivetrain_api.v1 import (  # noqa: E402
    AttentionBatch,
    AttentionSpec,
    CacheLayout,
    CachePart,
    CacheSpec,
    RmsNormSpec,
    RopeSpec,
    torch_dtype,
)
from drivetrain_triton.attention import TritonAttention  # noqa: E402
from drivetrain_triton.attention_choice import Tiles  # noqa: E402
from drivetrain_triton.attention_rotate import RotateAndAttend  # noqa: E402
from drivetrain_triton.target import Target  # noqa: E402

SHAPES = {"A": (32, 8, 128), "C": (16, 8, 128)}


@dataclass(frozen=True)
class Variant:
    """Tiles and programs wanted a multiprocessor, None of the table; one kernel or two; and whether lengths and tables
    are read before the wait, where the kernel ahead then lets the next begin late."""

    tiles: Tiles | None = None
    wanted: int = 4
    whole: bool = False
    early: bool = True

    def __str__(self) -> str:
        tiles = self.tiles
        shown = "table" if tiles is None else f"{tiles.block_n}/{tiles.warps}/{tiles.stages}"
        ahead = "a" if tiles is not None and tiles.ahead else ""
        return f"{'one' if self.whole else 'two'} {shown}/{self.wanted}{ahead}{'' if self.early else 'w'}"


def staged(*numbers: int, wanted: int = 4, whole: bool = False) -> Variant:
    """BLOCK_N, warps and stages."""
    return Variant(Tiles(16, *numbers), wanted, whole)


def ahead(*numbers: int) -> Variant:
    """BLOCK_N and warps of one kernel that goes ahead."""
    return Variant(Tiles(16, *numbers, 3, ahead=True), 4, True)


DECODE = [
    Variant(), Variant(early=False), *(staged(*numbers) for numbers in (
        (64, 4, 2), (64, 2, 2), (64, 8, 2), (64, 4, 1), (32, 2, 2), (32, 4, 2), (32, 2, 3), (32, 4, 4), (32, 1, 2),
        (16, 2, 4), (128, 8, 2),
    )), staged(64, 4, 2, wanted=8),
]  # fmt: skip
# One kernel for norm, rotation, write and attention, beside the two that it replaces.
WHOLE = [
    Variant(), Variant(whole=True), staged(64, 4, 2, whole=True), staged(32, 2, 3, whole=True), ahead(32, 4),
    ahead(32, 2), ahead(16, 1), staged(64, 4, 2, wanted=8, whole=True),
]  # fmt: skip
# Whether long prompts take the kernel of bulk copies.
PREFILL = [True, False]
# (rows, length, the bound by which shares are chosen, as in a captured graph)
DECODE_POINTS = [
    (1, 208, 208), (1, 208, 4096), (8, 208, 208), (8, 208, 4096), (64, 208, 208), (256, 208, 208), (256, 1024, 1024),
    (1, 8192, 8192), (1, 100_000, 100_000),
]  # fmt: skip
WHOLE_POINTS = [
    (1, 208, 208), (1, 208, 4096), (8, 208, 208), (8, 208, 4096), (64, 208, 4096), (256, 208, 4096), (512, 208, 4096),
    (256, 640, 4096), (512, 640, 4096), (1, 4096, 4096), (1, 100_000, 100_000),
]  # fmt: skip
# (rows, length, queries)
PREFILL_POINTS = [
    (1, 4096, 4096), (2, 4096, 4096), (16, 4096, 4096), (1, 8192, 8192), (1, 100_000, 8192), (16, 512, 512),
    (8, 1024, 1024), (1, 4112, 16), (64, 1024, 4),
]  # fmt: skip
BLOCK = 16
device = torch.device("cuda")
Tensor, Rows = torch.Tensor, list[tuple[int, int]]


class Cache:
    """Blocks of one pool of keys and values, [blocks, 2, BLOCK, heads, size]."""

    def __init__(self, pool: torch.Tensor, first: int, count: int) -> None:
        self.parts = pool[first : first + count, 0], pool[first : first + count, 1]


def target() -> Target:
    properties = torch.cuda.get_device_properties(device)
    return Target(
        kind="cuda",
        arch=properties.major * 10 + properties.minor,
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
        overlaps=properties.major >= 9,
    )


def spec_of(heads: int, kv_heads: int, size: int, dtype: str = "bfloat16", **rules: Any) -> AttentionSpec:
    parts = tuple(CachePart(name=name, shape=(kv_heads, size), dtype=dtype) for name in "kv")
    layout = CacheLayout(
        spec=CacheSpec(kind="full", parts=parts),
        block_tokens=BLOCK,
        bytes_per_block=2 * BLOCK * kv_heads * size * 2,
        alignment=64,
        strided=True,
        slot_dtype="int32",
    )
    return AttentionSpec(
        dtype=dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=size, v_head_dim=size, scale=size**-0.5,
        layout=layout, **rules,
    )  # fmt: skip


def batch_of(rows: Rows, slack: int = 0) -> tuple[AttentionBatch, int]:
    """Rows of (length, queries), decode first -> the batch and the blocks that it needs, null block included."""
    lengths, queries = (np.asarray(each) for each in zip(*rows, strict=True))
    start = np.cumsum([0, *queries]).astype(np.int32)
    needed = -(-lengths // BLOCK)
    order = np.random.default_rng(0).permutation(np.arange(1, needed.sum() + 1))
    table = np.zeros((len(rows), needed.max() + 1), np.int32)
    table[np.arange(table.shape[1])[None, :] < needed[:, None]] = order
    row = np.repeat(np.arange(len(rows)), queries)
    position = np.arange(start[-1]) - start[row] + (lengths - queries)[row]
    position = np.where(lengths[row] > 0, position, 0)
    slots = np.where(lengths[row] > 0, table[row, position // BLOCK] * BLOCK + position % BLOCK, 0)

    def dev(values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, np.int32), device=device)

    decode = int((queries <= 1).sum())
    batch = AttentionBatch(
        query_start_dev=dev(start), lengths_dev=dev(lengths), block_table_dev=dev(table), slots_dev=dev(slots),
        token_row_dev=dev(row), positions_dev=dev(position), query_start_host=start,
        length_bounds_host=(lengths + slack).astype(np.int32), host_lengths_exact=slack == 0, num_decode_rows=decode,
        num_verify_rows=0, num_prefill_rows=len(rows) - decode, max_query_len=int(queries.max()),
        max_length_bound=int(lengths.max()) + slack,
    )  # fmt: skip
    return batch, int(needed.sum()) + 1


def dense(spec: AttentionSpec, q: Tensor, cache: Cache, batch: AttentionBatch, rows: Rows, sinks: Any) -> Tensor:
    """Attention in float64, a row at a time."""
    out = torch.zeros(*q.shape[:2], spec.v_head_dim, dtype=torch.float64, device=device)
    for row, (length, queries) in enumerate(rows):
        if length == 0 or queries == 0:
            continue
        begin, at = int(batch.query_start_host[row]), torch.arange(length, device=device)
        ids = batch.block_table_dev[row, at // BLOCK].long()
        group = spec.num_heads // spec.num_kv_heads
        k, v = (part[ids, at % BLOCK].double().repeat_interleave(group, 1) for part in cache.parts)
        positions = torch.arange(length - queries, length, device=device)
        seen = at[None, :] <= positions[:, None] if spec.causal else at[None, :] >= 0
        if spec.window is not None:
            seen = seen & (at[None, :] > positions[:, None] - spec.window)
        scores = torch.einsum("qhd,khd->hqk", q[begin : begin + queries].double(), k) * spec.scale
        if spec.soft_cap is not None:
            scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, queries, 1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out[begin : begin + queries] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors of floats hold NaN."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def fill(x: Tensor) -> Tensor:
        return x.fill_(float("nan")) if x.is_floating_point() else x

    torch.empty = lambda *args, **named: fill(empty(*args, **named))
    torch.Tensor.new_empty = lambda *args, **named: fill(new_empty(*args, **named))
    try:
        yield
    finally:
        torch.empty, torch.Tensor.new_empty = empty, new_empty


CHECKS = [
    ("A decode", (32, 8, 128), {}, [(1000, 1), (1, 1), (64, 1), (65, 1), (4097, 1), (0, 1)]),
    ("A one row", (32, 8, 128), {}, [(9000, 1)]),
    ("A many rows", (32, 8, 128), {}, [(100 + 7 * i, 1) for i in range(100)]),
    ("A mixed", (32, 8, 128), {}, [(300, 1), (70, 1), (200, 4), (500, 500), (1500, 300), (3, 3)]),
    ("C short chunk of many keys", (16, 8, 128), {}, [(8000, 16)]),
    ("window", (8, 2, 64), {"window": 100}, [(1000, 1), (50, 1), (700, 300)]),
    ("window, sinks", (16, 2, 64), {"window": 128, "sinks": True}, [(1000, 1), (50, 1), (700, 300)]),
    ("soft cap", (8, 4, 256), {"soft_cap": 30.0}, [(700, 1), (600, 300)]),
    ("group of 7, 80 wide", (14, 2, 80), {}, [(700, 1), (600, 300)]),
    ("not causal", (4, 4, 64), {"causal": False}, [(700, 1), (600, 300)]),
]


def check_all(results: list[dict], part: slice = slice(None)) -> None:
    """All checks in bfloat16, every third in float16 and float32 too."""
    cases = [(check, "bfloat16") for check in CHECKS] + list(product(CHECKS[::3], ("float16", "float32")))
    for (name, sizes, rules, rows), dtype in cases[part]:
        spec = spec_of(*sizes, dtype=dtype, **rules)
        batch, blocks = batch_of(rows, slack=5)
        torch.manual_seed(time.time_ns() % (1 << 31))
        made = torch_dtype(dtype)
        pool = torch.randn(blocks, 2, BLOCK, *spec.layout.spec.parts[0].shape, device=device).to(made)
        pool[0] = float("nan")
        cache = Cache(pool, 0, blocks)
        q, k, v = (
            torch.randn(batch.num_tokens, n, spec.head_dim, device=device).to(made)
            for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        sinks = torch.randn(spec.num_heads, device=device).to(made) if spec.sinks else None
        attention = TritonAttention(spec, target())
        with poisoned():
            plan = attention.plan(batch)
            attention.write(cache, k, v, plan)
            out = attention.forward(q, cache, plan, sinks)
        want = dense(spec, q, cache, batch, rows, sinks)
        written = batch.slots_dev.long()
        kept = torch.equal(cache.parts[0][written // BLOCK, written % BLOCK][written > 0], k[written > 0])
        error = float((out.double() - want).norm() / want.norm())
        limit = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 3e-6}[dtype]
        results.append({"check": name, "dtype": dtype, "error": error, "ok": bool(error < limit and kept)})
        print(f"{'ok  ' if results[-1]['ok'] else 'BAD '} {name:28s} {dtype:9s} {error:.1e}", flush=True)


WHOLE_CHECKS = [
    ("A one kernel", (32, 8, 128), {}, [(1000, 1), (1, 1), (64, 1), (65, 1), (4097, 1), (0, 1), (2, 1)]),
    ("A one kernel, one row", (32, 8, 128), {}, [(9000, 1)]),
    ("A one kernel, many rows", (32, 8, 128), {}, [(100 + 7 * i, 1) for i in range(300)]),
    ("C one kernel", (16, 8, 128), {}, [(208, 1)] * 64),
    ("one kernel, window, sinks", (16, 2, 64), {"window": 128, "sinks": True}, [(1000, 1), (50, 1), (129, 1)]),
    ("one kernel, soft cap", (8, 4, 256), {"soft_cap": 30.0}, [(700, 1), (33, 1)]),
    ("one kernel, 7 of 80", (14, 2, 80), {}, [(700, 1), (81, 1)]),
    ("one kernel, 16 of 96", (16, 1, 96), {}, [(700, 1), (81, 1)]),
]


def turned(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, heads: int) -> Tensor:
    """The first ``heads`` of x's heads, normed where there is a weight and rotated, in float32, rounded after each."""
    y = x[:, :heads].float()
    if weight is not None:
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype).float()
    a, b = y.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def check_whole(results: list[dict], part: slice = slice(None)) -> None:
    """One kernel against rotation in float32 and attention in float64: each case with the table's tiles, those of A
    and C with every variant's too; half with a norm."""
    plain = [(check, Variant(whole=True)) for check in WHOLE_CHECKS]
    cases = plain + [(check, v) for check in WHOLE_CHECKS[:4] for v in WHOLE[2:]]
    for number, ((name, sizes, rules, rows), variant) in list(enumerate(cases))[part]:
        spec = spec_of(*sizes, **rules)
        batch, blocks = batch_of(rows, slack=5)
        heads, size, count = spec.num_heads + spec.num_kv_heads, spec.head_dim, batch.num_tokens
        norm = RmsNormSpec(dtype=spec.dtype, size=size, eps=1e-6) if number % 2 else None
        rope = RopeSpec(dtype=spec.dtype, head_dim=size, rotary_dim=size)
        pool = torch.randn(blocks, 2, BLOCK, spec.num_kv_heads, size, device=device).bfloat16()
        pool[0] = float("nan")
        cache, slots = Cache(pool, 0, blocks), batch.slots_dev.long()
        for each in cache.parts:
            each[slots // BLOCK, slots % BLOCK] = float("nan")
        x = torch.randn(count, heads + spec.num_kv_heads, size, device=device).bfloat16()
        weight = torch.randn(heads, size, device=device).bfloat16() if norm else None
        angle = torch.randn(count, size // 2, device=device)
        sinks = torch.randn(spec.num_heads, device=device).bfloat16() if spec.sinks else None
        attention = TritonAttention(spec, target())
        attention.decode_tiles, attention.programs_wanted = variant.tiles, variant.wanted
        with poisoned():
            plan = attention.plan(batch)
            fused = RotateAndAttend(norm, rope, spec, target())
            out = fused(x, weight, angle.cos(), angle.sin(), cache, plan, sinks)
        want = turned(x, weight, angle.cos(), angle.sin(), 1e-6, heads)
        k, v = (each[slots // BLOCK, slots % BLOCK][slots > 0] for each in cache.parts)
        right = want[:, spec.num_heads :][slots > 0].float()
        kept = float((k.float() - right).norm() / right.norm()) < 6e-3 and torch.equal(v, x[:, heads:][slots > 0])
        exact = dense(spec, want[:, : spec.num_heads], cache, batch, rows, sinks)
        error = float((out.double() - exact).norm() / exact.norm())
        results.append({"check": name, "variant": str(variant), "error": error, "ok": bool(error < 8e-3 and kept)})
        print(f"{'ok  ' if results[-1]['ok'] else 'BAD '} {name:28s} {variant!s:18s} {error:.1e} {kept}", flush=True)
