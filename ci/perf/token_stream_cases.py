"""Decode attention by bulk copies: variants, and each one's check against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from attention_cases import BLOCK, Cache, batch_of, dense, device, poisoned, spec_of, target, turned

from drivetrain_api.v1 import AttentionSpec, RmsNormSpec, RopeSpec
from drivetrain_triton.attention import TritonAttention
from drivetrain_triton.attention_choice import Stream, decode_tiles
from drivetrain_triton.attention_rotate import RotateAndAttend

SHAPES = {"A": (32, 8), "C": (16, 8), "G8": (64, 8), "G1": (4, 4), "G7": (14, 2), "KV16": (32, 16), "KV1": (4, 1)}
LENGTHS = [3000, 0, 1, 2, 15, 16, 17, 18, 207, 208, 209, 63, 64, 65, 66, 256, 257, 258, 1000]


@dataclass(frozen=True)
class Variant:
    """``stream``: None is the kernel that loads through registers. ``rows``: what it is timed at. ``carved``: first-
    level memory is to be shared memory as far as it can."""

    stream: Stream | None
    rows: tuple[int, ...]
    carved: bool = False

    def __str__(self) -> str:
        one, how = self.stream, ", carved" if self.carved else ""
        return "registers" if one is None else f"w{one.warps} t{one.tokens} s{one.stages} least {one.least}{how}"


MANY, FEW = (64, 256, 512), (1, 8, 64)
VARIANTS = [
    Variant(None, (1, 8, 64, 256, 512)),
    Variant(Stream(16, 1, 3), (8, *MANY)),
    Variant(Stream(16, 4, 4, 4), FEW),
    Variant(Stream(32, 8, 1), FEW),
    Variant(Stream(16, 1, 2), MANY),
    Variant(Stream(16, 1, 4), MANY),
    Variant(Stream(16, 8, 2, 2), FEW),
    Variant(Stream(16, 4, 2, 2), (1, 8, *MANY)),
    Variant(Stream(32, 1, 2), MANY),
    Variant(Stream(16, 2, 3), (8, *MANY)),
    Variant(Stream(32, 4, 2, 2), FEW),
    Variant(Stream(16, 1, 6), MANY),
    Variant(Stream(16, 2, 2), MANY),
    Variant(Stream(16, 4, 3, 2), (1, 8, *MANY)),
    Variant(Stream(32, 1, 3), MANY),
    Variant(Stream(32, 4, 1), FEW),
    Variant(Stream(16, 1, 3), MANY, carved=True),  # last: it changes kernels that others have too
]  # fmt: skip


def spec_named(name: str, dtype: str = "bfloat16") -> AttentionSpec:
    return spec_of(*SHAPES[name], 128, dtype)


def runner(spec: AttentionSpec, variant: Variant, batch: Any, normed: bool) -> tuple[RotateAndAttend, Any]:
    """What runs, and its plan."""
    planner = TritonAttention(spec, target())
    programs = batch.num_decode_rows * spec.num_kv_heads
    planner.decode_tiles = replace(decode_tiles(spec, target(), programs, True), stream=variant.stream)
    norm = RmsNormSpec(dtype=spec.dtype, size=128, eps=1e-6) if normed else None
    run = RotateAndAttend(norm, RopeSpec(dtype=spec.dtype, head_dim=128, rotary_dim=128), spec, target())
    return run, planner.plan(batch)


def inputs(spec: AttentionSpec, count: int, normed: bool) -> tuple[torch.Tensor, ...]:
    """x, weight, cos and sin."""
    dtype, heads = getattr(torch, spec.dtype), spec.num_heads + spec.num_kv_heads
    x = torch.randn(count, heads + spec.num_kv_heads, 128, device=device).to(dtype)
    angle = torch.randn(count, 64, device=device)
    return x, torch.randn(heads, 128, device=device).to(dtype) if normed else None, angle.cos(), angle.sin()


def filled(spec: AttentionSpec, batch: Any, blocks: int, lengths: list[int]) -> Cache:
    """A cache that holds NaN but for the tokens before each row's last."""
    dtype = getattr(torch, spec.dtype)
    pool = torch.full((blocks, 2, BLOCK, spec.num_kv_heads, 128), float("nan"), dtype=dtype, device=device)
    for row, length in enumerate(lengths):
        at = torch.arange(max(length - 1, 0), device=device)
        ids = batch.block_table_dev[row, at // BLOCK].long()
        pool[ids, :, at % BLOCK] = torch.randn(len(at), 2, spec.num_kv_heads, 128, device=device).to(dtype)
    return Cache(pool, 0, blocks)


def check(name: str, lengths: list[int], variant: Variant, normed: bool, slack: int, dtype: str) -> dict[str, Any]:
    """One case: relative error against float64, whether the new keys and values lie in the cache and nothing else was
    touched, and whether a second run has the same bits."""
    spec, rows = spec_named(name, dtype), [(length, 1) for length in lengths]
    batch, blocks = batch_of(rows, slack=slack)
    cache, slots = filled(spec, batch, blocks, lengths), batch.slots_dev.long()
    before = [part.clone() for part in cache.parts]
    x, weight, cos, sin = inputs(spec, len(lengths), normed)
    run, plan = runner(spec, variant, batch, normed)
    with poisoned():
        out, again = (run(x, weight, cos, sin, cache, plan).clone() for _ in range(2))
    heads = spec.num_heads + spec.num_kv_heads
    made = turned(x, weight, cos, sin, 1e-6, heads)
    held = slots > 0
    at = (slots[held] // BLOCK, slots[held] % BLOCK)
    k, v = (part[at] for part in cache.parts)
    right = made[held, spec.num_heads :].float()
    kept = float((k.float() - right).norm() / right.norm()) < 6e-3 and torch.equal(v, x[held, heads:])
    for part, old in zip(cache.parts, before, strict=True):
        now = part.clone()
        now[at] = old[at]
        kept = kept and torch.equal(now.nan_to_num(7.0), old.nan_to_num(7.0))
    exact = dense(spec, made[:, : spec.num_heads], cache, batch, rows, None)
    error = float((out.double() - exact).norm() / exact.norm())
    kept = kept and not bool(out[torch.tensor(lengths, device=device) == 0].any())
    counters = plan.decode.arrivals
    clean = counters is None or not bool(counters.any())
    limit = 8e-3 if dtype == "bfloat16" else 2e-3
    case = f"{name} {len(lengths)} rows{' normed' if normed else ''} {dtype}, {plan.decode.splits} shares"
    same = torch.equal(out, again)
    return {"check": case, "error": error, "kept": kept, "same": same, "clean": clean,
            "ok": bool(error < limit and kept and same and clean)}  # fmt: skip


def checks(number: int) -> list[Any]:
    """The cases of a variant; groups and numbers of heads beside A's and C's only of the first ones."""
    many = [100 + 7 * (i % 120) for i in range(300)]
    cases = [("A", LENGTHS, False, 5, "bfloat16"), ("A", many, False, 5, "bfloat16")]
    cases += [("C", LENGTHS, True, 5000, "bfloat16"), ("A", [9000], False, 5, "bfloat16")]
    if 0 < number < 6:
        cases += [(name, LENGTHS, number % 2 == 0, 5, "float16") for name in ("G8", "G1", "G7", "KV16", "KV1")]
        cases += [("C", [208] * 64, True, 5, "float16")]
    return cases
