"""The compiled kernels, every instruction level by itself: against float64, bit for bit, and within their buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.ops.cases.attention import Shape, attention_case, make_rows, make_spec
from drivetrain.ops.cases.source import Source
from drivetrain.ops.reference import REFERENCE, Place
from drivetrain.ops.reference.kinds import Tolerance
from drivetrain_api.v1 import AddRmsNormSpec, RmsNormSpec, torch_runtime, torch_storage
from drivetrain_cpu.attention import HostAttention
from drivetrain_cpu.native import Kernels, load_kernels, usable_kernels
from drivetrain_cpu.pointwise import NativeNorm
from tests.unit.cpu.builds import every_level, python
from tests.unit.ops.invariance import SHAPES as INVARIANT_SHAPES
from tests.unit.ops.invariance import check_attention
from tests.unit.ops.judges import check

REAL, WHY = usable_kernels()
if REAL is None:
    pytest.skip(WHY, allow_module_level=True)
# AVX-512's kernels on narrower vectors where the processor has none: the same source, sizes and order of sums.
NARROWED = ["avx512, narrowed"] if "avx2" in REAL.levels and "avx512" not in REAL.levels else []
THREADS = (1, 2, 3, 5)
RUNTIME = torch_runtime("cpu")
EPS = 2.0**-23


@dataclass(frozen=True, kw_only=True)
class Own:
    """One level of one library."""

    kernels: Kernels
    level: int

    def linear(self, x, weight, threads=2):
        return self.kernels.linear(x, weight, self.level, threads)

    def norm(self, x, residual, weight, eps=1e-6, threads=2):
        return self.kernels.norm(x, residual, weight, eps, self.level, threads)

    def attention(self, spec, threads=2, invariant=False):
        return HostAttention(spec, Fixed(threads), self.kernels, invariant=invariant, level=self.level)


class Fixed:
    """Stands for ``Threads``: a number, and torch's own left as it is."""

    def __init__(self, count):
        self.count = count

    def take(self, seconds):
        pass

    def give_back(self):
        pass


@pytest.fixture(scope="module", params=[*REAL.levels, *NARROWED])
def own(request, tmp_path_factory):
    if request.param in REAL.levels:
        return Own(kernels=REAL, level=REAL.levels.index(request.param))
    library = load_kernels(every_level(tmp_path_factory.mktemp("kernels") / "every.so"))
    assert library.levels == ("avx512", "avx2", "plain")
    return Own(kernels=library, level=0)


def place(block_tokens=16):
    return Place(runtime=RUNTIME, storage=torch_storage(RUNTIME, (block_tokens,), "int64"))


# Linear.


def operands(rows, outs, size, seed=0):
    source = Source("float32", seed)
    return source.normal(rows, size), source.normal(outs, size).to(torch.bfloat16)


def product(x, weight):
    """The product in float64, and how far float32 sums in any order may be from it."""
    x, weight = x.to(torch.float64), weight.to(torch.float64)
    return x @ weight.T, EPS * (x.shape[1] + 2) * (x.abs() @ weight.abs().T)


def check_product(got, want):
    value, slack = want
    assert got.dtype == torch.float32 and got.shape == value.shape
    excess = (got.to(torch.float64) - value).abs() - slack
    assert not len(excess.flatten()) or excess.max() <= 0, f"beyond the bound by {excess.max()}"


@pytest.mark.parametrize("size", [*range(1, 71), 640, 641])
def test_linear_agrees_with_float64(own, size):
    x, weight = operands(17, 131, size, size)
    value, slack = product(x, weight)
    for rows in (*range(9), 11, 12, 13, 15, 16, 17):
        check_product(own.linear(x[:rows], weight), (value[:rows], slack[:rows]))
    for outs in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9):
        for rows in (1, 5, 8, 14):
            check_product(own.linear(x[:rows], weight[:outs]), (value[:rows, :outs], slack[:rows, :outs]))


@pytest.mark.parametrize(("size", "panel"), [(640, 102), (6000, 16)])
def test_linear_around_the_size_of_a_panel(own, size, panel):
    x, weight = operands(2 * panel + 3, 57, size)
    value, slack = product(x, weight)
    for rows in (panel - 1, panel, panel + 1, 2 * panel, 2 * panel + 1, 2 * panel + 3):
        check_product(own.linear(x[:rows], weight), (value[:rows], slack[:rows]))


@pytest.mark.parametrize(("size", "piece"), [(6000, 174), (70_001, 16)])
def test_linear_around_the_rows_that_are_copied_at_once(own, size, piece):
    x, weight = operands(2 * piece + 1, 7, size)
    value, slack = product(x, weight)
    whole = own.linear(x, weight)
    check_product(whole, (value, slack))
    for rows in (piece - 1, piece, piece + 1, piece + 13, 2 * piece):
        assert torch.equal(own.linear(x[:rows], weight), whole[:rows])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    outs=st.integers(1, 300),
    size=st.integers(1, 700),
    threads=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_linear_of_any_shape(own, rows, outs, size, threads, seed):
    x, weight = operands(rows, outs, size, seed)
    got = own.linear(x, weight, threads)
    check_product(got, product(x, weight))
    row = seed % rows
    assert torch.equal(own.linear(x[row : row + 1].clone(), weight, 1)[0], got[row])


