"""The real model: Gemma 3 270M gives the golden tokens, exactly in float32, and up to near ties in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.harness import Served
from tests.real_model import real_gguf  # noqa: F401  a fixture

DATA = Path(__file__).resolve().parents[1] / "data"
GOLDEN = json.loads((DATA / "gemma3_270m_golden.json").read_text(encoding="utf-8"))["cases"]
TWENTY = json.loads((DATA / "gemma3_270m_prompts20.json").read_text(encoding="utf-8"))["cases"]
SETTINGS = {"max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 32, "cache_bytes": 512 << 20}
MIRAGE = {**SETTINGS, "max_num_seqs": 4, "max_num_batched_tokens": 256, "cache_bytes": 192 << 20}  # it has 2 GiB
NEAR_TIE = 0.05  # float32 gap between the two likeliest tokens


def check(served: Served, cases: list[dict]) -> None:
    got = served.greedy([case["prompt_ids"] for case in cases], 32)
    for case, tokens in zip(cases, got, strict=True):
        assert tokens == case["out_ids"], case["prompt"][:60]


def test_golden_tokens_in_float32(real_gguf: Path, engine_device: str) -> None:  # noqa: F811
    if engine_device == "mirage-static":
        pytest.skip("its largest bucket is smaller than this model's prompts need; tiny models cover it")
    served = Served(real_gguf, engine_device, **(SETTINGS if engine_device == "cpu" else MIRAGE))
    check(served, GOLDEN)
    if engine_device == "cpu":
        check(served, TWENTY)
    served.close()


@pytest.mark.slow
def test_twenty_prompts_on_mirage(real_gguf: Path) -> None:  # noqa: F811
    served = Served(real_gguf, "mirage", **MIRAGE)
    check(served, TWENTY)
    served.close()


def test_bfloat16_differs_only_at_near_ties(real_gguf: Path) -> None:  # noqa: F811
    served = Served(real_gguf, "cpu", **{**SETTINGS, "dtype": "bfloat16"})
    got = served.greedy([case["prompt_ids"] for case in TWENTY], 32)
    for case, tokens in zip(TWENTY, got, strict=True):
        for want, token, gap in zip(case["out_ids"], tokens, case["top1_top2_gap"], strict=True):
            if want != token:
                assert gap < NEAR_TIE, f"{case['prompt'][:40]}: {token} for {want} at a gap of {gap}"
                break
    served.close()
