"""Stop strings: where a text is cut into pieces makes no difference, and nothing of a match is given on."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.tokens import StopStrings

LETTERS = st.text("ab\n", max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def judge(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the match that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None, list[str]]:
    made = StopStrings(stops, include=include)
    given_on = [made.add(piece) for piece in pieces]
    given_on.append(made.finish())
    return "".join(given_on), made.matched, given_on


@settings(max_examples=400, deadline=None)
@given(text=LETTERS, stops=STOPS, include=st.booleans(), cuts=st.sets(st.integers(0, 12)))
def test_cuts_make_no_difference(text: str, stops: list[str], include: bool, cuts: set[int]):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    found, matched, _ = run(pieces, stops, include)
    assert (found, matched) == judge(text, stops, include)


@pytest.mark.parametrize(
    "text, stops",
    [
        ("Hello STOP more", ["STOP"]),
        ("ababac", ["abac"]),
        ("xxabcd", ["bc", "abcd"]),
        ("aab", ["ab", "aab"]),
        ("é\n\nU", ["\n\nU"]),
    ],
)
def test_every_cut(text: str, stops: list[str]):
    expected = judge(text, stops, False)
    for mask in range(1 << (len(text) - 1)):
        edges = [0, *(i + 1 for i in range(len(text) - 1) if mask >> i & 1), len(text)]
        found, matched, _ = run([text[a:b] for a, b in itertools.pairwise(edges)], stops, False)
        assert (found, matched) == expected


@settings(max_examples=300, deadline=None)
@given(text=LETTERS, stops=STOPS)
def test_as_little_as_possible_is_held_back(text: str, stops: list[str]):
    """After each character, what is held back is the longest end that begins a stop string, no more."""
    made, seen, sent = StopStrings(stops), "", ""
    for letter in text:
        seen += letter
        sent += made.add(letter)
        if made.matched is not None:
            break
        held = seen[len(sent) :]
        ends = [seen[i:] for i in range(len(seen)) if any(s.startswith(seen[i:]) for s in stops)]
        assert held == (max(ends, key=len) if ends else "")


def test_nothing_after_a_match():
    made = StopStrings(["ab"])
    assert made.add("xxabyy") == "xx" and made.matched == "ab"
    assert made.add("more") == "" and made.finish() == ""


def test_empty():
    assert run(["abc"], [], False)[:2] == ("abc", None)
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
