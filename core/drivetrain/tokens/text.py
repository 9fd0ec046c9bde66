"""Everything that a model's text needs, in one value: what the front end and ``LLM`` hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from drivetrain.config import EngineConfig
from drivetrain.errors import RequestError, TokenizerError
from drivetrain.models.source import ModelSource, resolve
from drivetrain.tokens.chat import ChatTemplate, template_source
from drivetrain.tokens.detokenize import IncrementalDetokenizer
from drivetrain.tokens.load import load_tokenizer
from drivetrain.tokens.stops import StopStrings
from drivetrain.tokens.tokenizer import Tokenizer


class ModelText:
    """A model's tokenizer, chat template and end tokens. Calls from several threads are safe.

    ``eos_ids``: the end tokens of the generation configuration, the model's configuration and the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, eos_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self._template = template

    @property
    def has_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._template is not None

    @property
    def vocabulary(self) -> int:
        """How many tokens the tokenizer knows; the model may have more rows."""
        return self.tokenizer.vocabulary

    def encode(self, text: str, special: bool = True) -> np.ndarray:
        """Return a prompt's ids, int32. ``special``: with the tokens that the model wants around a text.

        Control tokens spelt in the prompt are meant: whoever completes raw text writes the structure himself.
        """
        return np.asarray(self.tokenizer.encode(text, add_special=special, control=True), np.int32)

    def words(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences by which texts appear in an answer, at its beginning and behind a space, each
        once. RequestError for a text that has no tokens."""
        found: list[tuple[int, ...]] = []
        for text in texts:
            bare = text.lstrip()
            both = [tuple(map(int, self.encode(one, False))) for one in (bare, " " + bare)]
            if not all(both):
                raise RequestError(f"bad_words holds {text!r}, which has no tokens", param="bad_words")
            found += both
        return tuple(dict.fromkeys(found))

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> np.ndarray:
        """Return a conversation's ids, int32; see ``ChatTemplate.encode``. TokenizerError without a template."""
        if self._template is None:
            raise TokenizerError(
                f"{self.tokenizer.origin} has no chat template",
                fix="give one with --chat-template FILE, or --chat-template plain for lines such as `User: ...`",
            )
        return np.asarray(self._template.encode(messages, options), np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens left out."""
        return self.tokenizer.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; maybe a part of a character."""
        return self.tokenizer.piece(token)

    def detokenizer(self, prompt: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> IncrementalDetokenizer:
        """Return the text assembler of one answer to ``prompt``."""
        return IncrementalDetokenizer(self.tokenizer, skip_special=skip_special, continuing=len(prompt) > 0)

    def stops(self, strings: Sequence[str], *, include: bool = False) -> StopStrings:
        """Return a matcher of one answer's stop strings."""
        return StopStrings(strings, include=include)


def open_text(source: ModelSource, *, tokenizer: str | None = None, chat_template: str | None = None) -> ModelText:
    """Read a model's tokenizer and template. ``chat_template``: a file, ``plain``, or None for the model's own."""
    read = load_tokenizer(source, tokenizer)
    found = template_source(read, chat_template)
    template = None if found is None else ChatTemplate(found[0], read, found[1])
    return ModelText(read, template, tuple(dict.fromkeys((*source.eos_ids, *read.eos_ids))))


def load_text(config: EngineConfig) -> ModelText:
    """Read what a configuration names. ModelError or TokenizerError naming what is missing."""
    return open_text(
        resolve(config.model, config.revision), tokenizer=config.tokenizer, chat_template=config.chat_template
    )
