"""Kernels of ``--deterministic`` by the interpreter: right, and a row's bits the same in any company.

The interpreter's own matrix product is the host library's, whose order of summation hangs on its shape. Here every
element is summed in order, as the kernels rely on from the device.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from drivetrain.ops.cases import attention as cases
from drivetrain.ops.cases.source import Source
from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import (
    AttentionSpec,
    Decline,
    LogprobsSpec,
    Provided,
    RmsNormSpec,
    RopeSpec,
    torch_runtime,
    torch_storage,
)
from drivetrain_triton.target import INTERPRETER, Target
from tests.unit.ops.invariance import SHAPES, Sequence, check_rows
from tests.unit.ops.judges import check
from tests.unit.triton import interpreted as mended
from tests.unit.triton.interpreted import interpreted

with interpreted():
    from drivetrain_triton import attention_invariant as attention
    from drivetrain_triton import attention_rotate, linear_invariant, logprobs
    from drivetrain_triton.providers import provide_small

RUNTIME = torch_runtime("cpu")
REF = REFERENCE["attention.paged/1"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALONE = replace(INTERPRETER, multiprocessors=1)  # every program does all shares of its sums
WIDE = replace(INTERPRETER, multiprocessors=64)  # shares are spread over programs where rows are few


@pytest.fixture(autouse=True)
def poisoned():
    """New tensors are full of NaN: what no kernel wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def in_order(monkeypatch):
    """Products summed one after another."""

    def dot(self, a, b, d, *rest, **named):
        left, right = (mended.wide(one).astype(np.float32) for one in (a, b))
        total = d.data.astype(np.float32)
        for k in range(left.shape[1]):
            total = total + left[:, k : k + 1] * right[k : k + 1]
        return mended.Handle(total, d.dtype.scalar)

    monkeypatch.setattr(mended.Builder, "create_dot", dot)


def place(block_tokens=16):
    return Place(runtime=RUNTIME, storage=torch_storage(RUNTIME, (block_tokens,), "int32"))


def normal(*shape, dtype, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outs", "ins", "biased"), [(96, 1024, False), (47, 1352, True), (9, 5, False)])
def test_linear_agrees_with_float64(outs, ins, biased, dtype):
    weight, bias = normal(outs, ins, dtype=dtype, scale=ins**-0.5), normal(outs, dtype=dtype) if biased else None
    for rows, wanted in ((1, dtype), (17, torch.float32)):
        x = normal(rows, ins + 3, dtype=dtype)[:, 1 : 1 + ins]
        got = linear_invariant.invariant_linear(x, weight, bias, wanted, INTERPRETER)
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        rtol = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[wanted]
        assert got.dtype == wanted and got.shape == (rows, outs)
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=4 * rtol)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("outs", "ins", "biased"), [(130, 520, True), (24, 1100, False)])
def test_linear_rows_keep_their_bits(outs, ins, biased, dtype, in_order):
    weight, bias = normal(outs, ins, dtype=dtype, scale=ins**-0.5), normal(outs, dtype=dtype) if biased else None
    assert linear_invariant.shares_of(outs, ins)[0] > 1
    x = normal(71, ins, dtype=dtype, seed=5)

    def apply(rows, target=WIDE):
        return linear_invariant.invariant_linear(rows, weight, bias, dtype, target)

    alone = check_rows(apply, x[0], x[1:], sizes=(3, 17, 70))
    assert torch.equal(apply(x[:1], ALONE)[0], alone), "one program for all shares"
    order = torch.randperm(71, generator=torch.Generator().manual_seed(1))
    assert torch.equal(apply(x[order]), apply(x)[order])


