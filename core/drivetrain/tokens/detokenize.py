"""Text from tokens as they come: whole characters only, and never one that a later token could change."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from drivetrain.tokens.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one sequence. All parts that ``add`` and ``finish`` return, joined, are what ``decode`` returns.

    ``continuing``: the tokens follow a prompt, so that a leading space is text. Each token costs one look-up.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continuing: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.control_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = 0 if continuing else tokenizer.spaces_stripped

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that became certain."""
        piece, skip = self._tokenizer.piece, self._skip
        text = self._utf8.decode(b"".join([piece(token) for token in ids if token not in skip]))
        return self._begin(text) if self._strip else text

    def finish(self) -> str:
        """Return what is left: U+FFFD where the tokens end within a character."""
        return self._begin(self._utf8.decode(b"", True))

    def _begin(self, text: str) -> str:
        """Take the spaces away that a text's beginning loses."""
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text
