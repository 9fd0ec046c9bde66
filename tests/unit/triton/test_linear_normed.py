"""Linears with the addition and the norm before them, through the interpreter: against the references in a row."""

import dataclasses

import pytest
import torch

from drivetrain.ops.reference import REFERENCE
from drivetrain_api.v1 import AddRmsNormSpec, RmsNormSpec
from tests.unit.triton.interpreted import interpreted

with interpreted():
    from drivetrain_triton import linear_normed
from drivetrain_triton import linear_normed_tiles
from drivetrain_triton.linear_tiles import Tiles
from drivetrain_triton.target import INTERPRETER

RTOL = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
VARIANTS = {
    "rows, at once": Tiles("rows", 1, 8, 256),
    "rows, in steps": Tiles("rows", 1, 4, 64),
}
NORMS = {
    "plain": {},
    "offset": {"offset": 1.0},
    "early": {"round_before_weight": True},
    "early, offset": {"round_before_weight": True, "offset": 1.0},
}


def normal(*shape, dtype, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def made(rows, outputs, inputs, dtype, kept=torch.float32, **norm):
    """(x, residual, scale, norm, weight)."""
    spec = AddRmsNormSpec(dtype=str(dtype).removeprefix("torch."), size=inputs, eps=1e-5, **norm)
    scale = normal(inputs, dtype=dtype, seed=3, scale=0.3) + (1 - spec.offset)
    residual = None if kept is None else normal(rows, inputs, dtype=kept, seed=1, scale=4.0)
    weight = normal(outputs, inputs, dtype=dtype, seed=2, scale=2 * inputs**-0.5)
    return normal(rows, inputs, dtype=dtype), residual, scale, spec, weight


def wanted(x, residual, scale, spec, weight, bias=None, kind=""):
    """What the references give one after another, the product in float64."""
    if residual is None:
        alone = RmsNormSpec(**{each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)})
        normed, total = REFERENCE[alone.op].make(alone)(x, scale), x.float()
    else:
        normed, total = REFERENCE[spec.op].make(spec)(x, residual, scale)
    y = normed.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if kind:
        gate, up = y.to(weight.dtype).float().chunk(2, dim=1)
        y = torch.nn.functional.silu(gate).to(weight.dtype).double() * up.double()
    return y, total


def check(got, want, dtype):
    y, total = got
    rtol = RTOL[dtype]
    assert y.dtype == dtype and not y.isnan().any()
    torch.testing.assert_close(y.double(), want[0], rtol=rtol, atol=4 * rtol)
    assert total.dtype == want[1].dtype and torch.equal(total, want[1])


def fitted(name, rows):
    tiles = VARIANTS[name]
    return dataclasses.replace(tiles, block_m=rows) if tiles.way == "rows" else tiles


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN: what is not written shows."""
    empty = torch.empty
    monkeypatch.setattr(linear_normed.torch, "empty", lambda *s, **n: empty(*s, **n).fill_(float("nan")))


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(n, dtype) for dtype in RTOL for n in range(1, linear_normed_tiles.most_rows(264) + 1)],
    ids=str,
)
def test_tiles_of_the_table_agree_with_the_references(rows, dtype):
    given = made(rows, 35, 264, dtype)
    check(linear_normed.normed_linear(*given, None, INTERPRETER), wanted(*given), dtype)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_way_and_norm_with_tails(name, norm):
    for rows in (1, 2) if VARIANTS[name].way == "rows" else (3, 8):
        for kept in (torch.float32, torch.bfloat16, None):
            given = made(rows, 35, 250, torch.bfloat16, kept, **NORMS[norm])
            bias = normal(35, dtype=torch.bfloat16)
            got = linear_normed.normed_linear(*given, bias, INTERPRETER, tiles=fitted(name, rows))
            check(got, wanted(*given, bias), torch.bfloat16)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_roundings_are_those_of_separate_kernels(name):
    """One weight row for each element makes the normed values visible: their bits are the reference's."""
    rows, inputs = (2, 64) if VARIANTS[name].way == "rows" else (5, 64)
    for dtype, early in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)):
        x, residual, scale, spec, _ = made(rows, 1, inputs, dtype, round_before_weight=early, offset=1.0)
        given = (x, residual, scale, spec, torch.eye(inputs, dtype=dtype))
        tiles = dataclasses.replace(fitted(name, rows), block_k=64, warps=min(2, VARIANTS[name].warps))
        got, _ = linear_normed.normed_linear(*given, None, INTERPRETER, tiles=tiles)
        normed, _ = REFERENCE[spec.op].make(spec)(x, residual, scale)
        # The sums of squares differ in their order: at most a rounding's border now and then.
        assert (got == normed).float().mean() > 0.99


