"""/v1/embeddings over a real HTTP server and a fake loop, whose vector is the first three bytes of a prompt."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from openai import OpenAI

from drivetrain.errors import ModelError
from drivetrain.models.sentence import Sentence
from drivetrain.server import vectors
from drivetrain.server.app import Door
from tests.unit.server.fakes import serving, spec
from tests.unit.server.test_failures import check

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def server():
    with serving(door=Door(model="fake", sentence=lambda: Sentence(width=3))) as running:
        yield running
        running.until(running.idle)


def unit(*values: float) -> np.ndarray:
    found = np.array(values, np.float32)
    return found / np.linalg.norm(found)


def embedded(server, **body) -> np.ndarray:
    answer = server.client().post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert (content["object"], content["model"]) == ("list", "fake")
    assert [(one["object"], one["index"]) for one in content["data"]] == [
        ("embedding", place) for place in range(len(content["data"]))
    ]
    return np.array([one["embedding"] for one in content["data"]])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("abc", [b"abc"]),
        (["abc", "xyz", "abc"], [b"abc", b"xyz", b"abc"]),
        ([97, 98, 99, 1], [b"abc"]),
        ([[97, 98, 99], [120, 121, 122]], [b"abc", b"xyz"]),
    ],
)
def test_the_four_kinds_of_input(server, given, expected):
    got = embedded(server, input=given)
    np.testing.assert_allclose(got, [unit(*one) for one in expected], rtol=1e-6)


def test_many_inputs_come_back_in_order(server):
    texts = [f"{place:03d}" for place in range(200)]
    np.testing.assert_allclose(embedded(server, input=texts), [unit(*one.encode()) for one in texts], rtol=1e-6)


def test_usage_counts_every_input(server):
    usage = server.client().post(PATH, json={"input": ["new text", "and another"]}).json()["usage"]
    assert usage == {"prompt_tokens": 19, "total_tokens": 19, "prompt_tokens_details": {"cached_tokens": 0}}
    again = server.client().post(PATH, json={"input": "new text"}).json()["usage"]
    assert again["prompt_tokens_details"] == {"cached_tokens": 7}


def test_base64_holds_the_same_numbers(server):
    answer = server.client().post(PATH, json={"input": "abc", "encoding_format": "base64"}).json()
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == embedded(server, input="abc", encoding_format="float")[0].tolist()


def test_the_official_client_reads_both_formats(server):
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for extra in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="fake", input=["abc", "xyz"], **extra)
        np.testing.assert_allclose(answer.data[1].embedding, unit(*b"xyz"), rtol=1e-6)
        assert answer.usage.prompt_tokens == 6


def test_dimensions_cut_and_make_length_one_again(server):
    np.testing.assert_allclose(embedded(server, input="abc", dimensions=2), [unit(97, 98)], rtol=1e-6)
    assert embedded(server, input="abc", dimensions=2, normalize=False).tolist() == [[97, 98]]
    assert embedded(server, input="abc", dimensions=3, normalize=False).tolist() == [[97, 98, 99]]


def test_the_checkpoint_says_how_it_is_pooled():
    for kind, shift in (("last", 0), ("cls", 1), ("mean", 2)):
        door = Door(model="fake", sentence=lambda kind=kind: Sentence(kind=kind, normalize=False))
        with serving(door=door) as server:
            assert embedded(server, input="abc").tolist() == [[97 + shift, 98 + shift, 99 + shift]]
            check(server.client().post(PATH, json={"input": "a", "dimensions": 4}), 400, "dimensions")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", None),
        ({"input": []}, "input", None),
        ({"input": ["a", 1]}, "input", None),
        ({"input": [1, [1]]}, "input", None),
        ({"input": ""}, "input", None),
        ({"input": ["a", ""]}, "input[1]", None),
        ({"input": [[1], []]}, "input[1]", None),
        ({"input": [300]}, "input", None),
        ({"input": [[1], [-1]]}, "input[1]", None),
        ({"input": {"a": 1}}, "input", None),
        ({"input": ["a", "b" * 4097]}, "input[1]", "context_length_exceeded"),
        ({"input": ["a"] * 2049}, "input", None),
        ({"input": ["a" * (2 << 20)] * 3}, "input", None),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", None),
        ({"input": "a", "dimensions": 0}, "dimensions", None),
        ({"input": "a", "dimensions": 4}, "dimensions", None),
        ({"input": "a", "dimensions": 1.5}, "dimensions", None),
        ({"input": "a", "priority": 1 << 40}, "priority", None),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "unsupported_parameter"),
        ({"input": "REFUSE"}, "prompt", "refused"),
    ],
)
def test_bad_bodies_are_400s_that_name_the_field(server, body, param, code):
    check(server.client().post(PATH, json=body), 400, param, code)
    assert embedded(server, input="abc").shape == (1, 3)


def test_an_input_may_fill_the_context(server):
    assert embedded(server, input="b" * 4096).shape == (1, 3)


def test_one_failing_input_ends_the_request_and_no_other(server):
    answer = server.client().post(PATH, json={"input": ["abc", "ERROR"]})
    assert "logits are not finite" in check(answer, 500, kind="server_error")
    server.until(server.idle)
    assert embedded(server, input="abc").shape == (1, 3)


def test_a_checkpoint_that_gives_no_vectors_says_why_and_the_model_serves_on():
    def refuse() -> Sentence:
        raise ModelError("modules.json lists Transformer, Dense", fix="take another")

    with serving(door=Door(model="fake", sentence=refuse)) as server:
        for _ in range(2):
            message = check(server.client().post(PATH, json={"input": "a"}), 400, "model", "unsupported_model")
            assert "Dense" in message
        assert server.client().post("/v1/completions", json={"prompt": "SAY x"}).status_code == 200


def test_leaving_ends_the_sequences(monkeypatch):
    with serving(spec(step_seconds="0.05", rows="1")) as server:
        with pytest.raises(Exception, match="timed out"):
            server.client().post(PATH, json={"input": ["abc"] * 500}, timeout=1.0)
        server.until(server.idle, 10)  # all of them would take 25 s
        assert server.front.supervisor.restarts == 0


def test_a_lost_loop_is_a_503(server):
    with serving() as mine:
        answer = mine.client().post(PATH, json={"input": ["abc", "CRASH"]})
        check(answer, 503, code="loop_unavailable", kind="server_error")
        assert answer.headers["retry-after"]


def test_the_limits_are_those_of_the_page():
    assert (vectors.MAX_INPUTS, vectors.MAX_CHARACTERS) == (2048, 4 << 20)
