"""/tokenize and /detokenize over a real HTTP server: what they answer, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain.server import tokenizing
from tests.unit.server.fakes import ByteDetokenizer, ByteText, serving
from tests.unit.server.test_failures import check

FOX = "Grüße 🦊"


class MarkedText(ByteText):
    """257 begins a text; options of the template are told at the end of a conversation."""

    def encode(self, text: str, special: bool) -> np.ndarray:
        ids = super().encode(text, special)
        return np.concatenate([np.array([257] * special, np.int32), ids])

    def chat(self, messages, options) -> np.ndarray:
        told = "|".join(f"{one['role']}:{one['content']}" for one in messages)
        return self.encode(
            told + "?" * options.pop("add_generation_prompt") + "".join(map(str, options.values())), True
        )

    def detokenizer(self, prompt, *, skip_special: bool) -> ByteDetokenizer:
        return ByteDetokenizer() if skip_special else Spelling()


class Spelling(ByteDetokenizer):
    def add(self, ids) -> str:
        return "".join("<s>" if one == 257 else super(Spelling, self).add([one]) for one in ids)


@pytest.fixture(scope="module")
def server():
    with serving(text=MarkedText()) as running:
        yield running
        running.until(running.idle)


def tokenized(server, **body):
    answer = server.client().post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert set(content) == {"count", "max_model_len", "tokens", "token_strs"}
    assert content["count"] == len(content["tokens"]) and content["max_model_len"] == 4096
    return content


def test_a_text_becomes_tokens_and_text_again(server):
    content = tokenized(server, prompt=FOX, model="fake")
    assert content["tokens"] == [257, *FOX.encode()] and content["token_strs"] is None
    for skip, expected in ((None, f"<s>{FOX}"), (False, f"<s>{FOX}"), (True, FOX)):
        body = {"tokens": content["tokens"], "skip_special_tokens": skip}
        assert server.client().post("/detokenize", json=body).json() == {"prompt": expected}
    bare = tokenized(server, prompt=FOX, add_special_tokens=False)["tokens"]
    assert bare == list(FOX.encode())
    assert tokenized(server, prompt="", add_special_tokens=False)["tokens"] == []
    assert server.client().post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_strings_of_tokens_that_are_part_of_a_character_differ(server):
    content = tokenized(server, prompt="aü", add_special_tokens=False, return_token_strs=True)
    assert content["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xbc"]


def test_a_conversation_goes_through_the_template(server):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    told = [
        bytes(tokenized(server, messages=messages, **extra)["tokens"][1:]).decode()
        for extra in ({}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"x": 7}})
    ]
    assert told == ["user:a\nb?", "user:a\nb", "user:a\nb?7"]


BAD = [
    ("/tokenize", {}, "prompt", None),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt", None),
    ("/tokenize", {"prompt": 5}, "prompt", None),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", None),
    ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", None),
    ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools", "unsupported_parameter"),
    ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message", "unsupported_parameter"),
    ("/tokenize", {"messages": []}, "messages", None),
    ("/tokenize", {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", None),
    (
        "/tokenize",
        {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
        "add_special_tokens",
        None,
    ),
    ("/tokenize", {"prompt": "a" * ((4 << 20) + 1)}, "prompt", None),
    ("/detokenize", {}, "tokens", None),
    ("/detokenize", {"tokens": "a"}, "tokens", None),
    ("/detokenize", {"tokens": [1.5]}, "tokens[0]", None),
    ("/detokenize", {"tokens": [300]}, "tokens", None),
    ("/detokenize", {"tokens": [-1]}, "tokens", None),
    ("/detokenize", {"tokens": [1 << 62]}, "tokens", None),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), BAD)
def test_bad_bodies_are_400s_that_name_the_field(server, path, body, param, code):
    message = check(server.client().post(path, json=body), 400, param, code)
    assert param in message
    assert tokenized(server, prompt="x", add_special_tokens=False)["tokens"] == [120]


def test_too_many_tokens_and_another_model(server, monkeypatch):
    monkeypatch.setattr(tokenizing, "MAX_TOKENS", 3)
    assert "at most 3" in check(server.client().post("/detokenize", json={"tokens": [1] * 4}), 400, "tokens")
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        check(server.client().post(path, json=body | {"model": "other"}), 404, "model", "model_not_found")
        answer = server.client().post(path, json=body | {"wrong_name": 1})
        assert answer.status_code == 200 and "wrong_name" in answer.headers["warning"]
        assert server.client().get(path).status_code == 405


def test_a_conversation_without_a_template_names_the_way_out():
    with serving(text=MarkedText(has_template=False)) as server:
        body = {"messages": [{"role": "user", "content": "a"}]}
        message = check(server.client().post("/tokenize", json=body), 400, "messages", "no_chat_template")
        assert "--chat-template" in message
