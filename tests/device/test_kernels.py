"""Kernels for one chip that no small model reaches: sizes, tails and unwritten memory of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drivetrain_api.v1 import (
    AttentionBatch,
    AttentionSpec,
    CacheLayout,
    CachePart,
    CacheSpec,
    Decline,
    DrawSpec,
    GatedActivationSpec,
    LinearSpec,
    RmsNormSpec,
    RopeSpec,
    SamplingInputs,
)
from drivetrain_triton.attention_choice import Stream, Tiles

BLOCK = 16
ROWS = {
    "one prompt": [(300, 300)],
    "whole tiles": [(1024, 1024)],
    "beside decode rows": [(300, 1), (70, 1), (500, 500), (1500, 300), (130, 130)],
    "a row without length": [(300, 300), (0, 100)],
    "tails": [(2047, 900), (1000, 700), (77, 77)],
}


def spec_of(heads: int, kv_heads: int, dtype: str) -> AttentionSpec:
    parts = tuple(CachePart(name=name, shape=(kv_heads, 128), dtype=dtype) for name in "kv")
    layout = CacheLayout(
        spec=CacheSpec(kind="full", parts=parts),
        block_tokens=BLOCK,
        bytes_per_block=2 * BLOCK * kv_heads * 128 * 2,
        alignment=64,
        strided=True,
        slot_dtype="int32",
    )
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 128, "v_head_dim": 128, "scale": 128**-0.5}
    return AttentionSpec(dtype=dtype, layout=layout, **sizes)


def batch_of(rows: list[tuple[int, int]], device: torch.device) -> AttentionBatch:
    """Rows of (length, queries), those of one query first; blocks in a random order from 1 on."""
    lengths, queries = (np.asarray(each, np.int32) for each in zip(*rows, strict=True))
    start = np.cumsum([0, *queries]).astype(np.int32)
    needed = -(-lengths // BLOCK)
    table = np.zeros((len(rows), needed.max() + 1), np.int32)
    table[np.arange(table.shape[1])[None, :] < needed[:, None]] = np.random.default_rng(0).permutation(needed.sum()) + 1
    row = np.repeat(np.arange(len(rows)), queries).astype(np.int32)
    position = np.maximum(np.arange(start[-1]) - start[row] + (lengths - queries)[row], 0)
    slots = table[row, position // BLOCK] * BLOCK + position % BLOCK

    def dev(values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, np.int32), device=device)

    decode = int((queries == 1).sum())
    return AttentionBatch(
        query_start_dev=dev(start),
        lengths_dev=dev(lengths),
        block_table_dev=dev(table),
        slots_dev=dev(slots),
        token_row_dev=dev(row),
        positions_dev=dev(position),
        query_start_host=start,
        length_bounds_host=lengths,
        host_lengths_exact=True,
        num_decode_rows=decode,
        num_verify_rows=0,
        num_prefill_rows=len(rows) - decode,
        max_query_len=int(queries.max()),
        max_length_bound=int(lengths.max()),
    )


def bound(backend, spec):
    """The backend's own implementation."""
    answer = backend.provide(spec)
    if isinstance(answer, Decline):
        pytest.skip(f"the reference serves it: {answer.reason}")
    return answer.implementation


