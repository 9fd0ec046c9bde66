"""/v1/embeddings on every device: vectors are those of Transformers, cosines within 1e-5 of 1."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file, save_file

from drivetrain.config import EngineConfig
from drivetrain.launch import resolve_device
from drivetrain.models.sentence import read_sentence
from drivetrain.server.app import Door
from drivetrain.server.child import LoopSpec
from drivetrain.tokens.text import load_text
from tests.checkpoints import random_ids, tiny_checkpoint
from tests.e2e.server.test_http import PATIENT, SETTINGS
from tests.unit.server.fakes import serving
from tests.unit.server.test_sentence import LAST, OFF, OLD

LENGTHS = (1, 2, 9, 30, 64, 100, 200, 256)  # the longest fills the context
PATH = "/v1/embeddings"


def sentence_checkpoint(directory: Path, pooling: dict, *kinds: str) -> Path:
    """A tiny Qwen3 as embedding models are stored: names without ``model.``, and the files of sentence-transformers."""
    tiny_checkpoint("qwen3", directory)
    weights = load_file(directory / "model.safetensors")
    renamed = {name.removeprefix("model."): value for name, value in weights.items() if not name.startswith("lm_head")}
    assert "embed_tokens.weight" in renamed
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})
    modules = [{"idx": i, "path": f"{i}_{kind}" if i else "", "type": OLD + kind} for i, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


def serving_vectors(model: Path, device: str):
    config = EngineConfig(model=str(model), device=device, cache_bytes=4 << 20, **SETTINGS)
    spec = LoopSpec(config=config, choice=resolve_device(config))
    door = Door(model="tiny", sentence=partial(read_sentence, config.model))
    return serving(spec, text=load_text(config), watch=PATIENT, door=door)


@torch.no_grad()
def states(directory: Path, ids: list[int]) -> np.ndarray:
    """The final normed hidden states of Transformers, float64 [len(ids), hidden]."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    return model(torch.tensor([ids])).last_hidden_state[0].double().numpy()


POOLED = {
    "last": (LAST, lambda found: found[-1]),
    "mean": (OFF | {"pooling_mode_mean_tokens": True}, lambda found: found.mean(0)),
    "cls": (OFF | {"pooling_mode_cls_token": True}, lambda found: found[0]),
}


def vectors(server, **body) -> np.ndarray:
    answer = server.client().post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]])


def check_all(model: Path, device: str, kind: str, lengths: tuple[int, ...]) -> None:
    prompts = [random_ids(length, seed=length) for length in lengths]
    wanted = np.stack([POOLED[kind][1](states(model, one)) for one in prompts])
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    with serving_vectors(model, device) as server:
        got = vectors(server, input=prompts)
        assert np.abs((got * wanted).sum(1) - 1).max() < 1e-5
        np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)
        with ThreadPoolExecutor(8) as together:
            alone = list(together.map(lambda one: vectors(server, input=one)[0], prompts))
        assert np.abs((np.stack(alone) * wanted).sum(1) - 1).max() < 1e-5
        server.until(server.idle)


def test_the_last_tokens_vectors_are_those_of_transformers(tmp_path, engine_device):
    model = sentence_checkpoint(tmp_path, LAST, "Transformer", "Pooling", "Normalize")
    check_all(model, engine_device, "last", LENGTHS)


@pytest.mark.parametrize("kind", ["mean", "cls"])
def test_other_poolings_are_those_of_transformers(tmp_path, kind):
    model = sentence_checkpoint(tmp_path, POOLED[kind][0], "Transformer", "Pooling", "Normalize")
    check_all(model, "cpu", kind, (1, 9, 200))


def test_text_through_the_official_client_without_normalizing(tmp_path):
    model = sentence_checkpoint(tmp_path, LAST, "Transformer", "Pooling")
    text = "the quick brown fox"
    with serving_vectors(model, "cpu") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = client.embeddings.create(model="tiny", input=[text, "dog"])
        ids = server.client().post("/tokenize", json={"prompt": text}).json()["tokens"]
        wanted = states(model, ids)[-1]
        np.testing.assert_allclose(answer.data[0].embedding, wanted, rtol=1e-3, atol=1e-3)
        half = client.embeddings.create(model="tiny", input=text, dimensions=len(wanted) // 2).data[0].embedding
        np.testing.assert_allclose(half, wanted[: len(wanted) // 2], rtol=1e-3, atol=1e-3)
        refused = server.client().post(PATH, json={"input": text, "dimensions": len(wanted) + 1})
        assert refused.status_code == 400 and str(len(wanted)) in refused.json()["error"]["message"]
        body = {"prompt": ids, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        assert server.client().post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3


def test_a_dense_module_is_refused_by_name(tmp_path):
    model = sentence_checkpoint(tmp_path, LAST, "Transformer", "Pooling", "Dense", "Normalize")
    with serving_vectors(model, "cpu") as server:
        answer = server.client().post(PATH, json={"input": "fox"})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_model"
        assert "Dense" in answer.json()["error"]["message"]
