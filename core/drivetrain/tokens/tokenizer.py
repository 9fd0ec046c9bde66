"""One tokenizer: text to ids with control tokens meant or not, ids to text. Calls from several threads are safe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers
from tokenizers import AddedToken, normalizers

from drivetrain.errors import RequestError, TokenizerError
from drivetrain.tokens.guard import MARK, ControlGuard
from drivetrain.tokens.spelling import Spelling, controls_made, spelling_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """What a source says of a tokenizer.

    ``special``: the tokens with a role (``bos_token``, ``eos_token``, ``pad_token``, ``unk_token``) by role.
    ``eos_ids``: end tokens that it names. ``templates``: chat templates by name; the nameless one is ``default``.
    """

    backend: tokenizers.Tokenizer
    origin: str
    special: Mapping[str, str] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    templates: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Text to token ids and back.

    ``bos_id``: the token that begins a text, or None. ``eos_ids``: end tokens that the tokenizer names.
    ``control_ids``: tokens that stand for structure, not for text. ``templates``, ``special``: see TokenizerParts.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        """TokenizerError when the tokenizer has no decoder, or one that has no byte meaning."""
        self._spelling = _spelling(parts)
        self.origin, self.special, self.templates = parts.origin, dict(parts.special), dict(parts.templates)
        self._backend = self._prepared(parts.backend)
        added = self._backend.get_added_tokens_decoder()
        self._controls = {i: token.content for i, token in added.items() if token.special}
        self.control_ids = frozenset(self._controls)
        self.guard = ControlGuard(self._controls.values())
        self._refuse_merged_controls()
        self.vocabulary: int = self._backend.get_vocab_size(with_added_tokens=True)
        self._pieces: dict[int, bytes] = {}
        self._prefix, self._suffix = self._ends()
        self.bos_id = self._id_of("bos_token")
        named = self._id_of("eos_token")
        self.eos_ids = tuple(dict.fromkeys((*parts.eos_ids, *(() if named is None else (named,)))))

    @property
    def spaces_stripped(self) -> int:
        """How many spaces the beginning of a decoded text loses."""
        return self._spelling.strip

    def encode(self, text: str, *, add_special: bool = True, control: bool = False) -> list[int]:
        """Return a text's ids. ``add_special``: with the tokens that the model wants around a text (BOS).

        ``control``: whether text that spells a control token becomes one; False is right for what users write.
        Strings that went through ``guard.protect`` stay text either way. RequestError for text that is not Unicode.
        """
        try:
            found: list[int] = self._backend.encode(
                text if control else self.guard.protect(text), add_special_tokens=False
            ).ids
        except TypeError as error:  # a lone surrogate can't be UTF-8
            raise RequestError("the text holds a lone surrogate, which is not a character") from error
        return [*self._prefix, *found, *self._suffix] if add_special else found

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, continuing: bool = False) -> str:
        """Return the text of ids. ``continuing``: they follow other text, so that a leading space stays.

        Ids outside the vocabulary (a model's padding rows) have no text.
        """
        text = b"".join(map(self.piece, ids) if not skip_special else self._texts(ids)).decode("utf-8", "replace")
        if continuing:
            return text
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self._spelling.strip) :]

    def piece(self, token: int) -> bytes:
        """Return the bytes that one token stands for; maybe a part of a character."""
        found = self._pieces.get(token)
        if found is None:
            content = self._backend.id_to_token(token) if 0 <= token < 1 << 32 else None
            found = b"" if content is None else self._spelling.to_bytes(content)
            self._pieces[token] = found
        return found

    def _texts(self, ids: Sequence[int]) -> list[bytes]:
        return [self.piece(token) for token in ids if token not in self._controls]

    def _id_of(self, role: str) -> int | None:
        content = self.special.get(role)
        return None if content is None else self._backend.token_to_id(content)

    def _prepared(self, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """Roles become control tokens, all of these are sought before normalization, whose first step drops marks."""
        known = backend.get_added_tokens_decoder()
        control = [token for token in known.values() if token.special]
        have = {token.content for token in control}
        wanted = [c for c in dict.fromkeys(self.special.values()) if c not in have]
        again = [token for token in control if token.normalized]
        backend.add_special_tokens(
            [AddedToken(content, normalized=False, special=True) for content in wanted]
            + [
                AddedToken(t.content, single_word=t.single_word, lstrip=t.lstrip, rstrip=t.rstrip, normalized=False)
                for t in again
            ]
        )
        drop = normalizers.Replace(MARK, "")
        own = backend.normalizer
        backend.normalizer = drop if own is None else normalizers.Sequence([drop, own])
        return backend

    def _refuse_merged_controls(self) -> None:
        """Some published vocabularies merge plain text into control tokens. Take those merges out."""
        protected = [self.guard.protect(content) for content in self._controls.values()]
        encodings = self._backend.encode_batch(protected, add_special_tokens=False)
        if not controls_made((e.ids for e in encodings), self.control_ids):
            return
        described = json.loads(self._backend.to_str())
        contents = set(self._controls.values())
        merges = described["model"].get("merges", [])
        pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in merges]
        described["model"]["merges"] = [list(pair) for pair in pairs if "".join(pair) not in contents]
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(described))
        encodings = self._backend.encode_batch(protected, add_special_tokens=False)
        if controls_made((e.ids for e in encodings), self.control_ids):
            raise TokenizerError(
                f"{self.origin} can't tell text from control tokens",
                fix="a byte-level or SentencePiece BPE vocabulary can",
            )

    def _ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the post-processor puts before and after a text."""
        probe = "a"
        plain = self._backend.encode(probe, add_special_tokens=False).ids
        full = self._backend.encode(probe, add_special_tokens=True).ids
        for at in range(len(full) - len(plain) + 1):
            if full[at : at + len(plain)] == plain:
                return tuple(full[:at]), tuple(full[at + len(plain) :])
        raise TokenizerError(f"{self.origin} changes a text's tokens after encoding, which is not supported")


def _spelling(parts: TokenizerParts) -> Spelling:
    decoder = parts.backend.decoder
    try:
        return spelling_of(None if decoder is None else decoder.__getstate__())
    except TokenizerError as error:
        raise TokenizerError(f"{parts.origin}: {error.message}", fix=error.fix) from error
