"""Every native op against float64, and against the reference's own bits where tokens must be equal."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from drivetrain.ops.cases import attention
from drivetrain.ops.cases.sampling import draw_case, random_mask, sampling_inputs
from drivetrain.ops.cases.source import Source
from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import (
    AddLayerNormSpec,
    AddRmsNormSpec,
    ConfigView,
    DrawSpec,
    LinearSpec,
    Provided,
    RmsNormSpec,
    torch_runtime,
    torch_storage,
)
from drivetrain_cpu.linear import CHECKS, KERNELS, HostLinear, RowRule
from drivetrain_cpu.ops import MAKERS, Providers
from drivetrain_cpu.plugin import plugin
from drivetrain_cpu.threads import Threads
from tests.unit.ops.invariance import SHAPES, check_all_sizes, check_attention, check_rows
from tests.unit.ops.judges import check

RUNTIME = torch_runtime("cpu")
DTYPES = ["float32", "bfloat16"]


def place(slot_dtype="int64", block_tokens=16):
    return Place(runtime=RUNTIME, storage=torch_storage(RUNTIME, (block_tokens,), slot_dtype))


THREADS = Threads(torch.get_num_threads(), 0.0)


def native(spec, deterministic=False, linear="auto"):
    answer = Providers(deterministic=deterministic, linear=linear, threads=THREADS).provide(spec)
    assert isinstance(answer, Provided), answer
    return answer.implementation


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", sorted(MAKERS))
def test_native_op_agrees_with_float64(op, dtype, deterministic):
    reference, count = REFERENCE[op], 0
    for case in reference.cases(place(), dtype, 21):
        if getattr(case.spec, "style", "halves") == "halves":
            check(case, case.run(native(case.spec, deterministic)), reference.tolerance(dtype))
            count += 1
    assert count >= 6


@pytest.mark.parametrize(("slot_dtype", "block_tokens"), [("int32", 16), ("int64", 32), ("int64", 128)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_on_other_layouts(slot_dtype, block_tokens, deterministic):
    reference = REFERENCE["attention.paged/1"]
    for case in reference.cases(place(slot_dtype, block_tokens), "bfloat16", 22):
        check(case, case.run(native(case.spec, deterministic)), reference.tolerance("bfloat16"))


class InOrder:
    """Gives blocks in ascending order, as a fresh pool does."""

    def permutation(self, values):
        return values


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_blocks_that_follow_each_other(dtype):
    reference, source = REFERENCE["attention.paged/1"], Source(dtype, 25)
    for shape in attention.SHAPES:
        spec = attention.make_spec(place(), shape, dtype)
        for name, lengths in attention.BATCHES:
            case = attention.attention_case(place(), name, spec, attention.make_rows(lengths, 16, 2, InOrder()), source)
            check(case, case.run(native(spec)), reference.tolerance(dtype))


def test_attention_cut_into_pieces(monkeypatch):
    """Scratch and score limits cut tiles and queries; results stay within rounding."""
    from drivetrain_cpu import attention as host
    from drivetrain_cpu import attention_plan, attention_spans, attention_tiles

    monkeypatch.setattr(attention_spans, "SPAN_BYTES", 12_000)
    monkeypatch.setattr(attention_plan, "SCRATCH_BYTES", 50_000)
    monkeypatch.setattr(attention_tiles, "SCORE_BYTES", 20_000)
    monkeypatch.setattr(host, "SCORE_BYTES", 20_000)
    monkeypatch.setattr(attention_plan, "PIECE_BYTES", 5_000)
    monkeypatch.setattr(attention_plan, "SHORT_KEYS", 100)
    reference = REFERENCE["attention.paged/1"]
    for deterministic in (False, True):
        for case in reference.cases(place(), "float32", 23):
            check(case, case.run(native(case.spec, deterministic)), reference.tolerance("float32"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_kernel_that_runs_here_agrees(name, dtype):
    reason = CHECKS[name](dtype)
    if reason:
        pytest.skip(f"{name}: {reason}")
    reference = REFERENCE["linear/1"]
    for case in reference.cases(place(), dtype, 24):
        kernel = HostLinear(case.spec, KERNELS[name](dtype, case.spec.role == "lm_head", 2), RowRule(), THREADS)
        check(case, case.run(kernel), reference.tolerance(dtype))


def test_wide_weights_are_packed_in_pieces(monkeypatch):
    from drivetrain_cpu import linear_kernels as linear

    if CHECKS["half"]("bfloat16"):
        pytest.skip(CHECKS["half"]("bfloat16"))
    monkeypatch.setattr(linear, "PIECE_BYTES", 4 * 64 * 48)
    kernel = linear.Half()
    source = Source("bfloat16", 1)
    weight, x = source.normal(131, 64, scale=0.1), source.normal(5, 64)
    data = kernel.pack(weight)
    assert len(data) == 3
    want = x.to(torch.float64) @ weight.to(torch.float64).T
    assert (kernel.multiply(x, data, None).to(torch.float64) - want).abs().max() < 0.02


def test_a_weight_too_large_for_half_is_refused():
    from drivetrain_cpu.linear_kernels import Half

    with pytest.raises(ValueError, match="linear=plain"):
        Half().pack(torch.full((4, 4), 1e5, dtype=torch.bfloat16))


# Bytes.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tied", "bias"), [(False, False), (False, True), (True, False)])
def test_packed_bytes_are_known_before_packing(dtype, tied, bias):
    for size_in, size_out in ((64, 96), (61, 47), (640, 331)):
        spec = LinearSpec(dtype=dtype, in_features=size_in, out_features=size_out, bias=bias, tied=tied)
        linear = native(spec)
        wanted = linear.packed_bytes(spec)
        source = Source(dtype, 0)
        packed = linear.pack(source.normal(size_out, size_in), source.normal(size_out) if bias else None)
        assert packed.nbytes == wanted and packed.keeps_source is tied and packed.peak_bytes >= 0
        data = packed.data[0]
        if isinstance(data, torch.Tensor) and data.layout == torch._mkldnn:
            held = torch.ops.mkldnn._nbytes(data)
            assert wanted == held + (size_out * packed.data[1].element_size() if bias else 0)


def resident():
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_bytes_are_what_the_process_grows_by(dtype):
    """A weight large enough that the process's resident memory shows it."""
    spec = LinearSpec(dtype=dtype, in_features=640, out_features=20_000)
    linear = native(spec)
    linear.pack(torch.zeros(64, 640, dtype=getattr(torch, dtype)), None)
    wanted = linear.packed_bytes(spec)
    RUNTIME.trim()
    before = resident()
    weight = torch.ones(20_000, 640, dtype=getattr(torch, dtype))
    packed = linear.pack(weight, None)
    del weight  # a kernel that reads the weight as it is holds it now
    RUNTIME.trim()
    grown = resident() - before
    assert packed.nbytes == wanted
    assert abs(grown - wanted) < 0.03 * wanted + (2 << 20)


