"""/v1/score and /v1/rerank over a real HTTP server and a fake loop, whose vector is a prompt's first three bytes."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain.models.sentence import Sentence
from drivetrain.server.app import Door
from tests.unit.server.fakes import serving
from tests.unit.server.test_failures import check

SCORE, RERANK = "/v1/score", "/v1/rerank"
TEXTS = ["zzz", "a~ ", "abc", "  ~"]


@pytest.fixture(scope="module")
def server():
    door = Door(model="fake", sentence=lambda: Sentence(width=3, normalize=False, declared=True))
    with serving(door=door) as running:
        yield running
        running.until(running.idle)


def cosine(left: str, right: str) -> float:
    one, other = (np.frombuffer(text.encode(), np.uint8).astype(float) for text in (left, right))
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def post(server, path, **body):
    answer = server.client().post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("left", "right", "pairs"),
    [
        ("abd", "abc", [("abd", "abc")]),
        ("abd", TEXTS, [("abd", one) for one in TEXTS]),
        (TEXTS, TEXTS[::-1], list(zip(TEXTS, TEXTS[::-1], strict=True))),
    ],
)
def test_scores_are_cosines_in_order(server, left, right, pairs):
    content = post(server, SCORE, text_1=left, text_2=right)
    assert [one["index"] for one in content["data"]] == list(range(len(pairs)))
    np.testing.assert_allclose([one["score"] for one in content["data"]], [cosine(*one) for one in pairs], atol=1e-6)
    sides = [[one] if isinstance(one, str) else one for one in (left, right)]
    assert content["usage"]["prompt_tokens"] == 3 * sum(map(len, sides))


def test_documents_come_best_first(server):
    order = sorted(range(4), key=lambda place: -cosine("abd", TEXTS[place]))
    assert order != [0, 1, 2, 3]
    documents = [{"text": one} if place % 2 else one for place, one in enumerate(TEXTS)]
    results = post(server, RERANK, query="abd", documents=documents)["results"]
    assert [one["index"] for one in results] == order
    assert [one["document"]["text"] for one in results] == [TEXTS[place] for place in order]
    np.testing.assert_allclose([one["relevance_score"] for one in results], [cosine("abd", TEXTS[i]) for i in order])
    two = post(server, RERANK, query="abd", documents=TEXTS, top_n=2, return_documents=False)["results"]
    assert [set(one) for one in two] == [{"index", "relevance_score"}] * 2
    assert [one["index"] for one in two] == order[:2]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (SCORE, {"text_1": "a"}, "text_2"),
        (SCORE, {"text_1": [], "text_2": "a"}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": []}, "text_2"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        (SCORE, {"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        (RERANK, {"query": "a"}, "documents"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "", "documents": ["a"]}, "query"),
        (RERANK, {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        (RERANK, {"query": "a", "documents": ["a", ""]}, "documents[1]"),
    ],
)
def test_bad_bodies_are_400s_that_name_the_field(server, path, body, param):
    check(server.client().post(path, json=body), 400, param)


def test_a_model_that_declares_no_vectors_is_refused():
    with serving() as server:
        for path, body in ((SCORE, {"text_1": "a", "text_2": "b"}), (RERANK, {"query": "a", "documents": ["b"]})):
            message = check(server.client().post(path, json=body), 400, "model", "unsupported_model")
            assert "modules.json" in message