@pytest.mark.parametrize("name", VARIANTS)
def test_gated(name):
    rows = 2
    for dtype, kept in ((torch.bfloat16, torch.float32), (torch.float32, None)):
        given = made(rows, 2 * 21, 144, dtype, kept)
        got = linear_normed.normed_linear(*given, None, INTERPRETER, "silu", fitted(name, rows))
        check(got, wanted(*given, kind="silu"), dtype)


def test_a_float32_stream_begins_a_bfloat16_model():
    for rows in (1, 2):
        x, _, *rest = made(rows, 24, 64, torch.bfloat16, None)
        given = (x.float() * 1.01, None, *rest)
        check(linear_normed.normed_linear(*given, None, INTERPRETER), wanted(*given), torch.bfloat16)


def test_rows_far_apart_and_of_any_strides():
    for rows in (1, 2):
        _, _, *rest = made(rows, 24, 64, torch.bfloat16)
        x, residual = normal(rows, 200, dtype=torch.bfloat16)[:, 8:72], normal(rows, 300, dtype=torch.float32)[:, :64]
        for given in ((x, residual, *rest), (x.t().contiguous().t(), residual.t().contiguous().t(), *rest)):
            check(linear_normed.normed_linear(*given, None, INTERPRETER), wanted(*given), torch.bfloat16)


def test_the_old_stream_is_left_as_it_was():
    for rows in (1, 2):
        given = made(rows, 40, 64, torch.bfloat16)
        before = given[1].clone()
        _, total = linear_normed.normed_linear(*given, None, INTERPRETER)
        assert torch.equal(given[1], before) and total.data_ptr() != given[1].data_ptr()


def test_a_row_does_not_see_the_others():
    for rows in (2,):
        x, residual, *rest = made(rows, 24, 256, torch.bfloat16)
        whole, _ = linear_normed.normed_linear(x, residual, *rest, None, INTERPRETER)
        for row in (0, rows - 1):
            others, streams = normal(rows, 256, dtype=torch.bfloat16, seed=9), normal(rows, 256, dtype=torch.float32)
            others[row], streams[row] = x[row], residual[row]
            got, _ = linear_normed.normed_linear(others, streams, *rest, None, INTERPRETER)
            assert torch.equal(got[row], whole[row])


def test_the_table_always_fits_and_what_does_not_is_refused():
    for outputs, inputs in (*linear_normed_tiles.MEASURED, (96, 61), (96, 3072), (96, 16384)):
        for rows in (1, 2):
            for size in (2, 4):
                tiles = linear_normed_tiles.choose(rows, outputs, inputs, size)
                fits = linear_normed_tiles.fits(tiles, rows, inputs)
                assert fits == (rows <= linear_normed_tiles.most_rows(inputs))
    given = made(2, 24, 64, torch.bfloat16)
    for tiles in (Tiles("rows", 1, 8, 64), Tiles("rows", 2, 8, 256), Tiles("fragments", 16, 16, 64)):
        with pytest.raises(ValueError, match="do not fit 2 rows"):
            linear_normed.normed_linear(*given, None, INTERPRETER, tiles=tiles)
    with pytest.raises(ValueError, match="no gated activation"):
        linear_normed.normed_linear(*given, None, INTERPRETER, "relu")


def test_a_measurement_overrules(monkeypatch):
    linear_normed_tiles.choose.cache_clear()
    tiles = Tiles("rows", 1, 16, 64)
    monkeypatch.setitem(linear_normed_tiles.MEASURED, (40, 256), {1: tiles})
    assert linear_normed_tiles.choose(1, 40, 256) is tiles and linear_normed_tiles.choose(1, 40, 256, 4) is not tiles
    linear_normed_tiles.choose.cache_clear()
