"""input.prepare and sample.keep of the Triton wheel, run by the interpreter: integers, so equal."""

import numpy as np
import pytest
import torch

from drivetrain.ops.cases.source import Source, int_tensor
from drivetrain.ops.cases.steps import StepRow
from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import KeepSpec, PrepareInputs, PrepareSpec, torch_runtime, torch_storage
from tests.unit.ops.judges import check
from tests.unit.triton.interpreted import interpreted

with interpreted():
    from drivetrain_triton import prepare
    from drivetrain_triton.providers import provide_small
from drivetrain_triton.target import INTERPRETER

RUNTIME = torch_runtime("cpu")
PLACE = Place(runtime=RUNTIME, storage=torch_storage(RUNTIME, (16,), "int32"))


def kernel(spec):
    return provide_small(spec, INTERPRETER).implementation


@pytest.mark.parametrize("op", ["input.prepare/1", "sample.keep/1"])
def test_agrees_with_the_judge(op):
    for case in REFERENCE[op].cases(PLACE, "float32", 41):
        check(case, case.run(kernel(case.spec)), REFERENCE[op].tolerance("float32"))


def make_inputs(rows, slot_dtype, widths, places, seed=0):
    source, table_rows = Source("float32", seed), len(rows) + 3
    counts = [r.new + r.padded for r in rows]
    computed = source.integers(0, 900, table_rows, dtype="int32")
    computed[-1] = 0
    tables = tuple(source.integers(0, 5000, table_rows, w + 5, dtype=slot_dtype)[:, :w] for w in widths)
    return PrepareInputs(
        rows=int_tensor([r.row for r in rows], "int32"),
        start=int_tensor([r.start for r in rows], "int32"),
        token_row=int_tensor(np.repeat(np.arange(len(rows)), counts), "int32"),
        token_offset=int_tensor(np.concatenate([np.arange(c) for c in counts]), "int32"),
        host_ids=source.integers(0, 1000, sum(counts), dtype="int32"),
        num_new=int_tensor([r.new for r in rows], "int32"),
        computed=computed,
        last_tokens=source.integers(0, 1000, table_rows, places, dtype="int32"),
        block_tables=tables,
    )


def both(rows, slot_dtype="int32", widths=(70, 35), places=4):
    spec = PrepareSpec(dtype=slot_dtype, block_tokens=(16, 32)[: len(widths)])
    outcomes = []
    for make in (kernel, REFERENCE[spec.op].make):
        inputs = make_inputs(rows, slot_dtype, widths, places)
        outcomes.append((make(spec)(inputs, widths), inputs.computed))
    (got, advanced), (want, expected) = outcomes
    for name in ("ids", "positions", "base", "lengths"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for name in ("tables", "slots"):
        for one, other in zip(getattr(got, name), getattr(want, name), strict=True):
            assert torch.equal(one, other), name
            assert one.data_ptr() % 16 == got.ids.data_ptr() % 16
    assert torch.equal(advanced, expected)


@pytest.mark.parametrize("slot_dtype", ["int32", "int64"])
def test_long_rows_many_pieces_and_padding(slot_dtype, monkeypatch):
    monkeypatch.setattr(prepare, "TOKENS", 32)
    monkeypatch.setattr(prepare, "COLUMNS", 32)
    rows = [
        StepRow(row=3, start=-1, new=1),
        StepRow(row=5, start=0, new=301),
        *(StepRow(row=r, start=-1, new=3) for r in (6, 7, 8, 9, 1, 2)),
        StepRow(row=4, start=64, new=77),
        StepRow(row=0, start=-1, new=4),
        StepRow(row=12, start=-1, new=0, padded=50),
        StepRow(row=12, start=-1, new=0),
    ]
    rows = [StepRow(row=r.row if r.new else len(rows) + 2, start=r.start, new=r.new, padded=r.padded) for r in rows]
    both(rows, slot_dtype)


def test_rows_of_a_decode_graph():
    rows = [StepRow(row=r, start=-1, new=1) for r in (4, 0, 3, 1)] + [StepRow(row=8, start=-1, new=0, padded=1)] * 2
    both(rows, places=1)
    both(rows, widths=(40,))


def test_tokens_of_one_row_over_two_programs(monkeypatch):
    monkeypatch.setattr(prepare, "TOKENS", 2)
    both([StepRow(row=r, start=-1, new=n) for r, n in ((2, 1), (1, 4), (0, 3))])


def test_every_row_of_a_large_batch_is_kept():
    source = Source("float32", 3)
    tokens, witness = source.integers(0, 9000, 600, dtype="int32"), source.normal(600)
    witness[::7] = float("nan")
    rows, table = source.normal(700).argsort()[:600].to(torch.int32), torch.zeros(700, 3, dtype=torch.int32)
    packed = kernel(KeepSpec(dtype="int32"))(tokens, witness, rows, table)
    assert torch.equal(packed, torch.cat((tokens, witness.view(torch.int32))))
    assert torch.equal(table[rows.long(), 0], tokens) and table[:, 1:].sum() == 0
