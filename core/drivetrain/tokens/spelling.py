"""How a vocabulary spells bytes: what a token stands for, read from the ``tokenizers`` decoder's own description.

Decoding is defined by bytes here: the tokens' bytes are joined and read as UTF-8, each maximal invalid part becoming
one U+FFFD. On valid text that is what ``tokenizers`` gives; on invalid runs of byte tokens ``tokenizers`` replaces
every byte of the run, valid characters included, which could not be streamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.errors import TokenizerError

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: printable Latin-1 stands for itself, the rest follows U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """``byte_level``: tokens are written in the byte alphabet. ``byte_tokens``: "<0xE2>" is a byte.
    ``replacements``: (as in the vocabulary, as in text). ``strip``: spaces that the beginning of a text loses."""

    byte_level: bool = False
    byte_tokens: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip: int = 0

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes that a token stands for."""
        if self.byte_level:
            try:
                return bytes(map(ALPHABET.__getitem__, token))
            except KeyError:  # an added token, written as it is
                return token.encode("utf-8")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_tokens and (match := BYTE.fullmatch(token)):
            return bytes((int(match[1], 16),))
        return token.encode("utf-8")


ALPHABET = byte_alphabet()


def spelling_of(state: bytes | None) -> Spelling:
    """Read a decoder's JSON description. TokenizerError for a kind that has no byte meaning here."""
    described: Mapping[str, Any] | None = json.loads(state) if state else None
    if described is None:
        raise TokenizerError("the tokenizer has no decoder, so its tokens can't become text")
    parts = described["decoders"] if described["type"] == "Sequence" else [described]
    facts: dict[str, Any] = {"replacements": ()}
    for part in parts:
        _read(part, facts)
    return Spelling(**facts)


def _read(part: Mapping[str, Any], facts: dict[str, Any]) -> None:
    kind = part["type"]
    if kind == "ByteLevel":
        facts["byte_level"] = True
    elif kind == "ByteFallback":
        facts["byte_tokens"] = True
    elif kind == "Replace" and "String" in part["pattern"]:
        facts["replacements"] += ((part["pattern"]["String"], part["content"]),)
    elif kind == "Metaspace":
        facts["replacements"] += ((part["replacement"], " "),)
        facts["strip"] = int(part.get("prepend_scheme", "always") != "never")
    elif kind == "Strip" and part["content"] == " " and part["stop"] == 0:
        facts["strip"] = int(part["start"])
    elif kind != "Fuse":
        raise TokenizerError(
            f"the tokenizer decodes by {kind}, which is not supported",
            fix="byte-level and SentencePiece style vocabularies are",
        )


def controls_made(ids: Iterable[Iterable[int]], controls: frozenset[int]) -> bool:
    """Whether any of these encodings holds a control token."""
    return any(not controls.isdisjoint(some) for some in ids)
