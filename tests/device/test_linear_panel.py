"""Products of small weights for 17 to 64 rows, whose programs wait for each other: on a chip with bulk copies only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from drivetrain_api.v1 import LinearSpec
from drivetrain_triton.linear_tiles import PANEL_APART, PANEL_LINES, choose, choose_panel
from tests.device.test_kernels import bound

MEASURED = [(4096, 1024, ""), (1024, 2048, ""), (6144, 1024, "silu"), (1024, 3072, "")]
BY_RULE = [(3072, 2048, ""), (2048, 2048, ""), (8192, 1024, ""), (8192, 512, "gelu_tanh"), (4096, 1024, "gelu")]
ACTS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@pytest.fixture
def targets(backend):
    """What the kernels know of the card: launches that overlap, and that do not."""
    device = backend.device.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("no bulk copies of this kind here")
    from drivetrain_cuda.backend import target_of

    return [target_of(device, overlap=overlap) for overlap in (True, False)]


def tiles_of(rows, shape, target):
    """The tiles of 64 rows, made for fewer where these are not measured."""
    outs, inputs, kind = shape
    some = [choose_panel(each, outs, inputs, 90, 2, target.multiprocessors, bool(kind)) for each in (rows, 64)]
    if some[1] is None:
        pytest.skip(f"not for {target.multiprocessors} multiprocessors")
    return some[0] or replace(some[1], block_m=32 if rows <= 32 else 64)


def operands_of(rows, shape, device, dtype=torch.bfloat16, *, biased=False):
    """Random x, weight, bias, and a poisoned output with two rows behind it that nobody may write."""
    from drivetrain_triton.linear import Operands

    outs, inputs, kind = shape
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = (torch.randn(outs, inputs, device=device) * inputs**-0.5 * (2.0 if kind else 1.0)).to(dtype)
    bias = torch.randn(outs, device=device).to(dtype) if biased else None
    room = torch.full((rows + 2, outs // 2 if kind else outs), float("nan"), dtype=dtype, device=device)
    return Operands(x, weight, bias, room[:rows], kind), room


def launch(operands, target, tiles):
    from drivetrain_triton.linear import product_call

    call = product_call(operands, target, tiles)
    call.kernel[call.grid](*call.args, **call.options)


def wanted(operands):
    """In float64; of a gate with the roundings of separate kernels."""
    x, weight, bias, out, kind = operands
    both = x.double() @ weight.double().T
    if not kind:
        return both if bias is None else both + bias.double()
    gate, up = both.to(out.dtype).chunk(2, dim=1)
    return ACTS[kind](gate.double()).to(out.dtype).double() * up.double()


def check(got, want):
    assert float((got.double() - want).norm()) < 8e-3 * float(want.norm())
    torch.testing.assert_close(got.double(), want, rtol=3e-2, atol=2e-2)


@pytest.mark.parametrize(("dtype", "biased"), [("bfloat16", False), ("bfloat16", True), ("float16", True)])
@pytest.mark.parametrize("rows", [17, 32, 33, 64])
@pytest.mark.parametrize("shape", MEASURED + BY_RULE, ids=str)
def test_products_by_panels(targets, backend, shape, rows, dtype, biased):
    """Scratch and outputs hold NaN, and the counts that are used wrap around in the launch."""
    from drivetrain_triton.linear import prepare

    device = backend.device.device
    biased = biased and not shape[2]
    for target in targets:
        tiles = tiles_of(rows, shape, target)
        operands, room = operands_of(rows, shape, device, getattr(torch, dtype), biased=biased)
        want, results, scratch = wanted(operands), [], prepare(device)
        panels = shape[0] // tiles.block_n
        for _ in range(2):
            room.fill_(float("nan"))
            scratch.partials.fill_(float("nan"))
            scratch.turns.fill_(2**31 - tiles.shares)
            launch(operands, target, tiles)
            torch.cuda.synchronize()
            turns = torch.full_like(scratch.turns, 2**31 - tiles.shares)
            if tiles.shares > 1:
                turns[tiles.shares * PANEL_LINES * PANEL_APART :][: panels * PANEL_APART : PANEL_APART] = -(2**31)
            assert torch.equal(scratch.turns, turns)
            assert scratch.partials[panels * tiles.shares * 64 * tiles.block_n :].isnan().all()
            assert room[rows:].isnan().all() and not room[:rows].isnan().any()
            results.append(operands.out.clone())
        scratch.turns.zero_()
        check(results[0], want)
        assert torch.equal(*results)


@pytest.mark.parametrize("rows", [32, 40, 64])
def test_products_by_panels_follow_each_other_in_a_graph(targets, backend, rows):
    """Launches that overlap, of other shapes and shares and beside kernels that share their scratch: the bits of
    launches alone, again and again."""
    device, target = backend.device.device, targets[0]
    made = [(shape, *operands_of(rows, shape, device)) for _ in range(3) for shape in MEASURED + BY_RULE]
    work = [(operands, tiles_of(rows, shape, target)) for shape, operands, _ in made]
    stream = operands_of(rows, MEASURED[1], device)[0]
    work.insert(2, (stream, choose(rows, *MEASURED[1][:2], 90)))
    assert work[2][1].way == "stream" and work[2][1].shares > 1
    alone = []
    for operands, tiles in work:
        launch(operands, target, tiles)
        torch.cuda.synchronize()
        alone.append(operands.out.clone())
        check(alone[-1], wanted(operands))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for operands, tiles in work:
            launch(operands, target, tiles)
    for _ in range(50):
        for operands, _ in work:
            operands.out.fill_(float("nan"))
        graph.replay()
        graph.replay()
        assert all(torch.equal(operands.out, want) for (operands, _), want in zip(work, alone, strict=True))


def test_products_by_panels_that_need_each_other(targets, backend):
    """Each product reads what the one before it wrote, without a kernel between them."""
    device, rows = backend.device.device, 64
    shape = (2048, 2048, "")
    results = []
    weights = [operands_of(rows, shape, device)[0].weight for _ in range(12)]
    first = operands_of(rows, shape, device)[0]
    for target in targets:
        steps, x = [], first.x
        for weight in weights:
            steps.append(first._replace(x=x, weight=weight, out=torch.full_like(first.out, float("nan"))))
            x = steps[-1].out
        tiles = tiles_of(rows, shape, target)
        for one in steps:
            launch(one, target, tiles)
        torch.cuda.synchronize()
        for one in steps:
            check(one.out, wanted(one))
        results.append(x)
    assert torch.equal(*results)


@pytest.mark.parametrize("rows", [17, 33, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_the_backend_takes_panels(targets, backend, rows, biased):
    """Rows of any distance; the bits are those of the tiles that the table names."""
    from drivetrain_triton.linear import small_linear

    device, (outs, inputs, kind) = backend.device.device, MEASURED[0]
    operands, _ = operands_of(rows, MEASURED[0], device, biased=biased)
    tiles = choose_panel(rows, outs, inputs, 90, 2, targets[0].multiprocessors, bool(kind))
    if tiles is None:
        pytest.skip(f"not for {targets[0].multiprocessors} multiprocessors")
    linear = bound(backend, LinearSpec(dtype="bfloat16", in_features=inputs, out_features=outs, bias=biased))
    packed = linear.pack(operands.weight, operands.bias)
    wide = torch.randn(rows, inputs + 24, device=device).bfloat16()
    for x in (wide[:, :inputs].contiguous(), wide[:, 8 : 8 + inputs], wide[:, 3 : 3 + inputs]):
        got = linear.apply(x, packed)
        check(got, wanted(operands._replace(x=x)))
        want = small_linear(x, operands.weight, operands.bias, torch.bfloat16, targets[0], tiles)
        assert torch.equal(got, want)
