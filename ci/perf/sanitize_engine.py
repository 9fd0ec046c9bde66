"""A whole engine as a load of ``device_sanitize.py``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

DTYPE, SEED = "bfloat16", 47
SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip
# (prompt lengths, new tokens): together in one engine, one after the other
REQUESTS = (((300,), 2), ((20, 3), 2), ((40,) * 8, 2), ((17,) * 40, 2), ((700,), 3), ((260, 1, 9, 130), 2))


def engine(_site: object) -> None:
    """A two-layer model with heads of 128 serves random prompts without graphs: prompts alone and beside decode rows, 1
    to 40 decode rows, long and short rows, every way of sampling."""
    from device_models import MODELS
    from device_offline import Offline

    from drivetrain.config import EngineConfig
    from drivetrain.params import GenerateRequest, SamplingParams

    ways = [
        SamplingParams(temperature=0.0, ignore_eos=True),
        SamplingParams(temperature=0.8, ignore_eos=True, seed=1),
        SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, ignore_eos=True, seed=2, logprobs=2),
    ]
    random = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS["C"] | SIZES), encoding="utf-8")
        config = EngineConfig(
            model=folder, device="cuda", dtype=DTYPE, load_format="dummy", max_model_len=1024, max_num_seqs=48,
            max_num_batched_tokens=1024, cache_bytes=32 << 20, backend_options={"graphs": "off"},
        )  # fmt: skip
        opened, number = Offline(config, "inline"), 0
        for lengths, new in REQUESTS:
            for length in lengths:
                prompt = random.integers(0, SIZES["vocab_size"], length, dtype=np.int32)
                opened.loop.submit(
                    GenerateRequest(
                        request_id=number, prompt_ids=prompt, sampling=ways[number % 3], max_tokens=new, seed=number
                    )
                )
                number += 1
            tokens = 0
            while opened.loop.has_work():
                tokens += sum(len(outputs.tokens) for outputs in opened.loop.step())
            if tokens != len(lengths) * new:
                raise RuntimeError(f"{tokens} tokens came of {len(lengths)} prompts of {new}")
        opened.close()
