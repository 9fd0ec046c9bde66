"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Gives text on, but nothing of a stop string, and nothing after one.

    The match is the one that is complete first; of two complete at once, the longer. Where the text is cut into
    pieces makes no difference. ``include``: the matched string itself is given on. ``matched``: it, or None so far.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        """ValueError for an empty stop string."""
        if not all(strings):
            raise ValueError("a stop string is empty")
        self._strings = tuple(strings)
        self._include = include
        self._held = ""
        self._longest = max(map(len, strings), default=0)
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """Return the text that may be given on; empty after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = self._first(text)
        if found is not None:
            begin, end = found
            self.matched, self._held = text[begin:end], ""
            return text[: end if self._include else begin]
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back: no more text comes, so that it is no stop string."""
        rest, self._held = self._held, ""
        return rest

    def _first(self, text: str) -> tuple[int, int] | None:
        """(begin, end) of the match that is complete first."""
        places = ((text.find(stop), len(stop)) for stop in self._strings)
        ends = [(begin + size, begin) for begin, size in places if begin >= 0]
        if not ends:
            return None
        end, begin = min(ends)
        return begin, end

    def _partial(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            end = text[len(text) - size :]
            if any(stop.startswith(end) for stop in self._strings):
                return size
        return 0