# Tokens.


@pytest.mark.parametrize("seed", range(4))
def test_draws_are_the_references_tokens(seed):
    source = Source("float32", 100 + seed)
    for vocabulary, offset in ((3001, 0), (9_003, 5)):
        spec = DrawSpec(dtype="float32", vocabulary=vocabulary, vocabulary_offset=offset)
        reference, fast = REFERENCE["sample.draw/1"].make(spec), native(spec)
        for scale in (0.5, 4.0, 12.0):
            logits = source.normal(9, vocabulary, scale=scale, dtype="float32")
            for filters in (False, True):
                inputs = sampling_inputs(source, 9, vocabulary, filters=filters)
                for given in (inputs, replace(inputs, mask=random_mask(source, 9, vocabulary))):
                    case = draw_case(place(), "", spec, logits, given, seed)
                    assert torch.equal(case.run(reference)[0], case.run(fast)[0])


def test_draws_where_the_noise_decides_everything():
    """Equal logits: every token is a candidate, and the winner is where the noise is largest."""
    spec = DrawSpec(dtype="float32", vocabulary=70_001)
    inputs = sampling_inputs(Source("float32", 3), 2, 70_001, filters=False)
    case = draw_case(place(), "", spec, torch.zeros(2, 70_001), inputs)
    reference = REFERENCE["sample.draw/1"].make(spec)
    assert torch.equal(case.run(reference)[0], case.run(native(spec))[0])


