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


class Chain:
    """The digests of one sequence, extended as its tokens become known."""

    __slots__ = ("_bytes", "_parent", "_unit", "digests")

    def __init__(self, root: bytes, unit: int) -> None:
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
        new, parent, add = EMPTY.copy, self._parent, self.digests.append
        for unit in np.frombuffer(data, f"V{self._bytes}").tolist():  # as bytes
            state = new()
            state.update(parent + unit)
            parent = state.digest()
            add(parent)
        self._parent = parent
