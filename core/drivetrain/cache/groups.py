"""How each kind of cache names its blocks, finds them again, and lets go of them. One class a kind, same methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from drivetrain.cache.pool import Pool
from drivetrain.cache.prefix import MOST_PIECES, PIECE
from drivetrain.cache.sizing import GroupPlan


class Group(Protocol):
    """One cache group's rules. Positions are in tokens; a prefix of length p is tokens 0 .. p - 1."""

    number: int
    plan: GroupPlan
    granule: int

    def longest(self, digests: Sequence[bytes], limit: int) -> int:
        """Return the longest prefix <= limit, a multiple of the granule, that this group can serve."""

    def blocks_at(self, digests: Sequence[bytes], length: int) -> tuple[int, list[int]]:
        """Return the blocks that a row must hold to go on from a prefix that it can serve, and the first one's index in
        the table."""

    def first_needed(self, position: int) -> int:
        """Return the first table index that a query at that position, or any later one, may read."""

    def named_upto(self, position: int) -> int:
        """Return how many table indices have names once tokens 0 .. position - 1 are known."""

    def name_of(self, digests: Sequence[bytes], index: int) -> bytes:
        """Return the name of the block at a table index."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks in a row that were found together. ``names_of(names)``: theirs; ``names``: what these were then."""

    blocks: list[int]
    names_of: Callable[[Any], tuple[bytes | None, ...]]
    names: tuple[bytes | None, ...]


