"""Norms, activations, rotations and lookups of the Triton wheel, run by the interpreter, against float64."""

import pytest
import torch

from drivetrain.ops.cases.source import Source
from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import (
    AddLayerNormSpec,
    AddRmsNormSpec,
    Decline,
    GatedActivationSpec,
    Provided,
    RmsNormSpec,
    RopeAnglesSpec,
    RopeSpec,
    SoftCapSpec,
    torch_runtime,
    torch_storage,
)
from tests.unit.ops.judges import check
from tests.unit.triton.interpreted import interpreted

with interpreted():
    from drivetrain_triton import norms
    from drivetrain_triton.providers import provide_small
from drivetrain_triton.target import INTERPRETER

RUNTIME = torch_runtime("cpu")
PLACE = Place(runtime=RUNTIME, storage=torch_storage(RUNTIME, (16,), "int32"))
OPS = ("norm.rms/1", "norm.add_rms/1", "norm.layer/1", "norm.add_layer/1")
OPS += ("activation.gated/1", "activation.plain/1", "rope.angles/1", "rope.apply/1", "embedding/1")


def kernel(spec):
    answer = provide_small(spec, INTERPRETER)
    assert isinstance(answer, Provided)
    assert answer.traits.batch_invariant and answer.traits.graph == "any"
    return answer.implementation


def close(got, want, dtype, op="norm.rms/1"):
    tolerance = REFERENCE[op].tolerance(dtype)
    torch.testing.assert_close(got, want, rtol=tolerance.rtol, atol=tolerance.atol)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_agrees_with_float64(op, dtype):
    count = 0
    for case in REFERENCE[op].cases(PLACE, dtype, 31):
        check(case, case.run(kernel(case.spec)), REFERENCE[op].tolerance(dtype))
        count += 1
    assert count >= 6


def test_what_is_not_served_is_declined():
    assert isinstance(provide_small(SoftCapSpec(dtype="float32", cap=3.0), INTERPRETER), Decline)
    assert isinstance(provide_small(RmsNormSpec(dtype="float64", size=8, eps=1e-6), INTERPRETER), Decline)


@pytest.mark.parametrize("size", [300, 5000])
@pytest.mark.parametrize("early", [False, True])
def test_norms_of_rows_too_long_for_registers(size, early, monkeypatch):
    monkeypatch.setattr(norms, "WHOLE", 256)
    monkeypatch.setattr(norms, "PIECE", 2048)
    source = Source("bfloat16", 1)
    x, weight = source.normal(3, size), source.normal(size)
    residual = source.normal(3, size, dtype="float32")
    settings = {"dtype": "bfloat16", "size": size, "eps": 1e-6, "offset": 1.0, "round_before_weight": early}
    spec = RmsNormSpec(**settings)
    close(kernel(spec)(x, weight), REFERENCE[spec.op].make(spec)(x, weight), "bfloat16")
    spec = AddRmsNormSpec(**settings)
    got, want = kernel(spec)(x, residual, weight), REFERENCE[spec.op].make(spec)(x, residual, weight)
    close(got[0], want[0], "bfloat16")
    assert torch.equal(got[1], want[1])


def test_layer_norms_of_long_rows_and_of_a_wide_stream(monkeypatch):
    from drivetrain_triton import layer_norms

    monkeypatch.setattr(layer_norms, "PIECE", 128)
    source = Source("bfloat16", 3)
    x, weight, bias = source.normal(5, 600)[:, 7:307], source.normal(300), source.normal(300)
    residual = source.normal(5, 300, dtype="float32")
    spec = AddLayerNormSpec(dtype="bfloat16", size=300, eps=1e-5)
    given = (x, residual, weight, bias)
    got, want = kernel(spec)(*given), REFERENCE[spec.op].make(spec)(*given)
    close(got[0], want[0], "bfloat16", spec.op)
    assert torch.equal(got[1], want[1])


def test_norms_of_strided_rows_and_of_a_wide_stream():
    source = Source("bfloat16", 2)
    spec = RmsNormSpec(dtype="bfloat16", size=128, eps=1e-6)
    reference = REFERENCE[spec.op].make(spec)
    fused, weight, own = source.normal(9, 10 * 128), source.normal(128), source.normal(3, 128)
    heads = fused[:, 256 : 5 * 128].view(9, 3, 128)
    for x, w in (
        (heads, weight),
        (heads, own),
        (heads[2], own),
        (fused[:, 128:256], weight),
        (heads.reshape(3, 3, 3, 128), own),
        (heads[0, 0], weight),
        (source.normal(128, 7).T, weight),
        (source.normal(4, 128, dtype="float32"), weight),
        (heads[:0], weight),
    ):
        got = kernel(spec)(x, w)
        assert got.is_contiguous() and got.dtype == w.dtype
        close(got, reference(x, w), "bfloat16")
    spec = AddRmsNormSpec(dtype="bfloat16", size=128, eps=1e-6, offset=0.5)
    stream = source.normal(9, 2, 128, dtype="float32")[:, 1]
    got, want = (
        kernel(spec)(fused[:, :128], stream, weight),
        REFERENCE[spec.op].make(spec)(fused[:, :128], stream, weight),
    )
    close(got[0], want[0], "bfloat16")
    assert torch.equal(got[1], want[1])


def test_a_row_alone_has_the_bits_that_it_has_among_others():
    source = Source("float32", 3)
    spec = RmsNormSpec(dtype="float32", size=96, eps=1e-6)
    x, weight = source.normal(19, 96), source.normal(96)
    whole = kernel(spec)(x, weight)
    for row in range(19):
        assert torch.equal(kernel(spec)(x[row : row + 1], weight)[0], whole[row])


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations_far_from_zero_and_of_strided_rows(kind):
    source = Source("float32", 4)
    spec = GatedActivationSpec(dtype="float32", size=1500, kind=kind)
    gate_up = source.normal(3, 3001)[:, 1:]
    gate_up[0, :6] = torch.tensor([200.0, -200.0, 90.0, -90.0, 0.0, -0.0])
    close(kernel(spec)(gate_up), REFERENCE[spec.op].make(spec)(gate_up), "float32", spec.op)


def test_angles_of_far_positions():
    spec = RopeAnglesSpec(dtype="float32", rotary_dim=64)
    inv_freq = (500000.0 ** -(torch.arange(32) / 32)).to(torch.float32)
    positions = torch.tensor([0, 1, 3, 99_999, 131_071, 1_000_003, 16_000_001], dtype=torch.int32)
    cos, sin = kernel(spec)(positions, inv_freq)
    phase = (positions.to(torch.float32).unsqueeze(-1) * inv_freq).to(torch.float64)
    assert (cos - phase.cos()).abs().max() < 2e-7
    assert (sin - phase.sin()).abs().max() < 2e-7


@pytest.mark.parametrize("style", ["halves", "interleaved"])
def test_rotation_inside_a_fused_product(style):
    source = Source("bfloat16", 5)
    spec = RopeSpec(dtype="bfloat16", head_dim=48, rotary_dim=20, style=style)
    x = source.normal(5, 14 * 48)[:, 48:].unflatten(1, (13, 48))
    angle = source.normal(5, 10, dtype="float32")
    got = kernel(spec)(x, angle.cos(), angle.sin())
    close(got, REFERENCE[spec.op].make(spec)(x, angle.cos(), angle.sin()), "bfloat16")
    assert torch.equal(got[..., 20:], x[..., 20:])
