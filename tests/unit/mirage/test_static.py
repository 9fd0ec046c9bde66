"""The static profile: its buckets, and the faults that they have to catch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drivetrain_api.v1 import AttentionBatch, AttentionSpec, CachePart, CacheSpec, ConfigView, LinearSpec
from drivetrain_mirage.rules import RuleError
from drivetrain_mirage.static import ShapeGuard, shape_policy

VIEW = {"max_num_seqs": 40, "max_num_batched_tokens": 1024, "max_model_len": 4096}
KV = CacheSpec(kind="full", parts=tuple(CachePart(name=n, shape=(1, 4), dtype="float32") for n in "kv"))


def linear_of(backend, role="down"):
    spec = LinearSpec(dtype="float32", in_features=4, out_features=3, role=role)
    linear = backend.provide(spec).implementation
    return linear, linear.pack(backend.device.zeros((3, 4), torch.float32), None)


def attention_of(backend):
    layout = backend.storage.layout(KV, 128)
    spec = AttentionSpec(
        dtype="float32", num_heads=1, num_kv_heads=1, head_dim=4, v_head_dim=4, scale=1.0, layout=layout
    )
    return backend.provide(spec).implementation


def batch(runtime, tokens, rows, blocks, dtype=np.int32):
    query_start = np.minimum(np.arange(rows + 1), tokens).astype(np.int32)
    query_start[-1] = tokens
    return AttentionBatch(
        query_start_dev=runtime.from_host(query_start.astype(dtype)),
        lengths_dev=runtime.from_host(np.zeros(rows, dtype)),
        block_table_dev=runtime.from_host(np.zeros((rows, blocks), dtype)),
        slots_dev=runtime.from_host(np.zeros(tokens, dtype)),
        token_row_dev=runtime.from_host(np.zeros(tokens, dtype)),
        positions_dev=runtime.from_host(np.zeros(tokens, dtype)),
        query_start_host=query_start,
        length_bounds_host=np.zeros(rows, np.int32),
        host_lengths_exact=True,
        num_decode_rows=rows,
        num_verify_rows=0,
        num_prefill_rows=0,
        max_query_len=1,
        max_length_bound=0,
    )


@pytest.mark.parametrize("seqs", [1, 7, 8, 16, 256])
@pytest.mark.parametrize("length", [0, 100, 5000])
def test_the_largest_step_fits(seqs, length):
    policy = shape_policy(ConfigView(max_num_seqs=seqs, max_num_batched_tokens=64, max_model_len=length))
    assert policy.rows[-1] == seqs + 1 and policy.tokens[-1] >= max(64, seqs + 1)
    assert policy.blocks_per_row[-1] == -(-(length or 32768) // 128)
    assert set(policy.rows) <= set(policy.tokens), "a decode step can be captured"
    for buckets in (policy.rows, policy.tokens, policy.blocks_per_row):
        assert list(buckets) == sorted(set(buckets))
    assert not policy.dynamic and policy.compile_budget <= 24


def test_other_shapes_are_refused(open_backend):
    backend = open_backend(static=True, **VIEW)
    runtime, policy = backend.device, backend.shapes
    assert policy.tokens == (8, 41, 128, 1024) and policy.rows == (8, 41) and policy.blocks_per_row == (4, 32)
    linear, packed = linear_of(backend)
    linear.apply(runtime.zeros((41, 4), torch.float32), packed)
    with pytest.raises(RuleError, match=r"shape-buckets.*down linear over 9 rows"):
        linear.apply(runtime.zeros((9, 4), torch.float32), packed)
    attention = attention_of(backend)
    attention.plan(batch(runtime, 128, 41, 32))
    for shape, what in (((100, 41, 32), "100 tokens"), ((128, 9, 32), "9 rows"), ((128, 41, 5), "5 blocks a row")):
        with pytest.raises(RuleError, match=f"shape-buckets.*{what}"):
            attention.plan(batch(runtime, *shape))


def test_nothing_new_after_ready(open_backend):
    backend = open_backend(static=True, **VIEW)
    runtime, attention = backend.device, attention_of(backend)
    linear, packed = linear_of(backend)
    attention.plan(batch(runtime, 8, 8, 4))
    linear.apply(runtime.zeros((8, 4), torch.float32), packed)
    graph, _ = backend.graphs.capture(lambda: packed.data[0] + 1)
    backend.ready()
    attention.plan(batch(runtime, 8, 8, 4))
    linear.apply(runtime.zeros((8, 4), torch.float32), packed)
    graph.replay()
    late = pytest.raises(RuleError, match="no-late-compile")
    with late:
        attention.plan(batch(runtime, 128, 8, 4))
    with late:
        linear.apply(runtime.zeros((41, 4), torch.float32), packed)
    with late:
        backend.graphs.capture(lambda: packed.data[0] + 1)
    runtime.synchronize()


def test_torch_ops_with_new_shapes_are_refused_where_strict(open_backend):
    backend = open_backend(static=True, options={"strict_shapes": True}, **VIEW)
    x, y = (backend.device.zeros((n,), torch.float32) for n in (4, 5))
    _ = x + 1
    backend.ready()
    _ = x + 1
    with pytest.raises(RuleError, match=r"no-late-compile.*aten.add"):
        _ = y + 1
    with pytest.raises(RuleError, match="no-late-compile"):
        y.add_(1)


def test_the_compile_budget_is_kept():
    policy = shape_policy(ConfigView(**VIEW))
    guard = ShapeGuard(type(policy)(tokens=(1, 2), rows=(1,), blocks_per_row=(1, 2), compile_budget=3), strict=False)
    for shape in ((1, 1, 1), (2, 1, 1), (1, 1, 1), (1, 1, 2)):
        guard.step(*shape)
    with pytest.raises(RuleError, match="compile-budget"):
        guard.step(2, 1, 2)


def test_int64_attention_inputs_are_refused(open_backend):
    backend = open_backend(static=True, **VIEW)
    with pytest.raises(RuleError, match="int32-slots"):
        attention_of(backend).plan(batch(backend.device, 8, 8, 4, np.int64))


def test_a_captured_plan_follows_its_batch(open_backend):
    """Attention of a graph reads what lies in its batch's tensors when it is replayed."""
    backend = open_backend(static=True, **VIEW)
    runtime, attention = backend.device, attention_of(backend)
    cache = backend.storage.allocate(backend.storage.layout(KV, 128), 3)
    v = runtime.from_host(np.arange(8, dtype=np.float32)[:, None, None] + np.zeros((8, 1, 4), np.float32))
    slots = runtime.from_host((128 + np.arange(8)).astype(np.int32))
    cache.write(slots, (v * 0, v))
    start = batch(runtime, 8, 8, 4)
    plan = attention.plan_for_capture(start)
    q = runtime.zeros((8, 1, 4), torch.float32)
    graph, out = backend.graphs.capture(lambda: attention.forward(q, cache, plan))

    def at(length):
        table = np.zeros((8, 4), np.int32)
        table[0, 0] = 1
        lengths, positions = np.zeros(8, np.int32), np.zeros(8, np.int32)
        lengths[0], positions[0] = length, length - 1
        for own, value in (
            (start.lengths_dev, lengths),
            (start.positions_dev, positions),
            (start.block_table_dev, table),
        ):
            own.copy_(runtime.from_host(value))
        graph.replay()
        return runtime.to_host([out]).get()[0]

    for length in (1, 4, 7):
        got = at(length)
        assert np.allclose(got[0], np.arange(length).mean()) and (got[1:] == 0).all()