# Batch invariance.


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request):
    """Three threads cut work at places that are no multiple of anything."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(KERNELS))
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 96), (61, 47), (640, 1331)])
def test_linear_rows_keep_their_bits(name, dtype, size_in, size_out, threads):
    reason = CHECKS[name](dtype)
    if reason:
        pytest.skip(f"{name}: {reason}")
    spec = LinearSpec(dtype=dtype, in_features=size_in, out_features=size_out)
    linear = native(spec, deterministic=True, linear=name)
    source = Source(dtype, 7)
    packed = linear.pack(source.normal(size_out, size_in, scale=size_in**-0.5), None)
    x = source.normal(31, size_in)
    check_rows(lambda rows: linear.apply(rows, packed), x[0], x[1:])
    check_all_sizes(lambda rows: linear.apply(rows, packed), x[0], x[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [150, 520])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_keeps_its_bits(shape, dtype, length, threads):
    check_attention(lambda spec: native(spec, deterministic=True), place(), shape, dtype, length)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rows_keep_their_bits(dtype, threads):
    for size in (61, 640, 4096):
        source = Source(dtype, 8)
        weight, x = source.normal(size), source.normal(31, size)
        for early in (False, True):
            rms = native(RmsNormSpec(dtype=dtype, size=size, eps=1e-6, round_before_weight=early))
            check_all_sizes(lambda rows, rms=rms, weight=weight: rms(rows, weight), x[0], x[1:])
            add = native(AddRmsNormSpec(dtype=dtype, size=size, eps=1e-6, round_before_weight=early))
            check_rows(lambda rows, add=add, weight=weight: add(rows, rows, weight)[0], x[0], x[1:])
        layer, bias = native(AddLayerNormSpec(dtype=dtype, size=size, eps=1e-5)), source.normal(size)
        check_rows(lambda rows, layer=layer, w=weight, b=bias: layer(rows, rows, w, b)[0], x[0], x[1:])


def test_pointwise_rows_keep_their_bits(threads):
    """Every other op of a forward, native or reference, as a deterministic engine binds it."""
    from drivetrain.ops import Ops
    from drivetrain_api.v1 import (
        ActivationSpec,
        GatedActivationSpec,
        LogprobsSpec,
        RopeAnglesSpec,
        RopeSpec,
        SoftCapSpec,
    )

    ops = Ops(
        plugin.create((0,), ConfigView(num_threads=threads, deterministic=True)), block_tokens=16, deterministic=True
    )
    for dtype in DTYPES:
        source = Source(dtype, 9)
        for size in (61, 640, 2048):
            for kind in ("silu", "gelu", "gelu_tanh"):
                gated = ops.bind(GatedActivationSpec(dtype=dtype, size=size, kind=kind))
                check_places(gated, source.normal(333, 2 * size, scale=3.0))
                plain = ops.bind(ActivationSpec(dtype=dtype, size=size, kind=kind))
                check_places(plain, source.normal(333, size, scale=3.0))
            cap = ops.bind(SoftCapSpec(dtype=dtype, cap=30.0))
            check_places(cap, source.normal(333, size, scale=30.0))
        rope = ops.bind(RopeSpec(dtype=dtype, head_dim=128, rotary_dim=128))
        angle = source.normal(333, 64, dtype="float32")
        check_places(rope, source.normal(333, 5, 128), angle.cos(), angle.sin())
    angles = ops.bind(RopeAnglesSpec(dtype="float32", rotary_dim=128))
    inv_freq = 10000.0 ** -(torch.arange(64) / 64)
    check_places(lambda at: torch.cat(angles(at, inv_freq), 1), torch.arange(5000, 5333))
    logprobs = ops.bind(LogprobsSpec(dtype="float32", vocabulary=5003))
    source = Source("float32", 10)
    logits, tokens = source.normal(70, 5003), source.integers(0, 5003, 70)
    check_places(lambda logit, token: logprobs(logit, token, 3)[3], logits, tokens)


def check_places(function, *inputs):
    """A row alone must give the bits that it gives among all rows."""
    whole = function(*inputs)
    for row in (0, 1, 2, len(whole) // 3, len(whole) // 2, len(whole) - 2, len(whole) - 1):
        alone = function(*(x[row : row + 1].clone() for x in inputs))
        assert torch.equal(alone[0], whole[row]), f"row {row} of {len(whole)}"


def test_a_norm_sees_its_weight_change():
    rms = native(RmsNormSpec(dtype="bfloat16", size=8, eps=1e-6, offset=1.0))
    x, weight = torch.ones(1, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    assert torch.equal(rms(x, weight), x)
    weight.fill_(1.0)
    assert torch.equal(rms(x, weight), 2 * x)
    assert torch.equal(rms(x, torch.full_like(weight, 3.0)), 4 * x)


def test_backend_serves_every_reference_op():
    """Through the facade, on the backend as the engine opens it: native or reference, all of it binds."""
    from drivetrain.ops import Ops

    before = torch.get_num_threads()
    ops = Ops(plugin.create((0,), ConfigView(num_threads=1)), block_tokens=16)
    torch.set_num_threads(before)
    for reference in REFERENCE.values():
        spec = next(iter(reference.cases(place(), "bfloat16", 0))).spec
        assert ops.bind(spec) is not None
    assert {c.op for c in ops.report if c.provider == "native"} == set(MAKERS)


def test_rope_sees_its_tables_change():
    from drivetrain_api.v1 import RopeSpec

    spec = RopeSpec(dtype="float32", head_dim=8, rotary_dim=8)
    fast, reference = native(spec), REFERENCE["rope.apply/1"].make(spec)
    source = Source("float32", 5)
    x, angle = source.normal(3, 2, 8), source.normal(3, 4)
    cos, sin = angle.cos(), angle.sin()
    for _ in range(2):
        torch.testing.assert_close(fast(x, cos, sin), reference(x, cos, sin))
        cos.copy_((angle * 2).cos())
        sin.copy_((angle * 2).sin())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("top_k", [0, 5])
def test_a_row_that_is_not_finite_draws_what_shows_it_and_disturbs_no_other(bad, top_k):
    from drivetrain_api.v1 import SamplingInputs

    spec = DrawSpec(dtype="float32", vocabulary=1000)
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(2, 1000)).astype(np.float32))
    inputs = SamplingInputs(
        temperature=torch.full((2,), 0.7),
        top_k=torch.full((2,), top_k, dtype=torch.int32),
        top_p=torch.full((2,), 0.9),
        min_p=torch.zeros(2),
        seed=torch.tensor([1, 2]),
        position=torch.tensor([5, 5], dtype=torch.int32),
        sample=torch.zeros(2, dtype=torch.int32),
        mask=None,
        all_greedy=False,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
    )
    alone = native(spec)(logits, inputs, 0)
    logits[0, 7] = bad
    assert native(spec)(logits, inputs, 0).tolist() == [7, int(alone[1])]


def test_logits_are_not_rounded_where_sums_are_float32():
    if CHECKS["half"]("bfloat16"):
        pytest.skip(CHECKS["half"]("bfloat16"))
    for role, dtype in (("lm_head", torch.float32), ("other", torch.bfloat16)):
        spec = LinearSpec(dtype="bfloat16", in_features=64, out_features=40, role=role)
        linear = native(spec)
        source = Source("bfloat16", 6)
        weight, x = source.normal(40, 64), source.normal(3, 64)
        got = linear.apply(x, linear.pack(weight, None))
        assert got.dtype == dtype
        error = (got.to(torch.float64) - x.to(torch.float64) @ weight.to(torch.float64).T).abs().max()
        assert bool(error < 1e-4) is (role == "lm_head")
