"""Paged attention by Triton kernels, through the interpreter, against float64."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drivetrain.ops.cases import attention as cases
from drivetrain.ops.cases.source import Source
from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import AttentionSpec, Decline, Provided, torch_runtime, torch_storage
from drivetrain_triton.target import INTERPRETER, Target
from tests.unit.ops.judges import check
from tests.unit.triton.interpreted import interpreted

with interpreted():
    import drivetrain_triton
    from drivetrain_triton import attention as native

RUNTIME = torch_runtime("cpu")
REF = REFERENCE["attention.paged/1"]
NARROW = replace(INTERPRETER, multiprocessors=1)  # one share a row, whatever its length
WIDE = replace(INTERPRETER, multiprocessors=64)  # several


def place(block_tokens=16):
    return Place(runtime=RUNTIME, storage=torch_storage(RUNTIME, (block_tokens,), "int32"))


def provided(spec, target=INTERPRETER):
    answer = native.provide_attention(spec, target)
    assert isinstance(answer, Provided), answer
    return answer.implementation


@pytest.fixture(autouse=True)
def poisoned():
    """New tensors are full of NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_cases(dtype):
    for case in REF.cases(place(), dtype, 31):
        check(case, case.run(provided(case.spec)), REF.tolerance(dtype))


def run(shape, rows, dtype="float32", block_tokens=16, target=INTERPRETER, seed=1, slack=2):
    """Check one batch of (length, queries) rows; -> the plan that it took."""
    where, source = place(block_tokens), Source(dtype, seed)
    spec = cases.make_spec(where, shape, dtype)
    made = cases.make_rows(rows, block_tokens, slack, source.random)
    case = cases.attention_case(where, str(rows), spec, made, source)
    implementation, plans = provided(spec, target), []
    plan = implementation.plan

    class Watched:
        write, forward = implementation.write, implementation.forward

        @staticmethod
        def plan(batch):
            plans.append(plan(batch))
            return plans[-1]

    check(case, case.run(Watched), REF.tolerance(dtype))
    return plans[0]


def shape(heads=4, kv_heads=2, size=16, v_size=None, **rules):
    return cases.Shape(heads=heads, kv_heads=kv_heads, head_dim=size, v_head_dim=v_size or size, **rules)


MIXED = ((70, 1), (1, 1), (140, 1), (33, 3), (90, 40))


@pytest.mark.parametrize("rules", [{}, {"window": 70}, {"window": 5, "sinks": True}, {"soft_cap": 3.0, "sinks": True}])
@pytest.mark.parametrize("target", [NARROW, WIDE])
def test_shares(target, rules):
    """One share and several of the same rows; windows that begin inside a tile, sinks that join once."""
    plan = run(shape(**rules), MIXED, target=target)
    assert (plan.decode.splits > 1) is (target is WIDE)
    assert plan.decode.tokens == 3 and plan.prefill.tokens == 43


def test_shares_of_chunks():
    """A short chunk over many keys is cut too, its parts put together, and empty shares count nothing."""
    for rules in ({}, {"window": 400, "sinks": True}):
        plan = run(shape(heads=2, kv_heads=1, **rules), ((90, 1), (900, 3), (5, 5)), target=WIDE)
        assert plan.prefill.splits > 1 and plan.prefill.base == 1


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8])
def test_groups(group):
    run(shape(heads=2 * group), ((40, 1), (70, 30)))


@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_sizes(size, dtype):
    run(shape(size=size), ((40, 1), (70, 30)), dtype=dtype)


@pytest.mark.parametrize("block_tokens", [32, 128])
def test_block_sizes(block_tokens):
    run(
        shape(size=32, v_size=64, window=50), ((200, 1), (0, 1), (150, 40)), dtype="bfloat16", block_tokens=block_tokens
    )


def test_windows_at_every_place_of_a_tile():
    """Query tiles whose window begins before, in and after a tile of keys, with full tiles between."""
    for window in (1, 64, 65, 130):
        run(shape(heads=1, kv_heads=1, window=window), ((200, 70),), target=NARROW)
    run(shape(heads=1, kv_heads=1, window=40, causal=False), ((100, 1), (150, 70)), target=NARROW)


def test_last_share_adds_all():
    """Groups padded to a power of two, shares that a row does not have, more shares than are loaded at once."""
    for heads, rules in ((6, {}), (2, {"sinks": True, "window": 500})):
        plan = run(
            shape(heads=heads, kv_heads=1, size=128, **rules), ((1100, 1), (70, 1), (0, 1), (130, 1)), target=WIDE
        )
        assert plan.decode.splits > 8 and not plan.decode.arrivals.any()


