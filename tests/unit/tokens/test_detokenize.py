"""Incremental text: joined it is what ``decode`` returns, and no part ends within a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.tokens import IncrementalDetokenizer, Tokenizer

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """Cut into runs of the lengths ``cuts``, then single ids."""
    out = []
    for size in cuts:
        out.append(ids[:size])
        ids = ids[size:]
    return out + [[i] for i in ids]


def check(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool, continuing: bool) -> None:
    made = IncrementalDetokenizer(tokenizer, skip_special=skip, continuing=continuing)
    parts = [made.add(run) for run in pieces(ids, cuts)]
    parts.append(made.finish())
    assert "".join(parts) == tokenizer.decode(ids, skip_special=skip, continuing=continuing)


ANY = dict(
    cuts=st.lists(st.integers(0, 4), max_size=4),
    skip=st.booleans(),
    continuing=st.booleans(),
)


@settings(max_examples=400, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=24), **ANY)
def test_any_ids_byte_level(tiny: Tokenizer, ids, cuts, skip, continuing):
    check(tiny, ids, cuts, skip, continuing)


@settings(max_examples=400, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 262143), st.integers(238, 493), st.integers(0, 7)), max_size=24), **ANY)
def test_any_ids_with_byte_tokens(gemma: Tokenizer, ids, cuts, skip, continuing):
    check(gemma, ids, cuts, skip, continuing)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_real_text_comes_whole_characters_at_a_time(tiny: Tokenizer, text: str):
    """On the ids of a text, every prefix given so far is a prefix of the text: nothing is split and nothing changes."""
    made, so_far = IncrementalDetokenizer(tiny), ""
    for token in tiny.encode(text, add_special=False):
        so_far += made.add([token])
        assert text.startswith(so_far)
    assert so_far == text and made.finish() == ""


def test_byte_tokens_wait_for_their_character(gemma: Tokenizer):
    text = "\U00010348"  # not in the vocabulary: four byte tokens
    ids = gemma.encode(text, add_special=False)
    assert len(ids) == 4
    made = IncrementalDetokenizer(gemma)
    assert [made.add([i]) for i in ids] == ["", "", "", text]
    cut = IncrementalDetokenizer(gemma)
    assert cut.add(ids[:3]) == "" and cut.finish() == "\ufffd"


@pytest.mark.parametrize("skip, text", [(True, "the fox"), (False, "<bos>the<|im_end|> fox<eos>")])
def test_control_tokens(tiny: Tokenizer, skip: bool, text: str):
    ids = tiny.encode("<bos>the<|im_end|> fox<eos>", add_special=False, control=True)
    made = IncrementalDetokenizer(tiny, skip_special=skip)
    assert made.add(ids) + made.finish() == text
