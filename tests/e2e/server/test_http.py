"""A real loop behind real HTTP, on every device: tokens of Transformers, alone and together; leaving; the command."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from drivetrain.config import EngineConfig
from drivetrain.launch import resolve_device
from drivetrain.server.app import Door
from drivetrain.server.child import LoopSpec
from drivetrain.server.supervisor import Watch
from drivetrain.tokens.text import load_text
from tests.checkpoints import hf_greedy, random_ids, tiny_checkpoint
from tests.real_model import real_gguf  # noqa: F401  a fixture
from tests.unit.server.fakes import ROOT, serving

SETTINGS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
PATIENT = Watch(start=900.0, hang=300.0)
COMPLETION = "/v1/completions"
GOLDEN = json.loads((ROOT / "tests/data/gemma3_270m_golden.json").read_text(encoding="utf-8"))["cases"]
TWENTY = json.loads((ROOT / "tests/data/gemma3_270m_prompts20.json").read_text(encoding="utf-8"))["cases"]
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def serving_model(model: Path, device: str, **settings):
    config = EngineConfig(model=str(model), device=device, **{**SETTINGS, "cache_bytes": 4 << 20, **settings})
    spec = LoopSpec(config=config, choice=resolve_device(config))
    return serving(spec, text=load_text(config), watch=PATIENT, door=Door(model="tiny"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def server(checkpoint, engine_device):
    with serving_model(checkpoint, engine_device) as running:
        yield running


def tokens_of(server, body: dict) -> list[list[int]]:
    answer = server.client().post(COMPLETION, json=GREEDY | body)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def test_tokens_are_those_of_transformers_alone_and_together(server, checkpoint):
    prompts = [random_ids(length, seed=length) for length in (1, 2, 7, 11, 19, 40, 63, 100)]
    expected = hf_greedy(checkpoint, prompts, 16)
    bodies = [{"prompt": one, "max_tokens": 16} for one in prompts]
    assert [tokens_of(server, one)[0] for one in bodies] == expected
    with ThreadPoolExecutor(8) as together:
        assert [one[0] for one in together.map(lambda body: tokens_of(server, body), bodies)] == expected
    assert tokens_of(server, {"prompt": prompts, "max_tokens": 16}) == expected
    server.until(server.idle)


def test_a_stream_says_what_the_whole_answer_says(server):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "temperature": 0.8, "seed": 3, "n": 2}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    whole = client.chat.completions.create(model="tiny", logprobs=True, top_logprobs=4, **body)
    texts: dict[int, str] = {0: "", 1: ""}
    for chunk in client.chat.completions.create(model="tiny", stream=True, **body):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {one.index: one.message.content for one in whole.choices}
    assert len(set(texts.values())) == 2
    for choice in whole.choices:
        for entry in choice.logprobs.content:
            values = [top.logprob for top in entry.top_logprobs]
            assert len(values) == 4 and values == sorted(values, reverse=True)
            assert entry.logprob <= values[0] + 1e-6
            assert entry.logprob < values[-1] or any(abs(entry.logprob - one) < 1e-6 for one in values)


def test_a_repeated_prompt_is_found_in_the_cache(server):
    body = {"prompt": random_ids(200, seed=77), "max_tokens": 4, **GREEDY}
    first, again = (server.client().post(COMPLETION, json=body).json() for _ in range(2))
    assert first["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_leaving_frees_everything_and_disturbs_nobody(server):
    stays = {"prompt": random_ids(9, seed=1), "max_tokens": 100}
    expected = tokens_of(server, stays)

    def leave(seed: int) -> None:
        body = {"prompt": random_ids(30, seed=seed), "max_tokens": 200, "stream": True, **GREEDY}
        with server.client().stream("POST", COMPLETION, json=body) as answer:
            next(answer.iter_lines())

    with ThreadPoolExecutor(13) as together:
        staying = together.submit(tokens_of, server, stays)
        for one in [together.submit(leave, seed) for seed in range(100, 112)]:
            one.result()
        assert staying.result() == expected
    server.until(server.idle, 60)
    assert server.front.supervisor.restarts == 0


def ask_together(server, cases: list[dict], together: int) -> None:
    """Ask for 32 tokens of every case, so many at once; all must be the known ones."""
    with ThreadPoolExecutor(together) as pool:
        bodies = [{"prompt": case["prompt"], "max_tokens": 32} for case in cases]
        got = [one[0] for one in pool.map(lambda body: tokens_of(server, body), bodies)]
    for case, tokens in zip(cases, got, strict=True):
        assert tokens == case["out_ids"], case["prompt"][:60]


REAL = {"max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 32, "cache_bytes": 512 << 20}


def test_the_real_model_over_http(real_gguf):  # noqa: F811
    with serving_model(real_gguf, "cpu", **REAL) as server:
        ask_together(server, GOLDEN, 1)
        ask_together(server, TWENTY[:8], 8)
        ask_together(server, TWENTY + TWENTY[:12], 32)
        server.until(server.idle)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("device", ["cpu", "mirage"])
def test_twenty_prompts_of_the_real_model_over_http(real_gguf, device):  # noqa: F811
    small = {} if device == "cpu" else {"max_model_len": 1280, "max_num_seqs": 16, "cache_bytes": 0}
    with serving_model(real_gguf, device, **REAL | small) as server:
        for together in (1, 8):
            ask_together(server, TWENTY, together)
        ask_together(server, TWENTY + TWENTY[:12], 32)
        server.until(server.idle)


def test_engine_serve(checkpoint):
    command = [sys.executable, "-m", "drivetrain.cli.main", "serve", str(checkpoint), "--device", "cpu", "--port", "0"]
    command += ["--api-key", "secret", "--served-model-name", "tiny", "--max-model-len", "128", "--dtype", "float32"]
    process = subprocess.Popen([*command, "--cache-bytes", "4M"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        found = next(one for line in process.stdout if (one := re.match(r"ready: (http://127\.0\.0\.1:\d+)/v1 ", line)))
        client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="secret", max_retries=0)
        assert [one.id for one in client.models.list()] == ["tiny"]
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, extra_body={"ignore_eos": True}
        )
        assert chat.usage.completion_tokens == 5 and chat.choices[0].finish_reason == "length"
        assert httpx.get(f"{found[1]}/v1/models").status_code == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def test_penalties_bias_and_bad_words_by_http(server):
    prompt = random_ids(11, seed=5)
    (plain,) = tokens_of(server, {"prompt": prompt, "max_tokens": 8})
    (biased,) = tokens_of(server, {"prompt": prompt, "max_tokens": 8, "logit_bias": {"77": 100}})
    assert biased == [77] * 8
    (other,) = tokens_of(server, {"prompt": prompt, "max_tokens": 8, "logit_bias": {str(plain[0]): -100}})
    assert plain[0] not in other
    body = {"prompt": prompt, "max_tokens": 8, "logit_bias": {"77": 5}, "repetition_penalty": 100}
    assert len(set(tokens_of(server, body)[0])) == 8
    refused = server.client().post(COMPLETION, json={"prompt": prompt, "logit_bias": {"100000": 1}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")
    refused = server.client().post(COMPLETION, json={"prompt": prompt, "min_tokens": 9, "max_tokens": 8})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")
    assert tokens_of(server, {"prompt": prompt, "max_tokens": 8}) == [plain]
