"""Every reference body against float64 loops that were written apart from it."""

import pytest
import torch

from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import BatchFacts, torch_runtime, torch_storage
from tests.unit.ops.judges import JUDGES, check

RUNTIME = torch_runtime("cpu")
DTYPES = ["float32", "bfloat16", "float16", "float64"]
INTEGER_OPS = {"sample.draw/1", "sample.verify/1", "sample.keep/1", "sample.count/1", "input.prepare/1"}


def place(slot_dtype="int64"):
    return Place(runtime=RUNTIME, storage=torch_storage(RUNTIME, slot_dtype=slot_dtype))


def test_every_op_has_a_judge():
    assert set(JUDGES) == set(REFERENCE)


RUNS = [(op, dtype, "int64") for op in sorted(REFERENCE) for dtype in DTYPES]
RUNS += [("attention.paged/1", dtype, "int32") for dtype in DTYPES]  # the other ops' cases have both in them


@pytest.mark.parametrize(("op", "dtype", "slot_dtype"), RUNS)
def test_body_agrees_with_float64(op, dtype, slot_dtype):
    reference = REFERENCE[op]
    count = 0
    for case in reference.cases(place(slot_dtype), dtype, 11):
        outputs = case.run(reference.make(case.spec))
        assert all(o.dtype != torch.float64 or dtype == "float64" for o in outputs), case.name
        check(case, outputs, reference.tolerance(dtype))
        count += 1
    assert count >= 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", sorted(name for name, r in REFERENCE.items() if r.invariant is not r.make))
def test_invariant_body_agrees_with_float64(op, dtype):
    reference = REFERENCE[op]
    assert reference.invariant is not None
    for case in reference.cases(place(), dtype, 12):
        check(case, case.run(reference.invariant(case.spec)), reference.tolerance(dtype))


@pytest.mark.parametrize("op", sorted(REFERENCE))
def test_a_wrong_result_is_noticed(op):
    """The judge's tolerance is not so wide that it lets a small planted fault pass."""
    reference = REFERENCE[op]
    caught = 0
    for case in reference.cases(place(), "float32", 13):
        outputs = case.run(reference.make(case.spec))
        if not all(o.numel() for o in outputs) or all(o.dim() == 0 for o in outputs):
            continue
        wrong = [o.clone() for o in outputs]
        last = wrong[0].view(-1)
        last[-1] = last[-1] + 1 if op in INTEGER_OPS else last[-1] + 1e-3 * (1 + abs(last[-1]))
        with pytest.raises(AssertionError, match="beyond the tolerance"):
            check(case, wrong, reference.tolerance("float32"))
        caught += 1
    assert caught >= 3


@pytest.mark.parametrize("op", sorted(REFERENCE))
def test_results_keep_the_dtype(op):
    reference = REFERENCE[op]
    for case in reference.cases(place("int32"), "bfloat16", 1):
        first = case.run(reference.make(case.spec))[0]
        if op in INTEGER_OPS:
            assert first.dtype == (torch.int64 if getattr(case.spec, "dtype", "") == "int64" else torch.int32)
        elif (
            op in {"sample.logprobs/1", "sample.adjust/1", "rope.angles/1"}
            or getattr(case.spec, "activations", "") == "float32"
        ):
            assert first.dtype == torch.float32
        else:
            assert first.dtype == torch.bfloat16


@pytest.mark.parametrize("op", sorted(REFERENCE))
def test_cost_grows_with_the_batch(op):
    reference = REFERENCE[op]
    spec = next(iter(reference.cases(place(), "float32", 1))).spec

    def cost(tokens):
        facts = BatchFacts(num_tokens=tokens, num_rows=tokens, decode_only=True, max_query_len=1, max_length_bound=128)
        return reference.cost(spec, facts)

    assert 0 < cost(1).bytes < cost(64).bytes
    assert 0 < cost(1).operations < cost(64).operations


def test_chunks_of_rows_do_not_change_the_result(monkeypatch):
    """The memory limit cuts rows and queries; results stay within rounding."""
    from drivetrain.ops.reference import attention

    monkeypatch.setattr(attention, "CHUNK_BYTES", 20_000)
    reference = REFERENCE["attention.paged/1"]
    for case in reference.cases(place(), "float32", 3):
        check(case, case.run(reference.make(case.spec)), reference.tolerance("float32"))
