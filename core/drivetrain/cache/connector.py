"""Where blocks may come from and go to besides this cache: another server, a slower memory, a disk.

The scheduler calls a connector between steps, never during one. Whatever a connector touches stays held until it
says so: blocks being filled belong to a row that does not run yet, blocks being read outlive their request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Place = tuple[int, int, int]  # group, index in the row's table, block: tokens index * block_tokens and on


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A load ended: the first ``num_tokens`` tokens of the request are valid now (fewer than asked: no more are)."""

    request_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorEvents:
    """What happened since the last poll. ``released``: ended requests whose blocks are not read any more."""

    arrivals: tuple[Arrival, ...] = ()
    released: tuple[int, ...] = ()


class Connector(Protocol):
    """One source and sink of cache blocks."""

    def match(self, request_id: int, digests: Sequence[bytes], num_cached: int) -> int:
        """Return how many tokens of the prompt it could bring, 0 when no more than the ``num_cached`` here."""

    def load(self, request_id: int, num_tokens: int, blocks: Sequence[Place]) -> None:
        """Begin to fill these blocks, so that the first ``num_tokens`` tokens are valid in all groups.

        Plans submitted before may still use these blocks for whoever had them: what fills them comes after those plans.
        """

    def finished(self, request_id: int, num_tokens: int, blocks: Sequence[Place]) -> bool:
        """Tell that a request ended with that many tokens valid; True keeps its blocks held until ``released``."""

    def poll(self) -> ConnectorEvents:
        """Return what has happened. Never waits."""
