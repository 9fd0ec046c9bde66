"""Head norms, rotary positions and the cache's write in one kernel, against the references one after another."""

from dataclasses import replace

import pytest
import torch

from drivetrain.ops.cases import attention as cases
from drivetrain.ops.cases.source import Source
from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import RmsNormSpec, RopeSpec, torch_runtime, torch_storage
from drivetrain_triton.target import INTERPRETER
from tests.unit.triton.interpreted import interpreted

with interpreted():
    from drivetrain_triton import attention, attention_rotate

RUNTIME = torch_runtime("cpu")
PLACE = Place(runtime=RUNTIME, storage=torch_storage(RUNTIME, (16,), "int32"))
NORM, ROPE, ATTENTION = (REFERENCE[name] for name in ("norm.rms/1", "rope.apply/1", "attention.paged/1"))
STEP = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2e-6}


@pytest.fixture(autouse=True)
def poisoned():
    """New tensors are full of NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def specs_of(dtype, size, rotary=None, style="halves", heads=4, kv_heads=2, **norm):
    shape = cases.Shape(heads=heads, kv_heads=kv_heads, head_dim=size, v_head_dim=size)
    rope = RopeSpec(dtype=dtype, head_dim=size, rotary_dim=rotary or size, style=style)
    rms = RmsNormSpec(dtype=dtype, size=size, eps=1e-6, **norm)
    return rms, rope, cases.make_spec(PLACE, shape, dtype)


def unfused(specs, x, weight, cos, sin):
    """-> q, k, v, each step rounded."""
    norm, rope, spec = specs
    turned, v = x[:, : spec.num_heads + spec.num_kv_heads], x[:, spec.num_heads + spec.num_kv_heads :]
    if weight is not None:
        turned = NORM.make(norm)(turned, weight)
    turned = ROPE.make(rope)(turned, cos, sin)
    return turned[:, : spec.num_heads], turned[:, spec.num_heads :], v


def compare(specs, rows, normed, seed=3, stride=0):
    _, rope, spec = specs
    source = Source(spec.dtype, seed)
    fused = attention_rotate.RotateAndWrite(specs[0] if normed else None, *specs[1:], INTERPRETER)
    made = cases.make_rows(rows, 16, 0, source.random)
    batch = cases.make_batch(PLACE, made, "int32")
    tokens, heads = batch.num_tokens, spec.num_heads + 2 * spec.num_kv_heads
    x = source.normal(tokens, heads * spec.head_dim + stride, scale=3.0)[:, : heads * spec.head_dim]
    x = x.unflatten(1, (heads, spec.head_dim))
    weight = source.normal(spec.num_heads + spec.num_kv_heads, spec.head_dim) if normed else None
    angle = source.normal(tokens, rope.rotary_dim // 2, dtype="float32")
    cos, sin = angle.cos(), angle.sin()
    cache = PLACE.storage.allocate(spec.layout, made.num_blocks)
    plan = attention.TritonAttention(spec, INTERPRETER).plan(batch)
    q = fused(x, weight, cos, sin, cache, plan)
    written = batch.slots_dev > 0
    k, v = (part[written] for part in cache.read(batch.slots_dev))
    want_q, want_k, want_v = unfused(specs, x, weight, cos, sin)
    step = STEP[spec.dtype]
    torch.testing.assert_close(q, want_q, rtol=step, atol=step)
    torch.testing.assert_close(k, want_k[written], rtol=step, atol=step)
    assert torch.equal(v, want_v[written])
    beyond = [part.flatten(0, 1)[16:] for part in cache.parts]
    beyond = [rest[~torch.isin(torch.arange(16, 16 * made.num_blocks), batch.slots_dev)] for rest in beyond]
    assert not any(rest.any() for rest in beyond)


ROWS = ((5, 1), (40, 1), (30, 9), (0, 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("normed", [False, True])
def test_as_one_after_another(dtype, normed):
    for size in (16, 128):
        compare(specs_of(dtype, size), ROWS, normed)


@pytest.mark.parametrize(
    "norm", [{"offset": 1.0}, {"round_before_weight": True}, {"offset": 1.0, "round_before_weight": True}]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_norms(norm, dtype):
    compare(specs_of(dtype, 32, **norm), ROWS, True)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("size", "rotary", "style"), [(64, 32, "halves"), (80, 40, "interleaved"), (80, 80, "halves")])
def test_parts_of_heads(size, rotary, style, normed):
    compare(specs_of("bfloat16", size, rotary, style), ROWS, normed, stride=16)


def test_many_tokens_and_heads():
    compare(specs_of("bfloat16", 16, heads=14, kv_heads=7), ((70, 70), (3, 1)), True)


def test_steps_of_more_tokens_than_a_grids_second_axis_has(monkeypatch):
    """CUDA allows 65535 programs on every axis but the first."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **named: None

    monkeypatch.setattr(attention_rotate, "rotate_kernel", Kernel())
    _, rope, spec = specs_of("bfloat16", 16)
    fused = attention_rotate.RotateAndWrite(None, rope, spec, INTERPRETER)
    cache = PLACE.storage.allocate(spec.layout, 2)
    tokens, angles = 70000, torch.empty(1)
    plan = attention.Plan(tokens=tokens, slots=torch.empty(0, dtype=torch.int32), decode=None, prefill=None)
    fused(torch.empty(tokens, 8, 16, dtype=torch.bfloat16), None, angles, angles, cache, plan)
    assert grids == [(tokens,)]


def test_value_heads_keep_nan_to_themselves():
    """An infinite value must not turn its neighbours to NaN on the way."""
    specs = specs_of("float32", 16)
    spec = specs[2]
    made = cases.make_rows(((1, 1),), 16, 0, Source("float32", 1).random)
    batch = cases.make_batch(PLACE, made, "int32")
    x = torch.ones(1, 8, 16)
    x[0, 6, 3] = float("inf")
    cache = PLACE.storage.allocate(spec.layout, made.num_blocks)
    plan = attention.TritonAttention(spec, INTERPRETER).plan(batch)
    fused = attention_rotate.RotateAndWrite(*specs, INTERPRETER)
    fused(x, torch.ones(6, 16), torch.ones(1, 8), torch.ones(1, 8), cache, plan)
    assert torch.equal(cache.read(batch.slots_dev)[1], x[:, 6:])


def test_what_is_not_fused():
    rms, rope, spec = specs_of("bfloat16", 64)
    fuse = attention_rotate.fuse_rotate
    assert fuse([], INTERPRETER) is None
    assert fuse([rms, rope], INTERPRETER) is None
    assert fuse([rms, spec], INTERPRETER) is None
    assert fuse([rope, replace(spec, v_head_dim=32)], INTERPRETER) is None
    assert fuse([replace(rms, size=128), rope, spec], INTERPRETER) is None
    assert fuse([replace(rope, head_dim=128), spec], INTERPRETER) is None
    assert fuse([rope, replace(spec, latent=True)], INTERPRETER) is None
    assert fuse([rope, spec, rms], INTERPRETER).count == 2
    assert fuse([rms, rope, spec], INTERPRETER).count == 3
