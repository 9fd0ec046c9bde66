"""The two completion routes over a real HTTP server: answers, streams, and the official client."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from tests.unit.server.fakes import serving, spec

ROMAN = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 🦊🦊."


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running
        running.until(running.idle)


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def post(server, path, **body):
    answer = server.client().post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server, path, **body):
    """The events of a stream; checks the frame of every one, and the end."""
    with server.client().stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        text = answer.read().decode()
    frames = [one for one in text.split("\n\n") if one and not one.startswith(":")]
    assert all(one.startswith("data: ") for one in frames)
    assert frames[-1] == "data: [DONE]"
    return [json.loads(one[6:]) for one in frames[:-1]]


@pytest.mark.parametrize("prompt", ["hello", f"SAY {ROMAN}", "SAY "])
@pytest.mark.parametrize(
    "extra",
    [{}, {"n": 3, "seed": 5}, {"stop": ["qu", "Syl"]}, {"logprobs": 2}, {"return_token_ids": True, "stop": "qu"}],
)
def test_a_stream_joined_is_the_whole_answer(server, prompt, extra):
    body = {"prompt": prompt, "max_tokens": 90, **({"seed": 1} | extra)}
    whole = post(server, "/v1/completions", **body)
    chunks = events(server, "/v1/completions", **body, stream_options={"include_usage": True})
    assert [len(one["choices"]) for one in chunks[-1:]] == [0]
    assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"]
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in chunks}) == 1
    for choice in whole["choices"]:
        mine = [one["choices"][0] for one in chunks[:-1] if one["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert all(one["usage"] is None for one in chunks[:-1])
        if "return_token_ids" in extra:
            assert [token for one in mine for token in one["token_ids"]] == choice["token_ids"]
            assert bytes(choice["token_ids"]).decode("utf-8", "replace").startswith(choice["text"])
        else:
            assert "token_ids" not in choice and "token_ids" not in mine[0]
        if "logprobs" in extra:
            joined = {key: [] for key in choice["logprobs"]}
            for one in mine:
                for key, values in (one["logprobs"] or {}).items():
                    joined[key] += values
            assert joined == choice["logprobs"]
            assert len(joined["tokens"]) == whole["usage"]["completion_tokens"]


def test_chat_stream_names_the_role_first_and_ends_once(server):
    body = {"messages": [{"role": "user", "content": f"SAY {ROMAN}"}], "n": 2, "logprobs": True, "top_logprobs": 3}
    whole = post(server, "/v1/chat/completions", **body)
    chunks = events(server, "/v1/chat/completions", **body)
    assert all("usage" not in one for one in chunks)
    for choice in whole["choices"]:
        mine = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"] == ROMAN
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["stop"]
        content = [entry for one in mine if one["logprobs"] for entry in one["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == ROMAN
        assert all(len(entry["top_logprobs"]) == 3 for entry in content)


def test_no_character_is_split_between_chunks(server):
    chunks = events(server, "/v1/completions", prompt="SAY " + "é🦊中" * 20, max_tokens=500)
    assert "\ufffd" not in "".join(one["choices"][0]["text"] for one in chunks)
    assert len(chunks) >= 60


@pytest.mark.parametrize("per_step", ["1", "4"])
def test_stop_strings_cut_anywhere_never_leak(per_step):
    with serving(spec(per_step=per_step)) as server:
        body = {"prompt": "SAY one STOP two", "max_tokens": 100, "stop": ["STOP"]}
        for include, expected in ((False, "one "), (True, "one STOP")):
            body["include_stop_str_in_output"] = include
            whole = post(server, "/v1/completions", **body)
            assert whole["choices"][0]["text"] == expected
            assert whole["choices"][0]["finish_reason"] == "stop"
            assert whole["usage"]["completion_tokens"] == len("one STOP")
            chunks = events(server, "/v1/completions", **body)
            assert "".join(one["choices"][0]["text"] for one in chunks) == expected
        # a beginning of a stop string that is none after all is held back, then sent
        body = {"prompt": "SAY STO STOO STO", "max_tokens": 100, "stop": ["STOP"]}
        assert post(server, "/v1/completions", **body)["choices"][0]["text"] == "STO STOO STO"
        # an endless sequence ends in the loop too
        body = {"prompt": "endless", "max_tokens": 4000, "stop": ["e"], "temperature": 0}
        assert post(server, "/v1/completions", **body)["choices"][0]["finish_reason"] == "stop"
        server.until(server.idle)


def test_logprobs_of_a_stop_string_are_not_reported(server):
    body = {"prompt": "SAY ab STOP", "max_tokens": 50, "stop": "STOP", "logprobs": 1}
    choice = post(server, "/v1/completions", **body)["choices"][0]
    assert choice["text"] == "ab "
    assert choice["logprobs"]["tokens"] == ["a", "b", " "]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_n_samples_differ_and_a_seed_repeats_them(server):
    body = {"prompt": "once", "max_tokens": 20, "n": 4, "seed": 7}
    first, again = (post(server, "/v1/completions", **body) for _ in range(2))
    texts = [one["text"] for one in first["choices"]]
    assert texts == [one["text"] for one in again["choices"]]
    assert len(set(texts)) == 4
    assert first["usage"]["prompt_tokens"] == 4 and first["usage"]["completion_tokens"] == 80
    unseeded = {post(server, "/v1/completions", prompt="once", max_tokens=20)["choices"][0]["text"] for _ in range(6)}
    assert len(unseeded) > 1


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], ["abc"], [[97, 98, 99]]])
def test_the_four_kinds_of_prompt_mean_the_same(server, prompt):
    expected = post(server, "/v1/completions", prompt="abc", max_tokens=9, temperature=0)["choices"][0]["text"]
    whole = post(server, "/v1/completions", prompt=prompt, max_tokens=9, temperature=0, echo=True)
    assert whole["choices"][0]["text"] == "abc" + expected
    assert whole["choices"][0]["finish_reason"] == "length"


def test_choices_of_many_prompts_are_numbered_prompt_by_prompt(server):
    whole = post(server, "/v1/completions", prompt=["SAY a", "SAY bb"], n=2, max_tokens=5, echo=True)
    assert [one["text"] for one in whole["choices"]] == ["SAY aa"] * 2 + ["SAY bbbb"] * 2
    assert whole["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 6,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": whole["usage"]["prompt_tokens_details"]["cached_tokens"]},
    }


def test_echo_of_no_tokens_runs_nothing(server):
    whole = post(server, "/v1/completions", prompt="abc", max_tokens=0, echo=True)
    assert whole["choices"][0] == {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}
    assert whole["usage"]["completion_tokens"] == 0


def test_cached_tokens_are_reported(server):
    body = {"prompt": "a prompt that comes twice", "max_tokens": 2}
    assert post(server, "/v1/completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert post(server, "/v1/completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 24


def test_chat_without_max_tokens_has_the_rest_of_the_context(server):
    with serving(spec()) as other:
        body = {"messages": [{"role": "user", "content": "x" * 4090}]}
        whole = post(other, "/v1/chat/completions", **body)
        assert whole["usage"]["completion_tokens"] == 6
        assert whole["choices"][0]["finish_reason"] == "length"


def test_the_official_client(client):
    assert [one.id for one in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    messages = [{"role": "developer", "content": "SAY "}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    whole = client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=50)
    assert whole.choices[0].message.content == "\nhi"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    parts = []
    with client.chat.completions.stream(
        model="fake", messages=messages, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        for event in stream:
            if event.type == "content.delta":
                parts.append(event.delta)
        final = stream.get_final_completion()
    assert "".join(parts) == final.choices[0].message.content == "\nhi"
    assert final.usage.completion_tokens == 3
    assert [entry.token for entry in final.choices[0].logprobs.content] == ["\n", "h", "i"]
    text = client.completions.create(model="fake", prompt="SAY yes", stream=True, max_tokens=10)
    assert "".join(one.choices[0].text for one in text) == "yes"
