"""Keeping text that spells a control token from becoming one.

A control token ("<eos>", "<|im_start|>") is found in text before the text is normalized. ``ControlGuard.protect``
puts a mark behind the first character of each such spelling, so that it is not found; the tokenizer's first
normalization step takes the marks out again, so that the rest of the tokenizer sees the text as it was written.
Protected and unprotected text can be mixed in one string: that is how a chat template's own control tokens stay
control tokens while those in a user's message do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Unicode's noncharacters: no text that people exchange holds them, and nobody gains anything by typing them.
MARK = "\ufdd0\ufdef\ufdd0"


class ControlGuard:
    """Marks every spelling of the control tokens ``contents``."""

    def __init__(self, contents: Iterable[str]) -> None:
        by_first: dict[str, dict[int, set[str]]] = {}
        for content in contents:
            if content:
                by_first.setdefault(content[0], {}).setdefault(len(content), set()).add(content)
        self._by_first = by_first
        self._begins = re.compile("[" + "".join(map(re.escape, sorted(by_first))) + "]") if by_first else None

    def protect(self, text: str) -> str:
        """Return ``text`` with marks; without a control token's spelling it is returned as it is."""
        if self._begins is None:
            return text
        parts: list[str] = []
        done = 0
        for match in self._begins.finditer(text):
            at = match.start()
            sizes = self._by_first[text[at]]
            if any(text[at : at + size] in spelt for size, spelt in sizes.items()):
                parts.append(text[done : at + 1])
                done = at + 1
        if not parts:
            return text
        return MARK.join([*parts, text[done:]])

    def protect_all(self, value: Any) -> Any:
        """Protect every string inside plain JSON values, keys included; what is not JSON is left as it is."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, Mapping):
            return {self.protect_all(key): self.protect_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect_all(item) for item in value]
        return value


def without_marks(text: str) -> str:
    """Return text as it was written."""
    return text.replace(MARK, "")