def test_linear_without_inputs_is_zero(own):
    assert torch.equal(own.linear(torch.ones(3, 0), torch.ones(5, 0, dtype=torch.bfloat16)), torch.zeros(3, 5))


@pytest.mark.parametrize(("size", "outs"), [(1, 1), (61, 47), (640, 331), (2000, 40)])
def test_linear_bits_depend_on_neither_batch_nor_threads(own, size, outs):
    x, weight = operands(120, outs, size)
    alone = torch.cat([own.linear(x[row : row + 1].clone(), weight, 1) for row in range(len(x))])
    for threads in THREADS:
        for rows in (*range(1, 20), 33, 101, 102, 103, 120):
            assert torch.equal(own.linear(x[:rows], weight, threads), alone[:rows]), (threads, rows)
            last = own.linear(x[len(x) - rows :], weight, threads)
            assert torch.equal(last, alone[len(x) - rows :]), (threads, rows)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 3, 6, 7, 20])
def test_what_is_not_finite_stays_in_its_row_and_output(own, rows, bad):
    x, weight = operands(rows, 43, 77)
    clean = own.linear(x, weight)
    x[rows - 1, 76] = bad
    got = own.linear(x, weight)
    assert torch.equal(got[:-1], clean[:-1]) and not got[-1].isfinite().any()
    x, weight = operands(rows, 43, 77)
    weight[42, 76] = bad
    got = own.linear(x, weight)
    assert torch.equal(got[:, :-1], clean[:, :-1]) and not got[:, -1].isfinite().any()


# Attention.

SHAPES = (
    Shape(heads=1, kv_heads=1, head_dim=1, v_head_dim=1),
    Shape(heads=3, kv_heads=3, head_dim=5, v_head_dim=7),
    Shape(heads=4, kv_heads=2, head_dim=64, v_head_dim=33),
    Shape(heads=6, kv_heads=2, head_dim=33, v_head_dim=64, soft_cap=2.0),
    Shape(heads=4, kv_heads=1, head_dim=72, v_head_dim=72, window=19),
    Shape(heads=10, kv_heads=2, head_dim=20, v_head_dim=12, sinks=True),
    Shape(heads=8, kv_heads=1, head_dim=31, v_head_dim=31, window=1, sinks=True),
    Shape(heads=16, kv_heads=2, head_dim=128, v_head_dim=128, window=70, soft_cap=5.0, sinks=True),
    Shape(heads=7, kv_heads=7, head_dim=17, v_head_dim=65, causal=False),
)
# (length, query tokens): every remainder of keys by four, block ends, several queries a row, empty rows.
BATCHES = {
    "one token": ((1, 1),),
    "decode": ((1, 1), (2, 1), (3, 1), (16, 1), (17, 1), (64, 1), (130, 1), (303, 1)),
    "some queries": ((40, 4), (8, 8), (21, 3), (150, 2)),
    "empty rows": ((33, 1), (0, 1), (5, 2), (0, 1), (0, 0)),
}


