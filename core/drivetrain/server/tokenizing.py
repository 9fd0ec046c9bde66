"""The routes of the tokenizer: text or a conversation to token ids, and token ids to text. The loop has no part."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from drivetrain.server.bodies import read_body, require_template, token_ids
from drivetrain.server.exchange import Exchange
from drivetrain.server.failures import invalid
from drivetrain.server.frontend import FrontEnd
from drivetrain.server.openai import Body, ChatMessage, conversation_of
from drivetrain.server.replies import word_of
from drivetrain.server.text import Text, TextPool

MAX_CHARACTERS = 4 << 20
MAX_TOKENS = 1 << 20


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /tokenize: ``prompt`` or ``messages``."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    return_token_strs: bool | None = None

    def conversation(self) -> list[dict[str, Any]] | None:
        """Return the checked messages; None where a text was sent. HttpError naming the field."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid("give either prompt (text) or messages (a conversation), not both", "prompt")
        if self.messages is None:
            for name in ("add_generation_prompt", "chat_template_kwargs"):
                if getattr(self, name):
                    raise invalid(f"{name} goes with messages; remove it, or send messages", name)
            _check_length(len(self.prompt or ""), "prompt")
            return None
        if self.add_special_tokens:
            message = "the chat template writes the special tokens of messages; remove add_special_tokens"
            raise invalid(message, "add_special_tokens")
        conversation = conversation_of(self.messages)
        _check_length(sum(len(one["content"]) for one in conversation), "messages")
        return conversation

    def template_options(self) -> dict[str, Any]:
        """Return what the template is told beside the messages."""
        wanted = self.add_generation_prompt is not False
        return dict(self.chat_template_kwargs or {}) | {"add_generation_prompt": wanted}


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    skip_special_tokens: bool | None = None


class Tokenizing:
    """Handles the two routes. All text is worked on in the pool's threads, answers included."""

    def __init__(self, front: FrontEnd, pool: TextPool, model: str) -> None:
        self._front = front
        self._pool = pool
        self._model = model

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /tokenize: ``{count, max_model_len, tokens, token_strs}``."""
        request = await read_body(exchange, TokenizeRequest, self._model)
        conversation = request.conversation()
        text, longest = self._front.check_ready(), self._front.model.max_model_len
        strings = bool(request.return_token_strs)
        if conversation is None:
            ids = await self._pool.run(text.encode, request.prompt or "", request.add_special_tokens is not False)
        else:
            require_template(text, self._model)
            ids = await self._pool.run(text.chat, conversation, request.template_options())
        await exchange.answer(200, await self._pool.run(_tokens, ids, longest, text if strings else None))

    async def detokenize(self, exchange: Exchange) -> None:
        """POST /detokenize: ``{prompt}``, the text of the tokens; control tokens are spelt unless they are skipped."""
        request = await read_body(exchange, DetokenizeRequest, self._model)
        if len(request.tokens) > MAX_TOKENS:
            raise invalid(f"tokens holds {len(request.tokens)} ids; send at most {MAX_TOKENS} at once", "tokens")
        text = self._front.check_ready()
        skip = bool(request.skip_special_tokens)
        vocabulary = self._front.model.vocabulary
        await exchange.answer(200, await self._pool.run(_text, request.tokens, vocabulary, text, skip))


def _tokens(ids: np.ndarray, longest: int, text: Text | None) -> bytes:
    """The answer of /tokenize; with the tokens' strings where ``text`` is given."""
    listed: list[int] = ids.tolist()
    strings = None if text is None else [word_of(text.token_bytes(one)) for one in listed]
    content = {"count": len(listed), "max_model_len": longest, "tokens": listed, "token_strs": strings}
    return msgspec.json.encode(content)


def _text(tokens: list[int], vocabulary: int, text: Text, skip_special: bool) -> bytes:
    """The answer of /detokenize."""
    ids: list[int] = token_ids(tokens, vocabulary, "tokens").tolist()
    assembler = text.detokenizer(np.zeros(0, np.int32), skip_special=skip_special)
    return msgspec.json.encode({"prompt": assembler.add(ids) + assembler.finish()})


def _check_length(characters: int, param: str) -> None:
    if characters > MAX_CHARACTERS:
        raise invalid(f"{param} has {characters} characters; send at most {MAX_CHARACTERS} at once", param)
