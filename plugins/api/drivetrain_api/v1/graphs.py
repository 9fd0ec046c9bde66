"""Graphs: a recorded run of device work that is replayed with one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBudget:
    """How many graphs may exist at once (0 = no limit) and the bytes that they may share."""

    max_graphs: int = 0
    max_bytes: int = 0


class Graph(Protocol):
    """One recorded run. The tensors it read and wrote keep their addresses."""

    def replay(self) -> None:
        """Queue the whole run on the current stream."""

    def release(self) -> None:
        """Free it. Replaying afterwards is an error."""


class Graphs(Protocol):
    """Capture of device work. A backend without it leaves ``Backend.graphs`` None and runs eagerly."""

    @property
    def budget(self) -> GraphBudget:
        """What may be captured."""

    def capture(self, run: Callable[[], Any]) -> tuple[Graph, Any]:
        """Record a callable without running it; returns the graph and what the callable returned (static tensors)."""