class Parts:
    """A cache whose slots hold NaN unless a row's token was written to them."""

    def __init__(self, spec: AttentionSpec, batch: AttentionBatch, rows: list[tuple[int, int]]) -> None:
        device, dtype = batch.slots_dev.device, getattr(torch, spec.dtype)
        shape = (int(batch.block_table_dev.max()) + 1, 2, BLOCK, spec.num_kv_heads, 128)
        pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
        for row, (length, _) in enumerate(rows):
            at = torch.arange(length, device=device)
            ids = batch.block_table_dev[row, at // BLOCK].long()
            pool[ids, :, at % BLOCK] = torch.randn(length, 2, spec.num_kv_heads, 128, device=device).to(dtype)
        self.parts = pool[:, 0], pool[:, 1]


def expected(spec: AttentionSpec, q: torch.Tensor, cache: Parts, batch: AttentionBatch, rows: list) -> torch.Tensor:
    """Causal attention in float64, a row at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, (length, queries) in enumerate(rows):
        if not length:
            continue
        at, begin = torch.arange(length, device=q.device), int(batch.query_start_host[row])
        ids = batch.block_table_dev[row, at // BLOCK].long()
        group = spec.num_heads // spec.num_kv_heads
        k, v = (part[ids, at % BLOCK].double().repeat_interleave(group, 1) for part in cache.parts)
        seen = at[None, :] <= torch.arange(length - queries, length, device=q.device)[:, None]
        scores = torch.einsum("qhd,khd->hqk", q[begin : begin + queries].double(), k) * spec.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[begin : begin + queries] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (16, 8), (14, 2), (4, 4)])
@pytest.mark.parametrize("name", ROWS)
def test_long_prompts_with_heads_of_128(backend, name, heads, kv_heads, dtype):
    rows, spec = ROWS[name], spec_of(heads, kv_heads, dtype)
    device = backend.device.device
    batch = batch_of(rows, device)
    cache = Parts(spec, batch, rows)
    attention = bound(backend, spec)
    q = torch.randn(batch.num_tokens, heads, 128, device=device).to(getattr(torch, dtype))
    got = attention.forward(q, cache, attention.plan(batch))
    torch.testing.assert_close(got.double(), expected(spec, q, cache, batch, rows), rtol=2e-2, atol=8e-3)


LENGTHS = {
    1: [3000],
    7: [0, 1, 15, 16, 17, 207, 3000],
    64: [207 + i % 3 for i in range(64)],
    300: [(0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 209)[i % 13] + 16 * (i // 150) for i in range(300)],
}
STREAMS = [None, Stream(16, 1, 2), Stream(16, 1, 3), Stream(32, 1, 2), Stream(16, 2, 3), Stream(16, 4, 4, 4),
           Stream(16, 4, 2, 2), Stream(16, 8, 2, 2), Stream(32, 8, 1), Stream(32, 4, 2)]  # fmt: skip


def normed_and_rotated(x, weight, cos, sin, heads):
    """The first heads of x in float32, rounded after the norm and after the rotation."""
    y = x[:, :heads].float()
    if weight is not None:
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype).float()
    a, b = y.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def planned(backend, spec, batch, stream):
    """A plan that has bulk copies bring the cache; None: as the table of sizes has it."""
    from drivetrain_triton.attention import TritonAttention  # not before: other tests have its kernels interpreted

    attention = bound(backend, spec)
    if not isinstance(attention, TritonAttention) or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no bulk copies of this kind here")
    attention.decode_streamed = True
    if stream is not None:
        attention.decode_tiles = Tiles(16, 32, 2, 3, ahead=True, stream=stream)
    plan = attention.plan(batch)
    assert plan.decode.tiles.stream is not None
    return plan


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype", "normed", "stream"),
    [(16, 8, "bfloat16", True, None), (64, 8, "float16", True, None), (4, 4, "float16", False, None),
     (14, 2, "bfloat16", True, None), (4, 1, "bfloat16", False, None), (32, 16, "bfloat16", False, None),
     *((32, 8, "bfloat16", False, stream) for stream in STREAMS)],
    ids=str,
)  # fmt: skip
def test_decode_rows_with_heads_of_128(backend, heads, kv_heads, dtype, normed, count, stream):
    """From the q/k/v product on; the cache holds NaN wherever no row has a token."""
    device, number, rows = backend.device.device, getattr(torch, dtype), [(length, 1) for length in LENGTHS[count]]
    spec, batch = spec_of(heads, kv_heads, dtype), batch_of(rows, device)
    plan, cache, slots = planned(backend, spec, batch, stream), Parts(spec, batch, rows), batch.slots_dev.long()
    places, held = (slots // BLOCK, slots % BLOCK), batch.lengths_dev > 0
    for part in cache.parts:
        part[places] = float("nan")
    before = [part.clone() for part in cache.parts]
    x = torch.randn(count, heads + 2 * kv_heads, 128, device=device).to(number)
    weight = torch.randn(heads + kv_heads, 128, device=device).to(number) if normed else None
    angle = torch.randn(count, 64, device=device)
    norm = [RmsNormSpec(dtype=dtype, size=128, eps=1e-6)] if normed else []
    fused = backend.fuse((*norm, RopeSpec(dtype=dtype, head_dim=128, rotary_dim=128), spec)).provided.implementation
    torch.use_deterministic_algorithms(True)  # new tensors hold NaN
    try:
        got, again = (fused(x, weight, angle.cos(), angle.sin(), cache, plan, None) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(got, again)
    made = normed_and_rotated(x, weight, angle.cos(), angle.sin(), heads + kv_heads)
    keys, values = (part[places][held] for part in cache.parts)
    torch.testing.assert_close(keys, made[held, heads:], rtol=1.6e-2, atol=1e-2)
    assert torch.equal(values, x[held, heads + kv_heads :])
    want = expected(spec, made[:, :heads], cache, batch, rows)
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=8e-3)
    assert float((got.double() - want).norm()) < 8e-3 * float(want.norm())
    for part, old in zip(cache.parts, before, strict=True):
        part[places] = float("nan")
        assert torch.equal(part.nan_to_num(7.0), old.nan_to_num(7.0))
    assert plan.decode.arrivals is None or not plan.decode.arrivals.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 31, 64])
@pytest.mark.parametrize(("outs", "ins", "bias"), [(640, 1024, False), (47, 264, True), (4096, 2056, False)])
def test_products_of_few_rows(backend, outs, ins, bias, rows, dtype):
    device, kind = backend.device.device, getattr(torch, dtype)
    spec = LinearSpec(dtype=dtype, in_features=ins, out_features=outs, bias=bias)
    linear = bound(backend, spec)
    weight = (torch.randn(outs, ins, device=device) * ins**-0.5).to(kind)
    terms = torch.randn(outs, device=device).to(kind) if bias else None
    packed = linear.pack(weight, terms)
    wide = torch.randn(rows, ins + 24, device=device).to(kind)
    for x in (wide[:, :ins].contiguous(), wide[:, 8 : 8 + ins], wide[:, 3 : 3 + ins]):
        want = x.double() @ weight.double().T + (0 if terms is None else terms.double())
        first, again = linear.apply(x, packed), linear.apply(x, packed)
        torch.testing.assert_close(first.double(), want, rtol=1.6e-2, atol=1e-2)
        assert torch.equal(first, again)
    claim = backend.fuse((spec, GatedActivationSpec(dtype=dtype, size=outs // 2, kind="silu"))) if not bias else None
    if claim is None:
        return
    fused = claim.provided.implementation
    both = (wide[:, :ins].double() @ weight.double().T).to(kind)
    gate, up = both.chunk(2, dim=1)
    want = torch.nn.functional.silu(gate.float()).to(kind).double() * up.double()
    got = fused.apply(wide[:, :ins].contiguous(), fused.pack(weight, None))
    torch.testing.assert_close(got.double(), want, rtol=3e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("rows", "outs", "ins"),
    [(65, 17000, 72), (128, 15360, 1032), (250, 14336, 264), (1000, 8448, 64), (3000, 5632, 520)],
)
def test_gated_products_of_many_rows(backend, rows, outs, ins, dtype, kind):
    device, number = backend.device.device, getattr(torch, dtype)
    linear = LinearSpec(dtype=dtype, in_features=ins, out_features=2 * outs, bias=False)
    claim = backend.fuse((linear, GatedActivationSpec(dtype=dtype, size=outs, kind=kind)))
    if claim is None:
        pytest.skip("not one op here")
    fused = claim.provided.implementation
    weight = (torch.randn(2 * outs, ins, device=device) * ins**-0.5).to(number)
    wide = torch.randn(rows, ins + 16, device=device).to(number)
    act = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }[kind]
    for x in (wide[:, :ins].contiguous(), wide[:, 8 : 8 + ins], wide[:, 3 : 3 + ins]):
        gate, up = (x.double() @ weight.double().T).to(number).chunk(2, dim=1)
        want = act(gate.double()).to(number).double() * up.double()
        got = fused.apply(x, fused.pack(weight, None))
        torch.testing.assert_close(got.double(), want, rtol=3e-2, atol=2e-2)


def head_of(backend, vocabulary: int, ins: int, dtype: str):
    """(the claim on a head and a greedy draw, the head alone, the draw alone)"""
    spec = LinearSpec(dtype=dtype, in_features=ins, out_features=vocabulary, role="lm_head", tied=True)
    draw = DrawSpec(dtype="float32", vocabulary=vocabulary)
    claim = backend.fuse((spec, draw))
    if claim is None:
        pytest.skip("not one op here")
    return claim.provided.implementation, bound(backend, spec), bound(backend, draw)


def greedy(rows: int, device: torch.device) -> SamplingInputs:
    each = torch.zeros(rows, device=device)
    facts = {"all_greedy": True, "any_top_k": False, "any_top_p": False, "any_min_p": False}
    return SamplingInputs(temperature=each, top_k=each.int(), top_p=each + 1, min_p=each, seed=each.long(),
                          position=each.int(), sample=each.int(), mask=None, **facts)  # fmt: skip


def best_twice(head, x, packed) -> tuple[torch.Tensor, torch.Tensor]:
    """What is written over the highest keys, twice alike."""
    torch.use_deterministic_algorithms(True)  # new tensors hold NaN, or the largest number
    try:
        (tokens, logits), again = head.best(x, packed), head.best(x, packed)
    finally:
        torch.use_deterministic_algorithms(False)
    assert tokens.dtype == torch.int32 and logits.dtype == torch.float32 and len(tokens) == len(logits) == len(x)
    assert torch.equal(tokens, again[0]) and torch.equal(logits.nan_to_num(7.0), again[1].nan_to_num(7.0))
    return tokens.long(), logits


@pytest.mark.parametrize("rows", [2, 3, 8, 64, 65, 256, 1000])
@pytest.mark.parametrize(
    ("vocabulary", "ins", "dtype"),
    [(1000, 264, "bfloat16"), (1000, 1024, "float16"), (151936, 1024, "bfloat16"), (128256, 520, "bfloat16")],
)
def test_greedy_tokens_without_logits(backend, vocabulary, ins, dtype, rows):
    """Against float64; up to 64 rows bit by bit those of the product and the draw apart."""
    device, number = backend.device.device, getattr(torch, dtype)
    head, linear, draw = head_of(backend, vocabulary, ins, dtype)
    weight = (torch.randn(vocabulary, ins, device=device) * ins**-0.5).to(number)
    packed, wide = linear.pack(weight, None), torch.randn(rows, ins + 24, device=device).to(number)
    for x in (wide[:, :ins].contiguous(), wide[:, 8 : 8 + ins], wide[:, 3 : 3 + ins]):
        right = x.double() @ weight.double().T
        (first, second), place = right.topk(2).values.unbind(1), right.argmax(1)
        tokens, logits = best_twice(head, x, packed)
        chosen = right.gather(1, tokens[:, None])[:, 0]
        assert ((first - chosen) <= 1e-3 * first.abs()).all()
        clear = first - second > 1e-3 * first.abs()
        assert clear.any() and torch.equal(tokens[clear], place[clear])
        torch.testing.assert_close(logits.double(), chosen, rtol=1e-3, atol=1e-3)
        if rows <= 64:
            apart = linear.apply(x, packed)
            assert torch.equal(tokens, draw(apart, greedy(rows, device), 0).long())
            assert torch.equal(logits, apart.gather(1, tokens[:, None])[:, 0])


@pytest.mark.parametrize("rows", [2, 8, 33, 64, 65, 200])
@pytest.mark.parametrize("vocabulary", [40, 1000, 151936])
def test_greedy_tokens_of_odd_logits(backend, vocabulary, rows):
    """Ties, rows without a number, infinite and negative logits; the vocabulary's end is within a tile."""
    ins, device = 72, backend.device.device
    head, linear, _ = head_of(backend, vocabulary, ins, "bfloat16")
    weight = (torch.randn(vocabulary, ins, device=device) * 0.1).bfloat16()
    weight[:, 0] = 1.0
    first, same = vocabulary // 3, (vocabulary // 3, vocabulary // 3 + 1, vocabulary // 2, vocabulary - 1)
    weight[list(same), 1:] = weight[first, 1:].sign() * 0.5
    packed, x = linear.pack(weight, None), torch.randn(rows, ins, device=device).bfloat16()
    last, odd = rows - 1, x.clone()
    x[:, 0] = 0.0
    x[last] = weight[first].sign() * 2.0
    tokens, logits = best_twice(head, x, packed)
    assert int(tokens[last]) == first and logits.isfinite().all(), "of equal ones the lowest"
    x[:, 0] = -300.0
    tokens, logits = best_twice(head, x, packed)
    assert (logits < -100.0).all() and (tokens < vocabulary).all() and int(tokens[last]) == first
    odd[last], odd[last, 0], odd[0] = 0.0, float("-inf"), float("nan")
    tokens, logits = best_twice(head, odd, packed)
    assert tokens[[0, last]].tolist() == [0, 0] and logits[0].isnan() and logits[last] == float("-inf")
    assert logits[1:last].isfinite().all()
    weight[vocabulary - 2, 5] = float("inf")
    x[:, 5], x[last, 5] = 1.0, 0.0
    tokens, logits = best_twice(head, x, packed)
    assert (tokens == vocabulary - 2).all(), "a logit that is no number is above all"
    assert logits[last].isnan() and torch.isposinf(logits[:last]).all()
