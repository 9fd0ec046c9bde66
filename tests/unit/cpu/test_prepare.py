"""input.prepare and sample.keep on the host: with and without the library, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import KeepSpec, PrepareSpec, torch_runtime, torch_storage
from drivetrain_cpu.native import load_kernels
from drivetrain_cpu.prepare import NativePrepare, Prepare, keep
from drivetrain_cpu.threads import Threads
from tests.unit.ops.judges import check

KERNELS = load_kernels()
THREADS = Threads(1)


def cases(op):
    runtime = torch_runtime("cpu")
    return list(REFERENCE[op].cases(Place(runtime=runtime, storage=torch_storage(runtime)), "float32", 3))


@pytest.mark.parametrize("make", [Prepare, lambda spec, threads: NativePrepare(spec, threads, KERNELS)])
def test_both_ways_of_preparing_are_exact(make):
    found = cases(PrepareSpec.op)
    for case in found:
        check(case, case.run(make(case.spec, THREADS)), REFERENCE[PrepareSpec.op].tolerance("float32"))
    assert len(found) >= 6


@pytest.mark.parametrize("way", [keep, KERNELS.keep])
def test_both_ways_of_keeping_are_exact(way):
    for case in cases(KeepSpec.op):
        check(case, case.run(way), REFERENCE[KeepSpec.op].tolerance("float32"))


@pytest.mark.parametrize(
    ("spoilt", "bad"), [("rows", -1), ("rows", 1000), ("token_row", -1), ("token_row", 1000), ("token_offset", -1)]
)
def test_a_place_that_is_not_there_is_refused_before_anything_is_written(spoilt, bad):
    case = cases(PrepareSpec.op)[-1]
    inputs, widths = case.inputs["inputs"], case.inputs["widths"]
    values = getattr(inputs, spoilt).clone()
    values[-1] = bad
    before = inputs.computed.clone()
    with pytest.raises(IndexError, match="not there"):
        NativePrepare(case.spec, THREADS, KERNELS)(replace(inputs, **{spoilt: values}), widths)
    assert torch.equal(inputs.computed, before)


@pytest.mark.parametrize("width", [0, 1000])
def test_more_blocks_than_a_table_holds_are_refused(width):
    case = cases(PrepareSpec.op)[-1]
    before = case.inputs["inputs"].computed.clone()
    with pytest.raises(IndexError, match=f"{width} blocks a row"):
        NativePrepare(case.spec, THREADS, KERNELS)(case.inputs["inputs"], (case.inputs["widths"][0], width))
    assert torch.equal(case.inputs["inputs"].computed, before)


@pytest.mark.parametrize("spoil", [lambda t: t.to(torch.int64), lambda t: torch.stack((t, t), 1)[:, 0]])
def test_another_dtype_or_layout_is_refused(spoil):
    case = cases(PrepareSpec.op)[-1]
    inputs = replace(case.inputs["inputs"], token_row=spoil(case.inputs["inputs"].token_row))
    with pytest.raises(TypeError, match=r"contiguous torch\.int32"):
        NativePrepare(case.spec, THREADS, KERNELS)(inputs, case.inputs["widths"])


def test_a_kept_row_that_is_not_there_is_named():
    tokens, witness = torch.tensor([1], dtype=torch.int32), torch.zeros(1)
    with pytest.raises(IndexError, match=r"rows \[5\] are not all in a table of 5"):
        KERNELS.keep(tokens, witness, torch.tensor([5], dtype=torch.int32), torch.zeros(5, 1, dtype=torch.int32))
