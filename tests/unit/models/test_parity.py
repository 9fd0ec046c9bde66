"""Logits against Transformers in float32, on tiny random checkpoints of every family and variant."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import VARIANTS, hf_logits, random_ids, tiny_checkpoint
from tests.unit.models.driving import Driver, loaded, run

LENGTH = 53  # many times the window of 8, and more than three blocks
TOLERANCE = 1e-4
# Transformers 5.23 reads this key of Gemma 3 and then leaves it out of its attention; test_attention covers it.
WITHOUT = {"gemma3-scaled": {"attn_logit_softcapping": None}}


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def model(request, tmp_path_factory):
    directory = tiny_checkpoint(
        request.param, tmp_path_factory.mktemp(request.param) / "model", **WITHOUT.get(request.param, {})
    )
    decoder, _ = loaded(directory)
    ids = random_ids(LENGTH, vocabulary=decoder.spec.vocabulary)
    return decoder, ids, hf_logits(directory, ids)


def pieces(kind: str) -> list[int]:
    return {"one shot": [LENGTH], "odd chunks": [1, 5, 17, 3, 16, 11], "token by token": [1] * LENGTH}[kind]


@pytest.mark.parametrize("kind", ["one shot", "odd chunks", "token by token"])
def test_logits_equal_transformers(model, kind):
    decoder, ids, expected = model
    got = run(decoder, ids, pieces(kind))
    assert got.shape == expected.shape and got.dtype == torch.float32
    assert float(expected.abs().max()) > 1.0, "logits this flat would prove nothing"
    assert float((got - expected).abs().max()) < TOLERANCE


def test_rows_of_a_mixed_batch_do_not_meet(model):
    decoder, ids, expected = model
    driver = Driver(decoder, rows=3)
    parts = {0: [], 1: [], 2: []}
    steps = ({0: 20}, {1: 30, 0: 1}, {0: 1, 2: 2, 1: 7}, {2: 40, 1: 16, 0: 31}, {2: 11})
    for step in steps:
        chunks = {r: ids[driver.rows[r].computed :][:n] for r, n in step.items()}
        for row, logits in zip(chunks, driver.step(chunks), strict=True):
            parts[row].append(logits)
    for row in range(3):
        got = torch.cat(parts[row])
        assert len(got) == LENGTH
        assert float((got - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_stages_pass_nothing_but_the_carry(family, cut, tmp_path):
    directory = tiny_checkpoint(family, tmp_path / "model")
    whole, report = loaded(directory)
    count = len(whole.layers)
    first, bytes_of_first = loaded(directory, layers=range(cut))
    second, bytes_of_second = loaded(directory, layers=range(cut, count))
    assert first.carry_names == ("hidden", "residual")
    ids = random_ids(LENGTH)
    driver = Driver(first, second)
    got = torch.cat([driver.step({0: ids[:40]})[0], driver.step({0: ids[40:]})[0]])
    assert torch.equal(got, run(whole, ids, [40, 13]))
    extra = whole.spec.vocabulary * whole.spec.hidden * 4 if whole.spec.tied else 0  # the last stage's own copy
    ropes = sum(h.planned_bytes() for h in whole.holders if not h.sources and not hasattr(h, "packed"))
    both = bytes_of_first.weight_bytes + bytes_of_second.weight_bytes
    assert report.weight_bytes + extra <= both <= report.weight_bytes + extra + ropes
    with pytest.raises(RuntimeError, match="last stage"):
        first.finish({"hidden": torch.zeros(1, 60)})
    with pytest.raises(RuntimeError, match="first stage"):
        second.embed(torch.tensor([1]))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_bf16_stays_near_float32(family, tmp_path):
    directory = tiny_checkpoint(family, tmp_path / "model")
    ids = random_ids(LENGTH)
    decoder, report = loaded(directory, "bfloat16")
    exact = hf_logits(directory, ids)
    error = (run(decoder, ids, [LENGTH]) - exact).abs()
    assert 0 < float(error.mean()) < 0.05 * float(exact.std())
    assert report.weight_bytes < 0.52 * loaded(directory)[1].weight_bytes
