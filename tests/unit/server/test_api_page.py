"""docs/api.md names every field of the routes that it has tables for, and no other."""

from __future__ import annotations

import re

import pytest

from drivetrain.server.embeddings import EmbeddingRequest
from drivetrain.server.openai import HINTS, NEUTRAL, ChatRequest, CompletionRequest
from drivetrain.server.scoring import RerankRequest, ScoreRequest
from drivetrain.server.tokenizing import DetokenizeRequest, TokenizeRequest
from tests.unit.server.fakes import ROOT

PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")
BODIES = {
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /v1/embeddings": EmbeddingRequest,
    "POST /v1/score": ScoreRequest,
    "POST /v1/rerank": RerankRequest,
    "POST /detokenize": DetokenizeRequest,
}


@pytest.mark.parametrize("title", BODIES)
def test_the_page_names_each_field_of_a_body_and_no_other(title):
    section = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert section, f"docs/api.md has no section {title}"
    rows = [one for one in section[1].splitlines() if one.startswith("| `")]
    named = {name: row for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    supported = {name for name, row in named.items() if "| supported |" in row}
    assert supported == set(BODIES[title].__struct_fields__)
    assert all(re.search(r"\| (supported|ignored|refused) \|", row) for row in rows)


def test_the_page_names_what_is_refused_and_what_is_ignored():
    refused = PAGE.partition("## Refused everywhere")[2]
    columns = [one.split("|")[1] for one in refused.splitlines() if one.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(columns))) == set(NEUTRAL)
    (hints,) = [one for one in PAGE.splitlines() if "ignored: about the caller" in one]
    assert set(re.findall(r"`(\w+)`", hints)) == set(HINTS)