class Runs:
    """Blocks of pieces of prompts that came last, by the digest at a piece's end. A piece is ``units`` hash units; what
    was remembered holds as long as each of its blocks still has its name."""

    def __init__(self, units: int, blocks: int, names: list[bytes | None]) -> None:
        self._units, self._blocks, self._names = units, blocks, names
        self._runs: dict[bytes, Run] = {}

    def find(self, digests: Sequence[bytes], count: int) -> list[int]:
        """Return the blocks of the first table indices, at most ``count``, as far as they are remembered."""
        found: list[int] = []
        blocks, at = self._blocks, self._units - 1
        while blocks and len(found) + blocks <= count:
            run = self._runs.get(digests[at])
            if run is None or run.names_of(self._names) != run.names:
                break
            found += run.blocks
            at += self._units
        return found

    def note(self, digests: Sequence[bytes], first: int, blocks: Sequence[int]) -> None:
        """Remember whole pieces of blocks, which lie at the table's indices from ``first`` on and have the names that
        these digests give them."""
        size = self._blocks
        if not size:
            return
        for at in range(-first % size, len(blocks) - size + 1, size):
            key = digests[((first + at) // size + 1) * self._units - 1]
            part = list(blocks[at : at + size])
            names_of = itemgetter(*part)
            self._runs.pop(key, None)
            if len(self._runs) >= MOST_PIECES:
                del self._runs[next(iter(self._runs))]
            self._runs[key] = Run(part, names_of, names_of(self._names))


class PagedGroup:
    """Full attention and sliding windows: a block for each ``block_tokens`` tokens.

    Blocks as large as a unit, or larger, are named by the digest of their last unit; smaller ones by the digest of
    their unit and their place in it.
    """

    def __init__(self, pool: Pool, number: int, plan: GroupPlan, unit: int) -> None:
        size = plan.block_tokens
        if size % unit and unit % size:
            raise ValueError(f"block size {size} and hash unit {unit}: one must divide the other")
        self.number, self.plan = number, plan
        self.granule = max(size, unit)
        self._index = pool.groups[number].index
        together = PIECE * unit // size if PIECE * unit % size == 0 and PIECE * unit > size else 0
        self._runs = Runs(PIECE, together, pool.groups[number].names)
        self._size, self._unit, self._window = size, unit, plan.window
        self._parts = unit // size if unit > size else 0
        self._places = np.arange(self._parts, dtype=np.int32)
        self.suffixes = tuple(bytes((place,)) for place in range(self._parts)) or (b"",)
        self._last: tuple[Sequence[bytes], list[bytes]] = ((), [])  # digests, and the names from the first block on

    def name_of(self, digests: Sequence[bytes], index: int) -> bytes:
        if self._parts:
            return digests[index // self._parts] + self.suffixes[index % self._parts]
        return digests[(index + 1) * self._size // self._unit - 1]

    def named_upto(self, position: int) -> int:
        return position // self.granule * self.granule // self._size

    def completed(self, units: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """Say which blocks get names when one unit of each of n rows is complete: which of the rows [m] have such
        blocks (None: all), and their table indices [m, p]. A block's name is the unit's digest and its place's suffix.
        """
        if self._parts:
            return None, (units * self._parts)[:, None] + self._places
        per_block = self._size // self._unit
        chosen = ((units + 1) % per_block == 0).nonzero()[0]
        return chosen, ((units[chosen] + 1) // per_block - 1)[:, None]

    def first_needed(self, position: int) -> int:
        if self._window is None:
            return 0
        return max(0, position - self._window + 1) // self._size

    def longest(self, digests: Sequence[bytes], limit: int) -> int:
        limit = min(limit, len(digests) * self._unit) // self.granule * self.granule
        if self._window is None:
            return self._run_from_start(digests, limit)
        while limit > 0:
            first, last = self.first_needed(limit), limit // self._size
            index = last - 1
            while index >= first and self.name_of(digests, index) in self._index:
                index -= 1
            if index < first:
                return limit
            limit = index * self._size // self.granule * self.granule
        return 0

    def _run_from_start(self, digests: Sequence[bytes], limit: int) -> int:
        count = limit // self._size
        found = len(self._found(digests, count))
        return limit if found == count else found * self._size // self.granule * self.granule

    def _found(self, digests: Sequence[bytes], count: int) -> list[int]:
        """Return the blocks of the first ``count`` table indices up to the first that is not cached."""
        found = self._runs.find(digests, count)
        known = len(found)
        if known < count:
            for block in map(self._index.get, self._names(digests, known, count)):
                if block is None:
                    break
                found.append(block)
            self._runs.note(digests, known, found[known:])
        return found

    def blocks_at(self, digests: Sequence[bytes], length: int) -> tuple[int, list[int]]:
        first, end = self.first_needed(length), length // self._size
        if not first:
            found = self._found(digests, end)
            if len(found) == end:
                return 0, found
        return first, list(map(self._index.__getitem__, self._names(digests, first, end)))

    def named(self, digests: Sequence[bytes], first: int, blocks: Sequence[int]) -> None:
        """A row's blocks from a table index on have just got names: they will be looked up together."""
        if self._window is None:
            self._runs.note(digests, first, blocks)

    def _names(self, digests: Sequence[bytes], first: int, end: int) -> Sequence[bytes]:
        """Return the names of the blocks at table indices first .. end - 1; ``name_of`` over many."""
        if first >= end:
            return ()
        if not self._parts:
            step = self._size // self._unit
            return digests[(first + 1) * step - 1 : end * step : step]
        parts, suffixes = self._parts, self.suffixes
        whole = first // parts
        if whole:
            names = [digest + suffix for digest in digests[whole : -(-end // parts)] for suffix in suffixes]
            return names[first - whole * parts : end - whole * parts]
        of, names = self._last  # a prompt is looked up, weighed and opened one after the other
        if of is not digests or len(names) < end:
            names = [digest + suffix for digest in digests[: -(-end // parts)] for suffix in suffixes]
            self._last = digests, names
        return names[first:end]


class RecurrentGroup:
    """Recurrent state: a working block a request at table index 0, and checkpoints named by the digest before them."""

    def __init__(self, pool: Pool, number: int, plan: GroupPlan, unit: int) -> None:
        self.number, self.plan = number, plan
        self.granule = unit
        self._index = pool.groups[number].index
        self._unit = unit

    def name_of(self, digests: Sequence[bytes], index: int) -> bytes:
        """Name the checkpoint after ``index`` units."""
        return digests[index - 1]

    def named_upto(self, position: int) -> int:
        return 0

    def first_needed(self, position: int) -> int:
        return 0

    def longest(self, digests: Sequence[bytes], limit: int) -> int:
        for units in range(min(limit // self._unit, len(digests)), 0, -1):
            if digests[units - 1] in self._index:
                return units * self._unit
        return 0

    def blocks_at(self, digests: Sequence[bytes], length: int) -> tuple[int, list[int]]:
        """Return the checkpoint to copy from; it has no place in the table: -1."""
        return -1, [self._index[digests[length // self._unit - 1]]] if length else []


def make_group(pool: Pool, number: int, plan: GroupPlan, unit: int) -> Group:
    """Return the rules of one group. ValueError for a kind that has none yet."""
    if plan.kind in ("full", "window"):
        return PagedGroup(pool, number, plan, unit)
    if plan.kind == "recurrent":
        return RecurrentGroup(pool, number, plan, unit)
    raise ValueError(f"cache kind {plan.kind!r} has no rules in this version: full, window and recurrent have")
