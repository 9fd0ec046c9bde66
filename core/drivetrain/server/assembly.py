"""From one sequence's tokens to text that may be sent: whole characters only, nothing of a stop string.

Log-probabilities wait for the text of their token, so that both always reach the client together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from drivetrain.params import FinishReason, TokenLogprobs


class Detokenizer(Protocol):
    """``tokens.IncrementalDetokenizer``: text of whole characters as tokens come."""

    def add(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class Stops(Protocol):
    """``tokens.StopStrings``: holds back what may become a stop string."""

    @property
    def matched(self) -> str | None: ...
    def add(self, text: str) -> str: ...
    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What became sendable of choice ``index``. ``finish`` is set exactly once, on a choice's last delta.

    ``tokens``: those taken since the delta before. ``logprobs``: a report for each token whose text is sent, with
    the place in the choice's text where it begins.
    """

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    finish: FinishReason | None = None
    error: str = ""


class TextAssembly:
    """The text of one sequence. ``num_tokens``: tokens of the answer, up to the one that completed a stop string."""

    def __init__(
        self, index: int, detokenizer: Detokenizer, stops: Stops | None, *, logprobs: bool, min_tokens: int = 0
    ) -> None:
        """``min_tokens``: a stop string may not begin in the text of so many first tokens."""
        self._index = index
        self._min_tokens = min_tokens
        self._detokenizer = detokenizer
        self._stops = stops
        self._one_by_one = stops is not None or logprobs
        self._held: deque[tuple[int, int, TokenLogprobs]] = deque()  # where the token's text begins and ends; report
        self._fresh: list[int] = []
        self._produced = 0  # characters that the detokenizer gave
        self._sent = 0
        self.num_tokens = 0
        self.finished = False

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Delta | None:
        """Add tokens in order. Returns what may be sent now; its ``finish`` is ``stop`` when a stop string matched."""
        if not self._one_by_one:
            self.num_tokens += len(tokens)
            self._fresh += tokens
            return self._delta(self._detokenizer.add(tokens))
        text = ""
        for place, token in enumerate(tokens):
            piece = self._detokenizer.add((token,))
            self.num_tokens += 1
            self._fresh.append(token)
            if place < len(logprobs):
                self._held.append((self._produced, self._produced + len(piece), logprobs[place]))
            self._produced += len(piece)
            stops = self._stops if self.num_tokens > self._min_tokens else None
            text += piece if stops is None else stops.add(piece)
            if self._stops is not None and self._stops.matched is not None:
                return self._end(text, "stop")
        return self._delta(text)

    def finish(self, reason: FinishReason, error: str = "") -> Delta:
        """End: what was held back is sent, unless it belongs to a stop string that only now is complete."""
        rest = self._detokenizer.finish()
        if self._stops is None:
            return self._end(rest, reason, error)
        text = self._stops.add(rest) if rest else ""
        if self._stops.matched is not None:
            return self._end(text, "stop")
        return self._end(text + self._stops.finish(), reason, error)

    def _delta(self, text: str) -> Delta | None:
        if not text:
            return None
        self._sent += len(text)
        logprobs = []
        while self._held and self._held[0][1] <= self._sent:
            begin, _, report = self._held.popleft()
            logprobs.append((begin, report))
        tokens, self._fresh = tuple(self._fresh), []
        return Delta(index=self._index, text=text, tokens=tokens, logprobs=tuple(logprobs))

    def _end(self, text: str, reason: FinishReason, error: str = "") -> Delta:
        """The last delta. A token of whose text nothing is sent (a stop string's own) is not reported."""
        self.finished = True
        self._sent += len(text)
        logprobs = tuple((begin, one) for begin, end, one in self._held if begin < self._sent or end <= self._sent)
        self._held.clear()
        return Delta(
            index=self._index,
            text=text,
            tokens=tuple(self._fresh),
            logprobs=logprobs,
            finish=reason,
            error=error,
        )
