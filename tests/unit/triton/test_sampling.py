"""sample.draw of the Triton wheel, run by the interpreter: the reference's tokens, all of them."""

from dataclasses import replace

import pytest
import torch

from drivetrain.ops.cases.sampling import random_mask
from drivetrain.ops.cases.source import Source
from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import DrawSpec, SamplingInputs, torch_runtime, torch_storage
from tests.unit.ops.judges import check
from tests.unit.triton.interpreted import interpreted

with interpreted():
    from drivetrain_triton import draws, filters
    from drivetrain_triton.providers import provide_small
from drivetrain_triton.target import INTERPRETER

RUNTIME = torch_runtime("cpu")
PLACE = Place(runtime=RUNTIME, storage=torch_storage(RUNTIME, (16,), "int32"))
ROWS = 4


def kernel(spec):
    return provide_small(spec, INTERPRETER).implementation


def make_inputs(seed, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, rows=ROWS):
    source = Source("float32", seed)
    return SamplingInputs(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        seed=source.integers(-(2**63), 2**63 - 1, rows),
        position=source.integers(0, 1 << 20, rows, dtype="int32"),
        sample=source.integers(0, 4, rows, dtype="int32"),
        mask=None,
        all_greedy=temperature == 0,
        any_top_k=top_k > 0,
        any_top_p=top_p < 1,
        any_min_p=min_p > 0,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_agrees_with_the_judge(dtype):
    reference = REFERENCE["sample.draw/1"]
    for case in reference.cases(PLACE, dtype, 51):
        if case.spec.vocabulary < 100 or dtype == "float32":
            check(case, case.run(kernel(case.spec)), reference.tolerance(dtype))


FILTERS = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.35},
    {"temperature": 3.0},
    {"top_k": 40},
    {"top_p": 0.9, "temperature": 1.5},
    {"min_p": 0.02},
    {"top_k": 300, "top_p": 0.95, "min_p": 0.001, "temperature": 2.0},
    {"top_p": 0.0},
    {"top_k": 1},
)


@pytest.mark.parametrize("settings", FILTERS)
@pytest.mark.parametrize(("vocabulary", "dtype"), [(1003, "float32"), (5000, "bfloat16")])
def test_draws_the_references_tokens(settings, vocabulary, dtype):
    source = Source(dtype, 6)
    spec = DrawSpec(dtype=dtype, vocabulary=vocabulary)
    draw, reference = kernel(spec), REFERENCE[spec.op].make(spec)
    logits = source.normal(ROWS, vocabulary, scale=2.0)
    inputs = make_inputs(7, **settings)
    assert torch.equal(draw(logits, inputs, 0), reference(logits, inputs, 0))


@pytest.mark.parametrize("levels", [1, 3])
def test_ties_at_every_limit(levels):
    source = Source("float32", 8)
    spec = DrawSpec(dtype="float32", vocabulary=301, vocabulary_offset=5)
    logits = source.integers(0, levels, 24, 301).to(torch.float32)
    inputs = make_inputs(9, rows=24, top_k=90, top_p=0.5, min_p=0.3)
    inputs = replace(inputs, top_k=source.integers(0, 310, 24, dtype="int32"))
    inputs = replace(inputs, mask=random_mask(source, 24, 301))
    assert torch.equal(kernel(spec)(logits, inputs, 1), REFERENCE[spec.op].make(spec)(logits, inputs, 1))


def test_limits_keep_what_the_reference_keeps(monkeypatch):
    """Not only the token drawn: every token, over several tiles."""
    from drivetrain.ops.reference.draws import filtered

    monkeypatch.setattr(filters, "TILE", 256)
    source = Source("float32", 10)
    for scale, settings in ((0.0, {"top_p": 0.5}), (2.0, {"top_k": 17, "top_p": 0.8}), (0.01, {"top_p": 0.3})):
        scaled = (
            (source.normal(4, 500, scale=scale) * 4).round() / 4 if scale == 2.0 else source.normal(4, 500, scale=scale)
        )
        inputs = make_inputs(11, rows=4, **settings)
        keys = torch.where(scaled == 0, 0.0, scaled).view(torch.int32)
        keys = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
        least, last, _ = filters.find_limits(keys, inputs, INTERPRETER).unsqueeze(-1)
        keep = (keys > least) | ((keys == least) & (torch.arange(500) <= last))
        assert torch.equal(keep, filtered(scaled, inputs) > float("-inf"))


def test_pieces_have_no_part_in_the_result(monkeypatch):
    source = Source("bfloat16", 12)
    spec = DrawSpec(dtype="bfloat16", vocabulary=3001, vocabulary_offset=2)
    logits = source.integers(0, 3, 4, 3001).to(torch.bfloat16)
    inputs = make_inputs(13, rows=4)
    mixed = replace(inputs, temperature=torch.tensor([0.0, 1.0, 0.0, 0.5]))
    want = [REFERENCE[spec.op].make(spec)(logits, each, 2) for each in (inputs, mixed)]
    for per_processor in (1, 100):
        monkeypatch.setattr(draws, "PER_PROCESSOR", per_processor)
        monkeypatch.setattr(draws, "TILE", 512)
        draw = kernel(spec)
        assert torch.equal(draw(logits, inputs, 2), want[0])
        assert torch.equal(draw(logits, mixed, 2), want[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}])
def test_a_row_that_is_not_finite_draws_what_shows_it(bad, settings):
    source = Source("float32", 14)
    spec = DrawSpec(dtype="float32", vocabulary=1000)
    logits, inputs = source.normal(2, 1000), make_inputs(15, rows=2, **settings)
    alone = kernel(spec)(logits, inputs, 0)
    logits[0, 7] = logits[0, 400] = bad
    assert kernel(spec)(logits, inputs, 0).tolist() == [7, int(alone[1])]


def test_a_row_that_allows_nothing_gives_the_first_token():
    spec = DrawSpec(dtype="float32", vocabulary=100, vocabulary_offset=50)
    inputs = replace(make_inputs(16, rows=2), mask=torch.zeros(2, 4, dtype=torch.int32))
    assert kernel(spec)(torch.ones(2, 100), inputs, 0).tolist() == [50, 50]
    strict = replace(inputs, any_top_k=True, any_top_p=True, top_p=torch.full((2,), 0.5))
    assert kernel(spec)(torch.ones(2, 100), strict, 0).tolist() == [50, 50]
