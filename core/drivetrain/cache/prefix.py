"""The hash chain that names prompt prefixes. Canonical bytes, written down in docs/prefix-hash.md; no torch.

A unit is ``unit`` tokens (its size does not depend on any block size). digest(0) = H(root | tokens of unit 0),
digest(i) = H(digest(i - 1) | tokens of unit i), with H = BLAKE2b of 32 bytes (RFC 7693) and tokens as little-endian
int32. Servers with equal roots agree on all digests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

VERSION = b"drivetrain-prefix-1"
DIGEST_BYTES = 32
DEFAULT_UNIT = 32
PIECE = 16  # units that are remembered together
MOST_PIECES = 4096
EMPTY = blake2b(digest_size=DIGEST_BYTES)  # to be copied: that is sooner done than made


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRoot:
    """What must be equal before two prompts may share cached blocks.

    ``model``: identity and revision of the weights; ``layout``: the cache's dtypes, kinds and windows as text;
    ``media``: content hashes of what stands for tokens that are not text, in order.
    """

    model: str
    layout: str
    adapter: str = ""
    cache_salt: str = ""
    fanout: int | None = None
    media: tuple[bytes, ...] = ()

    def digest(self, unit: int) -> bytes:
        """Return the chain's parent of unit 0: H over the version, the unit and each field with its length."""
        fanout = b"" if self.fanout is None else self.fanout.to_bytes(8, "little", signed=True)
        fields: Iterable[bytes] = (
            VERSION,
            unit.to_bytes(4, "little"),
            self.model.encode(),
            self.layout.encode(),
            self.adapter.encode(),
            self.cache_salt.encode(),
            fanout,
            *self.media,
        )
        state = blake2b(digest_size=DIGEST_BYTES)
        for part in fields:
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state.digest()


class Known:
    """Digests of pieces of the prompts that came last: what many prompts begin with is hashed once.

    A piece is ``PIECE`` units, found again by the digest before it and its tokens themselves.
    """

    __slots__ = ("_most", "_pieces")

    def __init__(self, most: int = MOST_PIECES) -> None:
        self._pieces: dict[bytes, tuple[bytes, ...]] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._pieces)

    def find(self, key: bytes) -> tuple[bytes, ...] | None:
        """Return a piece's digests. ``key``: the digest before it, and its tokens as bytes."""
        found = self._pieces.pop(key, None)
        if found is not None:
            self._pieces[key] = found  # those that were not asked for lie in front
        return found

    def add(self, key: bytes, digests: tuple[bytes, ...]) -> None:
        """Remember a piece; the one that was not asked for longest is forgotten for it."""
        if len(self._pieces) >= self._most:
            del self._pieces[next(iter(self._pieces))]
        self._pieces[key] = digests


class Chain:
    """The digests of one sequence, extended as its tokens become known. ``known``: what others have hashed."""

    __slots__ = ("_bytes", "_known", "_parent", "_unit", "digests")

    def __init__(self, root: bytes, unit: int, known: Known | None = None) -> None:
        self._known = known
        self._parent = root
        self._unit = unit
        self._bytes = 4 * unit
        self.digests: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Tokens covered so far, a multiple of the unit."""
        return len(self.digests) * self._unit

    def push(self, unit: bytes) -> bytes:
        """Cover one unit more, given as little-endian int32 bytes; returns its digest."""
        digest = blake2b(self._parent + unit, digest_size=DIGEST_BYTES).digest()
        self._parent = digest
        self.digests.append(digest)
        return digest

    def extend(self, tokens: np.ndarray, upto: int) -> None:
        """Cover all whole units of tokens[:upto]; ``tokens`` int32 begins at the sequence's first token."""
        first, last = len(self.digests), upto // self._unit
        if last <= first:
            return
        data = tokens[first * self._unit : last * self._unit].astype("<i4", copy=False).tobytes()
        at = self._extend_pieces(data, self._known) if self._known is not None and first % PIECE == 0 else 0
        if at < len(data):
            self._hash(data[at:] if at else data)

    def _extend_pieces(self, data: bytes, known: Known) -> int:
        """Cover the whole pieces that some bytes begin with; returns how many bytes that are."""
        size, at = PIECE * self._bytes, 0
        while at + size <= len(data):
            piece = data[at : at + size]
            key = self._parent + piece
            digests = known.find(key)
            if digests is None:
                self._hash(piece)
                known.add(key, tuple(self.digests[-PIECE:]))
            else:
                self.digests += digests
                self._parent = digests[-1]
            at += size
        return at

    def _hash(self, data: bytes) -> None:
        """Cover whole units."""
        new, parent, add = EMPTY.copy, self._parent, self.digests.append
        for unit in np.frombuffer(data, f"V{self._bytes}").tolist():  # as bytes
            state = new()
            state.update(parent + unit)
            parent = state.digest()
            add(parent)
        self._parent = parent