def test_shares_hang_on_the_weight_alone_and_cover_it():
    for outs in (1, 64, 1024, 4096, 28672, 151936):
        for ins in (1, 5, 64, 255, 512, 1100, 4096, 14336):
            shares, size = linear_invariant.shares_of(outs, ins)
            assert (shares - 1) * size < ins <= shares * size and size % 64 == 0
            assert shares == 1 or size >= linear_invariant.SHORTEST
    assert linear_invariant.shares_of(4096, 4096) == (4, 1024) and linear_invariant.shares_of(28672, 4096)[0] == 1


def test_heights_of_tiles_keep_the_instruction():
    def target(arch):
        return Target(kind="cuda", arch=arch, multiprocessors=132, shared_bytes=227 << 10)

    for rows in (1, 16, 17, 64, 65, 4096):
        tiles = linear_invariant.tiles_of(rows, 4096, 2, target(90))
        assert tiles.outs == 128 and tiles.rows == 16 * tiles.warps  # m64n128k16, four warps each
        assert linear_invariant.tiles_of(rows, 4096, 2, target(100)) == linear_invariant.tiles_of(
            1, 4096, 2, target(100)
        )


def provided(spec, target=INTERPRETER):
    answer = attention.provide_invariant(spec, target)
    assert isinstance(answer, Provided) and answer.traits.batch_invariant and "invariant" in answer.label
    return answer.implementation


