"""What shapes a backend can run: anything, or finite buckets. Pure data; the scheduler and runner pack to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapePolicy:
    """Empty bucket tuples mean dynamic. Buckets are ascending; a step is padded up to the next one.

    ``tokens``: query tokens in a step; ``rows``: requests in a step; ``blocks_per_row``: width of a block table.
    ``compile_budget``: how many distinct (tokens, rows, blocks) shapes may be built before ready; 0 means no limit.
    Padded tokens carry ``pad_token``; padded rows have length 0 and write to block 0, the null block, never read.
    """

    tokens: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    blocks_per_row: tuple[int, ...] = ()
    pad_token: int = 0
    compile_budget: int = 0

    @property
    def dynamic(self) -> bool:
        """True where any shape may be run."""
        return not (self.tokens or self.rows or self.blocks_per_row)


def bucket(buckets: tuple[int, ...], value: int) -> int:
    """Return the smallest bucket >= value; the value itself where there are no buckets. ValueError when too large."""
    if not buckets:
        return value
    for size in buckets:
        if size >= value:
            return size
    raise ValueError(f"{value} exceeds the largest bucket {buckets[-1]} of {buckets}")