def test_padding_tokens_and_rows():
    run(shape(), ((9, 1), (0, 1), (0, 0)))
    run(shape(), ((9, 1), (20, 7), (0, 6)))
    run(shape(), ((0, 6), (0, 5)))


def test_half():
    run(shape(size=64, soft_cap=20.0), MIXED, dtype="float16")


def test_blocks_apart_and_strided_inputs():
    """Layers side by side in one pool: blocks far apart; q, k and v as slices of one product."""
    where, source = place(), Source("float32", 5)
    spec = cases.make_spec(where, shape(), "float32")
    rows = cases.make_rows(((40, 1), (70, 30)), 16, 0, source.random)
    pool = where.storage.allocate_pool(rows.num_blocks * 3 * spec.layout.bytes_per_block)
    caches = [
        where.storage.view(pool, spec.layout, 3 * spec.layout.bytes_per_block, i * spec.layout.bytes_per_block)
        for i in range(3)
    ]
    batch = cases.make_batch(where, rows, "int32")
    reference, fast = REF.make(spec), provided(spec)
    past = torch.as_tensor(np.concatenate([rows.slots(0, 0, 39), rows.slots(1, 0, 40)]).astype(np.int32))
    outs = []
    x = source.normal(31, 8, 16)
    old = [source.normal(79, 2, 16), source.normal(79, 2, 16)]
    for cache, op in ((caches[0], reference), (caches[1], fast)):
        cache.write(past, old)
        plan = op.plan(batch)
        op.write(cache, x[:, 4:6], x[:, 6:], plan)
        outs.append(op.forward(x[:, :4], cache, plan))
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    assert not any(part.any() for part in caches[2].parts)


def test_captured_plan_serves_other_lengths():
    """A plan made at the largest bounds keeps its tensors; only their contents change between replays."""
    where, source = place(), Source("float32", 6)
    spec = cases.make_spec(where, shape(), "float32")
    rows = cases.make_rows(((200, 1), (130, 1)), 16, 0, source.random)
    batch = cases.make_batch(where, rows, "int32")
    fast, reference = provided(spec, WIDE), REF.make(spec)
    plan = fast.plan_for_capture(batch)
    assert plan.decode.splits > 1 and plan.prefill is None
    cache = where.storage.allocate(spec.layout, rows.num_blocks)
    cache.write(torch.arange(rows.num_blocks * 16), [source.normal(rows.num_blocks * 16, 2, 16) for _ in range(2)])
    q = source.normal(2, 4, 16)
    for lengths in ((200, 130), (1, 64), (65, 0)):
        batch.lengths_dev.copy_(torch.tensor(lengths))
        batch.positions_dev.copy_(torch.tensor(lengths) - 1)
        want = reference.forward(q, cache, reference.plan(batch))
        torch.testing.assert_close(fast.forward(q, cache, plan), want, rtol=1e-5, atol=1e-5)


def test_captured_plan_of_several_tokens_serves_other_rows():
    """One graph of 12 tokens in 3 rows: replays share them out differently, and leave some to a padded row."""
    where, source = place(), Source("float32", 7)
    spec = cases.make_spec(where, shape(), "float32")
    rows = cases.make_rows(((90, 4), (70, 4), (130, 4)), 16, 0, source.random)
    batch = cases.make_batch(where, rows, "int32")
    fast, reference = provided(spec, WIDE), REF.make(spec)
    plan = fast.plan_for_capture(batch)
    assert plan.decode is None and plan.prefill.rows == 3 and plan.prefill.tokens == 12
    cache = where.storage.allocate(spec.layout, rows.num_blocks)
    cache.write(torch.arange(rows.num_blocks * 16), [source.normal(rows.num_blocks * 16, 2, 16) for _ in range(2)])
    q = source.normal(12, 4, 16)
    for lengths, queries in (((90, 70, 130), (4, 4, 4)), ((33, 64, 128), (1, 1, 10)), ((90, 7, 0), (1, 7, 4))):
        start = np.cumsum([0, *queries])
        batch.lengths_dev.copy_(torch.tensor(lengths))
        batch.query_start_dev.copy_(torch.tensor(start))
        at = [torch.arange(n - k, n).clamp(min=0) for n, k in zip(lengths, queries, strict=True)]
        batch.positions_dev.copy_(torch.cat(at))
        now = replace(batch, query_start_host=start.astype(np.int32), length_bounds_host=np.asarray(lengths, np.int32))
        want = reference.forward(q, cache, reference.plan(now))
        torch.testing.assert_close(fast.forward(q, cache, plan), want, rtol=1e-5, atol=1e-5)