def case_of(shape, batch, dtype, block_tokens=16, narrow=True):
    """A case over permuted blocks; slots that no query sees hold NaN. ``narrow``: q is of the cache's dtype too."""
    source = Source(dtype, 31)
    spec = make_spec(place(block_tokens), shape, dtype)
    rows = make_rows(BATCHES[batch], block_tokens, 3, source.random)
    if not narrow:
        spec = replace(spec, dtype="float32")
    case = attention_case(place(block_tokens), f"{shape}, {batch}", spec, rows, source)
    if not narrow:
        case.inputs["q"] = case.inputs["q"].to(torch.float32)
    for row, (length, queries) in enumerate(BATCHES[batch]):
        if shape.window is not None and length:
            unseen = max(0, length - queries - shape.window + 1)
            case.inputs["keys"][row][:unseen] = float("nan")
            case.inputs["values"][row][:unseen] = float("nan")
    return case


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("dtype", "narrow"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_attention_agrees_with_float64(own, dtype, narrow, batch):
    tolerance = REFERENCE["attention.paged/1"].tolerance(dtype if narrow else "float32")
    for shape in SHAPES:
        case = case_of(shape, batch, dtype, narrow=narrow)
        check(case, case.run(own.attention(case.spec)), tolerance)


@pytest.mark.parametrize("block_tokens", [1, 3, 32, 128])
def test_attention_over_blocks_of_any_size(own, block_tokens):
    for shape in SHAPES[2:6]:
        case = case_of(shape, "decode", "bfloat16", block_tokens, narrow=False)
        check(case, case.run(own.attention(case.spec)), REFERENCE["attention.paged/1"].tolerance("float32"))


@pytest.mark.parametrize("bias", [-300.0, 300.0])
def test_attention_of_scores_and_sinks_far_from_zero(own, bias):
    for shape in (SHAPES[2], SHAPES[5], SHAPES[6]):
        case = case_of(shape, "decode", "float32")
        case.inputs["q"] *= 40
        if shape.sinks:
            case.inputs["sinks"] += bias
        check(case, case.run(own.attention(case.spec)), Tolerance(rtol=1e-3, atol=1e-3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_bits_do_not_depend_on_threads(own, dtype):
    for shape in SHAPES:
        case = case_of(shape, "decode", dtype)
        first, *others = (case.run(own.attention(case.spec, threads))[0] for threads in THREADS)
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", INVARIANT_SHAPES)
def test_attention_bits_do_not_depend_on_the_batch(own, shape, dtype):
    check_attention(lambda spec: own.attention(spec, 3, invariant=True), place(), shape, dtype)


# Norms.


def check_norm(own, x, residual, weight, threads=2):
    got, total = own.norm(x, residual, weight, threads=threads)
    wide = x if residual is None else x + residual
    assert torch.equal(total, wide) and got.is_contiguous()
    want = wide.to(torch.float64)
    want = want * ((want**2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.to(torch.float64)
    assert ((got - want).abs() <= EPS * (x.shape[-1] / 2 + 8) * want.abs() + 1e-30).all()
    return got


@pytest.mark.parametrize("residual", [False, True])
def test_norm_agrees_with_float64(own, residual):
    source = Source("float32", 3)
    for size in (*range(1, 71), 640, 641):
        for rows in (0, 1, 31, 32, 33, 70):
            x, weight = source.normal(rows, size, scale=3.0), source.normal(size)
            check_norm(own, x, source.normal(rows, size) if residual else None, weight)


@pytest.mark.parametrize("residual", [False, True])
def test_norm_of_heads_that_lie_between_others(own, residual):
    source = Source("float32", 4)
    for heads, size in ((1, 64), (3, 20), (5, 33), (8, 128), (4, 1)):
        wide = source.normal(13, heads + 2, size)
        x = wide[:, 1 : heads + 1]
        other = source.normal(13, heads + 2, size)[:, 1 : heads + 1] if residual else None
        whole = check_norm(own, x, other, source.normal(heads, size))
        check_norm(own, x, other, source.normal(size))
        check_norm(own, x, other, source.normal(heads, 2 * size)[:, ::2])
        assert whole.shape == x.shape
        check_norm(own, x.transpose(0, 1), None, source.normal(size))


def test_norm_bits_depend_on_neither_batch_nor_threads(own):
    source = Source("float32", 5)
    for size in (1, 61, 640, 4096):
        x, residual, weight = source.normal(100, size), source.normal(100, size), source.normal(size)
        alone = torch.cat([own.norm(x[i : i + 1], residual[i : i + 1], weight, threads=1)[0] for i in range(100)])
        for threads in THREADS:
            for rows in (1, 2, 31, 32, 33, 64, 100):
                assert torch.equal(own.norm(x[:rows], residual[:rows], weight, threads=threads)[0], alone[:rows])


def test_norms_take_a_level(own):
    x, weight = Source("float32", 6).normal(3, 40), torch.ones(40)
    rms = NativeNorm(RmsNormSpec(dtype="float32", size=40, eps=1e-6), own.kernels, 2, level=own.level)
    add = NativeNorm(AddRmsNormSpec(dtype="float32", size=40, eps=1e-6), own.kernels, 2, level=own.level)
    want = own.norm(x, None, weight)[0]
    assert torch.equal(rms(x, weight), want)
    assert torch.equal(add.add(x, torch.zeros_like(x), weight)[0], want)


# Buffers.


def test_no_kernel_touches_a_byte_beyond_its_buffers(own):
    """In a process of its own, where every buffer ends, then begins, at a page that must not be touched."""
    script = "import sys; from tests.unit.cpu import guarded; guarded.main(*sys.argv[1:])"
    path = own.kernels.library._name
    done = python(script, path, str(own.level))
    assert done.returncode == 0, (done.returncode, done.stdout.splitlines()[-1:], done.stderr[-2000:])
    assert int(done.stdout.splitlines()[-1].split()[0]) > 500


def test_a_touched_byte_beyond_a_buffer_is_seen():
    script = "import sys; from tests.unit.cpu import guarded; guarded.main(*sys.argv[1:])"
    assert python(script, REAL.library._name, "0", "beyond").returncode == -11


def test_the_job_is_the_struct_that_the_library_reads():
    from drivetrain_cpu.native import AttentionJob

    assert np.dtype(AttentionJob).itemsize == 10 * 8 + 14 * 8 + 2 * 4 + 2 * 8
