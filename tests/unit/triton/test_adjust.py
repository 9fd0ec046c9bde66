"""sample.adjust and sample.count of the Triton wheel, run by the interpreter: within rounding of the judge, and a row's
bits do not depend on the others."""

from dataclasses import replace

import pytest
import torch

from drivetrain.ops.cases.adjust import adjust_inputs
from drivetrain.ops.cases.source import Source
from drivetrain.ops.reference import REFERENCE, Place
from drivetrain.runner.adjusting import AdjustTables
from drivetrain.runner.rows import TableShape
from drivetrain_api.v1 import AdjustSpec, CountSpec, torch_runtime, torch_storage
from tests.unit.ops.judges import check
from tests.unit.triton.interpreted import interpreted

with interpreted():
    from drivetrain_triton import adjust
    from drivetrain_triton.providers import provide_small
from drivetrain_triton.target import INTERPRETER

RUNTIME = torch_runtime("cpu")
PLACE = Place(runtime=RUNTIME, storage=torch_storage(RUNTIME, (16,), "int32"))


def kernel(spec):
    return provide_small(spec, INTERPRETER).implementation


@pytest.mark.parametrize(
    ("op", "dtype"), [("sample.adjust/1", "float32"), ("sample.adjust/1", "bfloat16"), ("sample.count/1", "float32")]
)
def test_agrees_with_the_judge(op, dtype):
    for case in REFERENCE[op].cases(PLACE, dtype, 71):
        check(case, case.run(kernel(case.spec)), REFERENCE[op].tolerance(dtype))


def test_several_tiles_and_strided_logits():
    """More than a tile of tokens, and rows that lie apart."""
    vocabulary, source = adjust.TILE * 2 + 77, Source("float32", 5)
    inputs = adjust_inputs(source, 6, vocabulary)
    logits = source.normal(6, vocabulary + 3, scale=3.0)[:, :vocabulary]
    spec = AdjustSpec(dtype="float32", vocabulary=vocabulary)
    got, want = kernel(spec)(logits, inputs), REFERENCE[spec.op].make(spec)(logits, inputs)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=4e-6)
    for n in range(6):
        alone = replace(inputs, slots=inputs.slots[n : n + 1], position=inputs.position[n : n + 1])
        assert torch.equal(kernel(spec)(logits[n : n + 1], alone)[0], got[n])


def test_the_engines_own_tables():
    """Columns of one table, as the runner has them: a slot of full size that changes nothing, and counts in it."""
    shape = TableShape(num_rows=3, max_drafts=0, widths=(1,), slot_dtype="int32", adjusted=2, vocabulary=101)
    tables = AdjustTables(RUNTIME, 4, shape)
    tokens, slots, position = (torch.tensor(values, dtype=torch.int32) for values in ((5, 9), (1, 0), (40, 17)))
    kernel(CountSpec(dtype="int32", vocabulary=101))(tokens, slots, position, tables.counts, tables.recent)
    assert (int(tables.counts[1, 5]), int(tables.counts[0, 9]), int(tables.counts.sum())) == (1, 1, 2)
    assert (int(tables.recent[1, 40 % 16]), int(tables.recent[0, 1])) == (5, 9)
    logits = Source("float32", 6).normal(2, 101)
    inputs = tables.inputs(slots, position, (True, True, True, True))
    assert torch.equal(kernel(AdjustSpec(dtype="float32", vocabulary=101))(logits, inputs), logits)