@pytest.fixture
def short_ranges(monkeypatch):
    monkeypatch.setattr(attention, "RANGE", 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_agrees_with_float64(dtype, short_ranges):
    """In float32 every shape with every batch; in bfloat16, whose tiles are other ones, every second pair of them."""
    for number, case in enumerate(REF.cases(place(), dtype, 31)):
        if dtype == "bfloat16" and sum(divmod(number, len(cases.BATCHES))) % 2 == 0:
            continue
        check(case, case.run(provided(case.spec)), REF.tolerance(dtype))


@pytest.mark.parametrize("target", [ALONE, WIDE], ids=["in registers", "by pieces"])
@pytest.mark.parametrize("rules", [{}, {"window": 70, "sinks": True}, {"soft_cap": 3.0}, {"causal": False}])
def test_ranges_in_registers_and_by_pieces(rules, target, short_ranges):
    where, source = place(), Source("float32", 4)
    shape = cases.Shape(heads=4, kv_heads=2, head_dim=16, v_head_dim=16, **rules)
    spec = cases.make_spec(where, shape, "float32")
    rows = cases.make_rows(((340, 1), (1, 1), (0, 1), (200, 3), (70, 70)), 16, 2, source.random)
    case = cases.attention_case(where, "mixed", spec, rows, source)
    implementation = provided(spec, target)
    plan = implementation.plan(cases.make_batch(where, rows, "int32"))
    assert (plan.prefill.splits > 1) is (target is WIDE) and plan.decode is None
    check(case, case.run(implementation), REF.tolerance("float32"))


@pytest.mark.parametrize(("number", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_attention_keeps_its_bits(number, dtype, short_ranges, in_order):
    """Alone, in chunks, whole, among others; the lone rows by pieces, the whole prompt in registers.

    On a device ``check_attention`` looks at more places (``tests/device/test_deterministic.py``).
    """
    sequence = Sequence(place(), SHAPES[number], dtype, 150, 9)
    made = provided(sequence.spec, replace(INTERPRETER, multiprocessors=10))
    whole = sequence.chunk(made, 0, 150)
    assert whole.isfinite().all()
    for first, end in ((0, 1), (64, 65), (149, 150), (37, 64), (101, 150)):
        assert torch.equal(sequence.chunk(made, first, end), whole[first:end]), f"alone, {first} .. {end}"
    for first, end in ((15, 16), (130, 131), (16, 20)):
        got = sequence.chunk(made, first, end, ((40, 1), (200, 33), (0, 1)), slack=5)
        assert torch.equal(got, whole[first:end]), f"among others, {first} .. {end}"


def test_pieces_do_not_change_bits(short_ranges, in_order):
    for shape in SHAPES:
        sequence = Sequence(place(), shape, "bfloat16", 330, 2)
        one, many = (sequence.chunk(provided(sequence.spec, target), 310, 330) for target in (ALONE, WIDE))
        assert torch.equal(one, many)


def test_wide_heads_are_one_range(in_order):
    shape = cases.Shape(heads=2, kv_heads=1, head_dim=256, v_head_dim=256)
    sequence = Sequence(place(), shape, "bfloat16", 90, 3)
    made = provided(sequence.spec, WIDE)
    whole = sequence.chunk(made, 0, 90)
    assert torch.equal(sequence.chunk(made, 80, 81)[0], whole[80])
    rows = cases.make_rows(((900, 1),), 16, 0, np.random.default_rng(0))
    assert made.plan(cases.make_batch(place(), rows, "int32")).prefill.splits == 1


def test_fp8_caches_keep_bits_too(short_ranges, in_order):
    where, source = place(), Source("bfloat16", 8)
    spec = cases.make_spec(where, cases.Shape(heads=4, kv_heads=2, head_dim=16, v_head_dim=16), "bfloat16")
    parts = tuple(replace(part, dtype="float8_e4m3fn") for part in spec.layout.spec.parts)
    spec = replace(spec, layout=where.storage.layout(replace(spec.layout.spec, parts=parts), 16))
    rows = cases.make_rows(((40, 1), (90, 33)), 16, 0, source.random)
    batch, cache = cases.make_batch(where, rows, "int32"), where.storage.allocate(spec.layout, rows.num_blocks)
    cache.write(torch.arange(rows.num_blocks * 16), [source.normal(rows.num_blocks * 16, 2, 16) for _ in range(2)])
    q, reference = source.normal(34, 4, 16), REF.make(spec)
    one, many = (provided(spec, target) for target in (ALONE, WIDE))
    got = one.forward(q, cache, one.plan(batch))
    torch.testing.assert_close(got, reference.forward(q, cache, reference.plan(batch)), rtol=1.6e-2, atol=1.6e-2)
    assert torch.equal(many.forward(q, cache, many.plan(batch)), got)


def test_captured_plans_hold_for_what_the_device_says(short_ranges, in_order):
    """A plan of eight bounded rows is replayed with other lengths; tokens beyond the rows are left alone."""
    where, source = place(), Source("float32", 6)
    spec = cases.make_spec(where, cases.Shape(heads=2, kv_heads=1, head_dim=16, v_head_dim=16), "float32")
    rows = cases.make_rows(((300, 1),) * 4, 16, 0, source.random)
    batch = replace(cases.make_batch(where, rows, "int32"), max_length_bound=640)
    fast, reference = provided(spec, WIDE), REF.make(spec)
    plan = fast.plan_for_capture(batch)
    assert plan.prefill.splits > 1
    cache = where.storage.allocate(spec.layout, rows.num_blocks)
    cache.write(torch.arange(rows.num_blocks * 16), [source.normal(rows.num_blocks * 16, 1, 16) for _ in range(2)])
    q = source.normal(4, 2, 16)
    for lengths in ((300, 300, 300, 300), (1, 77, 256, 300), (65, 0, 0, 3)):
        batch.lengths_dev.copy_(torch.tensor(lengths))
        batch.positions_dev.copy_(torch.tensor(lengths) - 1)
        now = replace(batch, length_bounds_host=np.asarray(lengths, np.int32))
        want = reference.forward(q, cache, reference.plan(now))
        torch.testing.assert_close(fast.forward(q, cache, plan), want, rtol=1e-5, atol=1e-5)
        eager = fast.forward(q, cache, fast.plan(replace(now, max_length_bound=max(lengths))))
        assert torch.equal(fast.forward(q, cache, plan), eager)


def test_all_before_attention_keeps_its_bits_in_one_launch_more():
    where, dtype = place(), "bfloat16"
    spec = cases.make_spec(where, cases.Shape(heads=4, kv_heads=2, head_dim=32, v_head_dim=32), dtype)
    norm, rope = RmsNormSpec(dtype=dtype, size=32, eps=1e-6), RopeSpec(dtype=dtype, head_dim=32, rotary_dim=32)
    claim = attention_rotate.fuse_rotate((norm, rope, spec), INTERPRETER, invariant=True)
    assert claim.count == 3 and claim.provided.traits.batch_invariant and "invariant" in claim.provided.label
    assert not attention_rotate.fuse_rotate((norm, rope, spec), INTERPRETER).provided.traits.batch_invariant
    made, source = claim.provided.implementation, Source(dtype, 8)
    x, weight = source.normal(70, 8, 32), source.normal(6, 32)
    angle = source.normal(70, 16, dtype="float32")

    def run(index):
        rows = cases.make_rows(((1, 1),) * len(index), 16, 0, np.random.default_rng(0))
        cache = where.storage.allocate(spec.layout, rows.num_blocks)
        plan = made.attention.plan(cases.make_batch(where, rows, "int32"))
        return made(x[index].clone(), weight, angle[index].cos(), angle[index].sin(), cache, plan)

    whole = run(torch.arange(70))
    assert not whole.isnan().any()
    for index in (torch.tensor([5]), torch.tensor([9, 5, 1]), torch.arange(17)):
        assert torch.equal(run(index), whole[index])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["norm.rms/1", "norm.add_rms/1", "activation.gated/1", "rope.apply/1", "embedding/1"])
def test_small_ops_keep_their_bits(op, dtype):
    """Rows of every case alone, three of them, and turned around."""
    seen = 0
    for case in REFERENCE[op].cases(place(), dtype, 31):
        names = {"norm.rms/1": ("x",), "norm.add_rms/1": ("x", "residual"), "activation.gated/1": ("gate_up",),
                 "rope.apply/1": ("x", "cos", "sin"), "embedding/1": ("ids",)}[op]  # fmt: skip
        rows, others = [case.inputs[n] for n in names], [v for n, v in case.inputs.items() if n not in names]
        made = provide_small(case.spec, INTERPRETER)
        if isinstance(made, Decline) or rows[0].shape[0] < 2:
            continue
        seen += 1
        count, first = rows[0].shape[0], lambda result: result[0] if isinstance(result, tuple) else result
        whole = first(made.implementation(*rows, *others))
        for index in (torch.tensor([count - 1]), torch.arange(min(3, count)), torch.arange(count).flip(0)):
            got = first(made.implementation(*(each[index].contiguous() for each in rows), *others))
            assert torch.equal(got, whole[index]), f"{case.name}: {index}"
    assert seen


def test_what_is_declined():
    spec = cases.make_spec(place(), cases.Shape(heads=2, kv_heads=1, head_dim=16, v_head_dim=16), "bfloat16")
    answer = attention.provide_invariant(replace(spec, latent=True), INTERPRETER)
    assert isinstance(answer, Decline) and "latent" in answer.reason and isinstance(spec, AttentionSpec)


@pytest.mark.parametrize("vocabulary", [1003, 9000])
def test_logprobs_agree_and_keep_their_bits(vocabulary):
    spec = LogprobsSpec(dtype="float32", vocabulary=vocabulary)
    made, reference = logprobs.InvariantLogprobs(spec, INTERPRETER), REFERENCE[spec.op]
    source = Source("float32", 3)
    logits, tokens = source.normal(17, vocabulary, scale=4.0), source.integers(0, vocabulary, 17)
    logits[3, 5:] = float("-inf")
    logits[:, 7] = logits[:, 6]
    got, want = made(logits, tokens, 4), reference.make(spec)(logits, tokens, 4)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for index in (torch.tensor([3]), torch.tensor([16, 0, 3]), torch.arange(17).flip(0)):
        for one, other in zip(made(logits[index], tokens[index], 4), got, strict=True):
            assert torch.equal(one, other[index])
