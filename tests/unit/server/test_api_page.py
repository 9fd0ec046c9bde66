"""docs/api.md names every field of the routes that it has tables for, and no other."""

from __future__ import annotations

import re

import pytest

from drivetrain.server.embeddings import EmbeddingRequest
from drivetrain.server.tokenizing import DetokenizeRequest, TokenizeRequest
from tests.unit.server.fakes import ROOT

PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")
BODIES = {
    "POST /tokenize": TokenizeRequest,
    "POST /v1/embeddings": EmbeddingRequest,
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
