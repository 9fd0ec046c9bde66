"""The real Gemma 3 270M, from its GGUF file, on the reference in float32: greedy tokens equal to Transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drivetrain.models.build import planned_bytes
from tests.real_model import real_gguf
from tests.unit.models.driving import Driver, loaded, reference_ops

__all__ = ["real_gguf"]
GOLDEN = Path(__file__).resolve().parents[2] / "data" / "gemma3_270m_golden.json"


def test_first_golden_case(real_gguf):
    case = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"][0]
    decoder, report = loaded(real_gguf)
    assert planned_bytes(decoder.spec, reference_ops()) == report.weight_bytes
    assert (len(decoder.layers), decoder.spec.vocabulary, decoder.spec.hidden) == (18, 262144, 640)
    driver, found = Driver(decoder, max_len=64), []
    chunk = case["prompt_ids"]
    for _ in case["out_ids"]:
        logits = driver.step({0: chunk})[0][-1]
        chunk = [int(logits.argmax())]
        found += chunk
    assert found == case["out_ids"]
    top = logits.topk(2).values
    assert float(top[0] - top[1]) == pytest.approx(case["top1_top2_gap"][-1], abs=2e-3)