def test_captured_short_chunks_are_cut_for_the_few_rows_that_may_be_there():
    """Eight rows of 16 tokens are captured, one has many keys; shares of short rows leave no sums, and none is read."""
    where, source = place(), Source("float32", 9)
    spec = cases.make_spec(where, shape(heads=2, kv_heads=1), "float32")
    rows = cases.make_rows(((700, 4), (4, 4), (4, 4), (4, 4)), 16, 0, source.random)
    batch = replace(cases.make_batch(where, rows, "int32"), max_length_bound=4096)
    fast, reference = provided(spec, replace(INTERPRETER, multiprocessors=8)), REF.make(spec)
    plan = fast.plan_for_capture(batch)
    assert plan.prefill.splits == 8 > fast.plan(batch).prefill.splits
    cache = where.storage.allocate(spec.layout, rows.num_blocks)
    cache.write(torch.arange(rows.num_blocks * 16), [source.normal(rows.num_blocks * 16, 1, 16) for _ in range(2)])
    q = source.normal(16, 2, 16)
    want = reference.forward(q, cache, reference.plan(batch))
    torch.testing.assert_close(fast.forward(q, cache, plan), want, rtol=1e-5, atol=1e-5)
    assert plan.prefill.partial[4:, :, 1:].isnan().all(), "a share without keys was written"


def fp8_spec(where, dtype="bfloat16"):
    spec = cases.make_spec(where, shape(), dtype)
    parts = tuple(replace(part, dtype="float8_e4m3fn") for part in spec.layout.spec.parts)
    return replace(spec, layout=where.storage.layout(replace(spec.layout.spec, parts=parts), 16))


def test_fp8_cache():
    where, source = place(), Source("bfloat16", 8)
    spec = fp8_spec(where)
    rows = cases.make_rows(((40, 1), (50, 50)), 16, 0, source.random)
    batch = cases.make_batch(where, rows, "int32")
    cache = where.storage.allocate(spec.layout, rows.num_blocks)
    past = torch.as_tensor(rows.slots(0, 0, 39))
    cache.write(past, [source.normal(39, 2, 16) for _ in range(2)])
    # Values that fp8 holds: the interpreter's own conversion does not round to nearest.
    k, v = (source.normal(51, 2, 16).to(torch.float8_e4m3fn).to(torch.bfloat16) for _ in range(2))
    q = source.normal(51, 4, 16)
    fast, reference = provided(spec), REF.make(spec)
    plan = fast.plan(batch)
    fast.write(cache, k, v, plan)
    for part, value in zip(cache.read(batch.slots_dev), (k, v), strict=True):
        torch.testing.assert_close(part.float(), value.to(torch.float8_e4m3fn).float(), rtol=0, atol=0)
    got, want = fast.forward(q, cache, plan), reference.forward(q, cache, reference.plan(batch))
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1.6e-2)


def test_what_is_declined():
    where = place()
    spec = cases.make_spec(where, shape(), "bfloat16")
    old = Target(kind="cuda", arch=80, multiprocessors=108, shared_bytes=163 << 10)
    wide = cases.make_spec(where, shape(size=512), "bfloat16")
    opaque = replace(spec, layout=replace(spec.layout, strided=False))
    for bad, target, word in (
        (replace(spec, latent=True), INTERPRETER, "latent"),
        (replace(spec, dtype="float64"), INTERPRETER, "float64"),
        (wide, INTERPRETER, "256"),
        (opaque, INTERPRETER, "opaque"),
        (fp8_spec(where), old, "89"),
        (replace(spec, scale=0.0), old, "scale"),
    ):
        answer = native.provide_attention(bad, target)
        assert isinstance(answer, Decline) and word in answer.reason
    assert isinstance(native.provide_attention(spec, old), Provided)
    assert isinstance(spec, AttentionSpec)


def test_a_description_does_not_keep_a_cache(monkeypatch):
    made = []
    stream = SimpleNamespace(fits=lambda part: True, boxes=lambda part: made.append(part) or SimpleNamespace(base=part))
    monkeypatch.setattr(drivetrain_triton, "attention_stream", stream, raising=False)
    where = place()
    spec = cases.make_spec(where, shape(size=128), "bfloat16")
    attention = provided(spec)
    cache = where.storage.allocate(spec.layout, 3)
    first = attention._described(cache)
    assert first is attention._described(cache) and [box.base for box in first] == made == list(cache.parts)
    kept = weakref.ref(made[0])
    made.clear()
    del first, cache
    gc.collect()
    assert kept() is None
