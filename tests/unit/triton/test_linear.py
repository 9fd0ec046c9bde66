"""Linears for few rows through the interpreter, against float64."""

import dataclasses

import pytest
import torch

from tests.unit.triton.interpreted import interpreted

with interpreted():
    from drivetrain_triton import linear, linear_tiles
    from drivetrain_triton.linear_tiles import Tiles
from drivetrain_triton.target import INTERPRETER, Target

RTOL = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
ROW = Tiles("rows", 1, 8, 64)
FRAGMENTS = Tiles("fragments", 8, 16, 128, warps=2)
VARIANTS = {
    "rows, at once": dataclasses.replace(ROW, block_k=256),
    "rows": ROW,
    "fragments": FRAGMENTS,
    "fragments, low panels": dataclasses.replace(FRAGMENTS, block_m=16, block_n=8),
    "fragments, wide": dataclasses.replace(FRAGMENTS, block_m=16, block_n=32, block_k=64, warps=1),
}


def normal(*shape, dtype, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def product(x, weight, bias=None):
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def check(got, want, dtype):
    rtol = RTOL[dtype]
    assert not got.isnan().any()
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=4 * rtol)


def fitted(tiles, rows):
    return dataclasses.replace(tiles, block_m=linear_tiles._power(rows)) if tiles.way == "rows" else tiles


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN: what is not written shows."""
    empty = torch.empty

    def filled(*shape, **named):
        out = empty(*shape, **named)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(linear.torch, "empty", filled)


@pytest.mark.parametrize("dtype", list(RTOL), ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 32])
def test_tiles_of_the_table_agree_with_float64(rows, dtype):
    for outputs, inputs, biased in ((96, 128, False), (47, 264, True), (9, 5, False)):
        if rows > linear_tiles.most_rows(0, dtype.itemsize, inputs):
            continue
        x, weight = normal(rows, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
        bias = normal(outputs, dtype=dtype) if biased else None
        got = linear.small_linear(x, weight, bias, dtype, INTERPRETER)
        assert got.dtype == dtype and got.shape == (rows, outputs)
        check(got, product(x, weight, bias), dtype)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_way_with_tails(name):
    tiles, dtype = VARIANTS[name], torch.bfloat16
    for rows in (1, 3) if tiles.way == "rows" else (5, 17):
        for outputs, inputs in ((40, 256), (35, 250)):
            x, weight = normal(rows, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
            bias = normal(outputs, dtype=dtype)
            got = linear.small_linear(x, weight, bias, torch.float32, INTERPRETER, fitted(tiles, rows))
            assert got.dtype == torch.float32
            check(got, product(x, weight, bias), torch.float32)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gated(kind, name):
    acts = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
    }
    for dtype in (torch.bfloat16, torch.float32):
        rows, size, inputs = 3, 21, 144
        x, weight = normal(rows, inputs, dtype=dtype), normal(2 * size, inputs, dtype=dtype, scale=3 * inputs**-0.5)
        got = linear.small_gated(x, weight, kind, INTERPRETER, fitted(VARIANTS[name], rows))
        both = product(x, weight).to(dtype)
        want = acts[kind](both[:, :size].float()).to(dtype).double() * both[:, size:].double()
        assert got.dtype == dtype and got.shape == (rows, size)
        check(got, want, dtype)


def test_gated_by_the_table():
    for rows in (1, 2, 8):
        x, weight = normal(rows, 128, dtype=torch.bfloat16), normal(2 * 37, 128, dtype=torch.bfloat16, scale=0.1)
        both = product(x, weight).to(torch.bfloat16)
        act = torch.nn.functional.silu(both[:, :37].float()).to(torch.bfloat16)
        check(linear.small_gated(x, weight, "silu", INTERPRETER), act.double() * both[:, 37:].double(), torch.bfloat16)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_does_not_see_the_others(name):
    rows = 4 if VARIANTS[name].way == "rows" else 16
    tiles = fitted(VARIANTS[name], rows)
    weight = normal(24, 256, dtype=torch.bfloat16)
    x = normal(rows, 256, dtype=torch.bfloat16)
    whole = linear.small_linear(x, weight, None, torch.float32, INTERPRETER, tiles)
    for row in (0, rows - 1):
        others = normal(rows, 256, dtype=torch.bfloat16, seed=9)
        others[row] = x[row]
        got = linear.small_linear(others, weight, None, torch.float32, INTERPRETER, tiles)
        assert torch.equal(got[row], whole[row])
        alone = linear.small_linear(x[row : row + 1], weight, None, torch.float32, INTERPRETER, tiles)
        if tiles.way == "rows":
            assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_far_apart(name):
    x = normal(3, 1000, dtype=torch.bfloat16)[:, 8:200]
    weight = normal(20, 192, dtype=torch.bfloat16, scale=0.1)
    got = linear.small_linear(x, weight, None, torch.float32, INTERPRETER, fitted(VARIANTS[name], 3))
    check(got, product(x, weight), torch.float32)


def test_rows_of_any_strides():
    weight = normal(24, 64, dtype=torch.bfloat16)
    for x in (normal(64, 3, dtype=torch.bfloat16).t(), normal(3, 128, dtype=torch.bfloat16)[:, ::2]):
        check(linear.small_linear(x, weight, None, torch.float32, INTERPRETER), product(x, weight), torch.float32)


def test_no_rows_are_no_launch():
    x, weight = normal(20, 256, dtype=torch.bfloat16), normal(40, 256, dtype=torch.bfloat16)
    assert linear.small_linear(x[:0], weight, None, torch.float32, INTERPRETER).shape == (0, 40)


def test_what_does_not_fit_is_refused():
    weight = torch.empty(65536, 4096)
    with pytest.raises(ValueError, match="scratch"):
        tiles = Tiles("stream", 64, 64, 64, shares=4)
        linear.small_linear(torch.empty(64, 4096), weight, None, torch.float32, INTERPRETER, tiles)
    whole = Tiles("stream", 8, 64, 128, shares=2)
    assert linear_tiles.fits(whole, 8, 64, 256)
    for change in ({"block_n": 32}, {"block_m": 4}, {"stages": 99}, {"shares": 3}):
        assert not linear_tiles.fits(dataclasses.replace(whole, **change), 8, 64, 256), change
    assert not linear_tiles.fits(whole, 8, 64, 260)
    for tiles in (Tiles("rows", 2, 8, 64), Tiles("fragments", 8, 8, 128), Tiles("fragments", 8, 16, 64)):
        assert not linear_tiles.fits(tiles, 3, 64, 128)
    with pytest.raises(ValueError, match="no gated activation"):
        linear.small_gated(torch.empty(1, 16), weight, "relu", INTERPRETER)


def test_supports():
    hopper = Target(kind="cuda", arch=90, multiprocessors=132, shared_bytes=232448)
    weight = torch.empty(8, 16, dtype=torch.bfloat16)

    def rows_of(target, weight, dtype):
        return max((rows for rows in range(80) if linear.supports(rows, weight, dtype, target)), default=0)

    assert rows_of(hopper, weight, torch.bfloat16) == 64 and not linear.supports(0, weight, torch.bfloat16, hopper)
    assert rows_of(dataclasses.replace(hopper, arch=80), weight, torch.bfloat16) == 32
    assert rows_of(hopper, torch.empty(8, 20, dtype=torch.bfloat16), torch.bfloat16) == 32
    assert rows_of(hopper, weight.float(), torch.float32) == 4
    assert not rows_of(hopper, weight, torch.float32) and not rows_of(hopper, weight.T, torch.bfloat16)


def test_the_table_always_fits():
    for outputs, inputs in (*linear_tiles.MEASURED, (8192, 2048), (512, 264), (49152, 576)):
        for rows, size in [(rows, 2) for rows in (1, 2, 3, 8, 17, 33, 64)] + [(rows, 4) for rows in (1, 2, 3, 4)]:
            for arch in (80, 90) if rows <= 32 else (90,):
                tiles = linear_tiles.choose(rows, outputs, inputs, arch, size)
                assert linear_tiles.fits(tiles, rows, outputs, inputs)
                assert tiles.way != "stream" or arch == 90
                assert tiles == linear_tiles.choose(linear_tiles.bucket(rows), outputs, inputs, arch, size)


def test_a_measurement_overrules(monkeypatch):
    linear_tiles.choose.cache_clear()
    monkeypatch.setitem(linear_tiles.MEASURED, (40, 256), {8: FRAGMENTS})
    assert linear_tiles.choose(5, 40, 256, 90) is FRAGMENTS
    assert linear_tiles.choose(5, 40, 256, 90, 4) is not FRAGMENTS and linear_tiles.choose(9, 40, 256, 90) != FRAGMENTS
    linear_tiles.choose.cache_clear()


@pytest.mark.parametrize(
    ("rows", "outs", "inputs", "wide"),
    [
        (256, 14336, 4096, True),  # two rounds of tiles, well filled
        (8192, 3072, 1024, True),
        (192, 14336, 4096, False),  # as many tiles as of 256 rows
        (512, 14336, 4096, False),  # four rounds of which the last is half empty
        (256, 3072, 1024, False),  # fewer tiles than programs
        (64, 14336, 4096, False),  # the kernel for few rows
        (256, 14332, 4096, False),  # results whose rows bulk copies can't reach
    ],
)
def test_tiles_of_many_rows_are_taken_where_they_fill_rounds(rows, outs, inputs, wide):
    assert linear_tiles.is_wide(rows, outs, inputs, 90, 2, 132) == wide
    assert not linear_tiles.is_wide(rows, outs, inputs, 80, 2, 132)
    assert not linear_tiles.is_wide(rows, outs, inputs, 90, 4, 132)


H200, H100_PCIE, SLICE = 132, 114, 60
SMALL = {(4096, 1024): False, (1024, 2048): False, (6144, 1024): True, (1024, 3072): False}


def panel(rows, outs, inputs, gated=False, *, arch=90, size=2, programs=H200):
    return linear_tiles.choose_panel(rows, outs, inputs, arch, size, programs, gated)


def test_small_weights_of_17_to_64_rows_are_taken_by_panels():
    for (outs, inputs), gated in SMALL.items():
        taken = [rows for rows in range(130) if panel(rows, outs, inputs, gated)]
        more = (outs, inputs) == (6144, 1024)
        assert taken == list(range(33 if more else 17, 65)), "where they were measured to gain"
        for rows in (taken[0], 40, 64):
            tiles = panel(rows, outs, inputs, gated)
            assert tiles.way == "panel" and tiles == panel(linear_tiles.bucket(rows), outs, inputs, gated)
            assert linear_tiles.fits(tiles, rows, outs, inputs, H200, gated)
            assert outs // tiles.block_n * tiles.shares <= H200
    for change in ({"arch": 80}, {"arch": 100}, {"size": 4}, {"programs": SLICE}):
        assert panel(64, 4096, 1024, **change) is None, change


@pytest.mark.parametrize(
    ("outs", "inputs", "gated", "found"),
    [
        (3072, 2048, False, (64, 2)),  # 96 programs, as by panels of half the height
        (2048, 2048, False, (32, 2)),
        (8192, 1024, False, (64, 1)),
        (8192, 512, True, (64, 1)),
        (4096, 1024, True, (32, 1)),  # measured without a gate, taken with one
        (2048, 2048, True, None),
        (1024, 1024, False, None),  # shares of 512 inputs: 64 programs
        (4096, 4096, False, None),  # 32 MiB
        (6144, 4096, False, None),
        (9728, 896, True, None),  # more programs than multiprocessors
        (1152, 896, False, None),
        (4096, 1000, False, None),
        (4104, 1024, False, None),
    ],
)
def test_other_small_weights_of_64_rows(outs, inputs, gated, found):
    tiles = panel(64, outs, inputs, gated)
    assert (tiles and (tiles.block_n, tiles.shares)) == found
    assert (outs, inputs) in SMALL or panel(32, outs, inputs, gated) is None


def test_programs_that_wait_for_each_other_are_on_the_card_at_once():
    tiles = panel(64, 1024, 3072)
    assert tiles.shares == 4 and 1024 // tiles.block_n * tiles.shares == 64
    assert linear_tiles.fits(tiles, 64, 1024, 3072, 64) and not linear_tiles.fits(tiles, 64, 1024, 3072, 63)
    assert not linear_tiles.fits(tiles, 64, 1024, 3072), "without a word on the card never"
    assert panel(64, 4096, 1024, programs=H100_PCIE) != panel(64, 4096, 1024)
    for outs in range(32, 20000, 32):
        for inputs in (128, 512, 1024, 2048):
            for programs in (SLICE, H100_PCIE, H200):
                found = panel(64, outs, inputs, programs=programs)
                assert found is None or outs // found.block_n * found.shares <= programs


def test_panels_that_do_not_fit_are_refused():
    tiles = panel(64, 1024, 3072)
    wrong = ({"stages": 1}, {"row_stages": 1}, {"row_stages": 12}, {"shares": 3}, {"block_n": 48}, {"block_m": 32},
             {"warps": 8}, {"block_k": 96}, {"shares": 16}, {"block_n": 256})  # fmt: skip
    for change in wrong:
        assert not linear_tiles.fits(dataclasses.replace(tiles, **change), 64, 1024, 3072, H200), change
    assert not linear_tiles.fits(tiles, 64, 1024, 3072, H200, gated=True)
    assert not linear_tiles.fits(tiles, 64, 1040, 3072, H200) and not linear_tiles.fits(tiles, 64, 1024, 3136, H200)
    assert not linear_tiles.fits(tiles, 65, 1024, 3072, H200)


def test_who_is_given_panels():
    hopper = Target(kind="cuda", arch=90, multiprocessors=H200, shared_bytes=232448)

    def way(x_dtype, out_dtype, target):
        x, weight, out = (
            torch.empty(*shape, dtype=dtype, device="meta")
            for shape, dtype in (((64, 1024), x_dtype), ((4096, 1024), x_dtype), ((64, 4096), out_dtype))
        )
        return linear.tiles_of(linear.Operands(x, weight, None, out), target).way

    for dtype in (torch.bfloat16, torch.float16):
        assert way(dtype, dtype, hopper) == "panel"
        assert way(dtype, torch.float32, hopper) == "stream", "logits are those of the head without them"
        assert way(dtype, dtype, dataclasses.replace(hopper, multiprocessors=SLICE)) == "stream"
    assert way(torch.bfloat16, torch.bfloat16, INTERPRETER) == "fragments"
