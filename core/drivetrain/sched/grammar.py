"""What a grammar is to the scheduler: an automaton on the host whose mask is late input of a step."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class GrammarSession(Protocol):
    """One request's automaton, at the end of its confirmed tokens."""

    def accept(self, token: int) -> bool:
        """Move on by a confirmed token; False when the automaton does not allow it (the request then fails)."""

    def mask(self) -> np.ndarray:
        """Return the tokens allowed next, int32 [ceil(vocabulary / 32)]: bit i of word w allows token 32 w + i."""
