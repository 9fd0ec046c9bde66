"""What clients are told: whole answers and the chunks of streams, in the forms of the two completion routes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from drivetrain.params import TokenLogprobs
from drivetrain.server.assembly import Delta
from drivetrain.server.frontend import Reply

LOWEST_LOGPROB = -9999.0  # JSON has no infinity
MARK = "\0"  # stands for a chunk's text while its frame is made
Reports = Sequence[tuple[int, TokenLogprobs]]
TokenBytes = Callable[[int], bytes]


@dataclass(slots=True)
class Choice:
    """One choice of a whole answer, as its deltas add up."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        """Add a delta."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish = delta.finish or self.finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a client asked to be told beside the text. ``usage``: at the end of a stream."""

    logprobs: bool = False
    usage: bool = False
    token_ids: bool = False


class Form(Protocol):
    """How one route writes its answers. All chunks of a stream carry the same id, time and model."""

    def opening(self, index: int) -> bytes | None: ...
    def chunk(self, delta: Delta) -> bytes: ...
    def closing(self, reply: Reply) -> bytes: ...
    def whole(self, choices: Sequence[Choice], reply: Reply) -> bytes: ...


def usage_of(reply: Reply) -> dict[str, Any]:
    """Return OpenAI's ``usage``."""
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


class Head:
    """What every chunk of an answer begins with."""

    def __init__(self, prefix: str, kind: str, model: str, *, usage: bool) -> None:
        self._kind = kind
        self._fields = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._usage = usage
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def text(self, index: int, choice: dict[str, Any], text: str, suffix: str = "") -> bytes:
        """Return the chunk of one choice with nothing but text, which stands where ``choice`` has ``MARK``: all
        the rest of it is written once for each index."""
        frame = self._frames.get(index)
        if frame is None:
            before, _, after = self.chunk([choice | {"index": index}], suffix).rpartition(msgspec.json.encode(MARK))
            frame = self._frames[index] = (before, after)
        return frame[0] + msgspec.json.encode(text) + frame[1]

    def chunk(self, choices: list[dict[str, Any]], suffix: str = "") -> bytes:
        """Return a chunk; ``usage`` is null in all but the last where usage was asked for."""
        content = self._fields | {"object": self._kind + suffix, "choices": choices}
        return msgspec.json.encode(content | {"usage": None} if self._usage else content)

    def with_usage(self, choices: list[dict[str, Any]], reply: Reply, suffix: str = "") -> bytes:
        """Return a chunk or a whole answer that has usage."""
        content = self._fields | {"object": self._kind + suffix, "choices": choices}
        return msgspec.json.encode(content | {"usage": usage_of(reply)})


TEXT_CHAT = {"index": 0, "delta": {"content": MARK}, "logprobs": None, "finish_reason": None}
TEXT_COMPLETION = {"index": 0, "text": MARK, "logprobs": None, "finish_reason": None}


def plain(delta: Delta, wanted: Wanted) -> bool:
    """Return whether a delta's chunk has nothing but text."""
    return delta.finish is None and not delta.logprobs and not wanted.token_ids


class ChatForm:
    """``chat.completion`` and its chunks."""

    def __init__(self, model: str, token_bytes: TokenBytes, wanted: Wanted) -> None:
        self._head = Head("chatcmpl", "chat.completion", model, usage=wanted.usage)
        self._token_bytes = token_bytes
        self._wanted = wanted

    def opening(self, index: int) -> bytes | None:
        """Return the chunk that names the role."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def chunk(self, delta: Delta) -> bytes:
        """Return the chunk of one delta."""
        if plain(delta, self._wanted) and delta.text:
            return self._head.text(delta.index, TEXT_CHAT, delta.text, ".chunk")
        content = {"content": delta.text} if delta.text else {}
        return self._chunk(delta.index, content, delta)

    def _chunk(self, index: int, content: dict[str, Any], delta: Delta | None = None) -> bytes:
        reports = self._reports(delta.logprobs) if delta and delta.logprobs else None
        choice = {
            "index": index,
            "delta": content,
            "logprobs": reports,
            "finish_reason": delta.finish if delta else None,
        }
        if self._wanted.token_ids:
            choice["token_ids"] = delta.tokens if delta else ()
        return self._head.chunk([choice], ".chunk")

    def closing(self, reply: Reply) -> bytes:
        """Return the chunk of usage."""
        return self._head.with_usage([], reply, ".chunk")

    def whole(self, choices: Sequence[Choice], reply: Reply) -> bytes:
        """Return the whole answer."""
        content = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._reports(choice.logprobs) if self._wanted.logprobs else None,
                "finish_reason": choice.finish,
            }
            | ({"token_ids": choice.tokens} if self._wanted.token_ids else {})
            for index, choice in enumerate(choices)
        ]
        return self._head.with_usage(content, reply)

    def _reports(self, reports: Reports) -> dict[str, Any]:
        content = []
        for _, one in reports:
            top = [self._entry(*pair) for pair in zip(one.top_ids, one.top_logprobs, strict=True)]
            content.append(self._entry(one.token, one.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._token_bytes(token)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}


class CompletionForm:
    """``text_completion``. ``echoes``: a prompt's text before its choices, empty without echo; ``n`` a prompt."""

    def __init__(self, model: str, token_bytes: TokenBytes, wanted: Wanted, *, echoes: Sequence[str], n: int) -> None:
        self._head = Head("cmpl", "text_completion", model, usage=wanted.usage)
        self._token_bytes = token_bytes
        self._wanted = wanted
        self._echoes = echoes
        self._n = n

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n]

    def opening(self, index: int) -> bytes | None:
        """Return the chunk that repeats the prompt, with echo."""
        echo = self._echo(index)
        return self._chunk(index, echo) if echo else None

    def chunk(self, delta: Delta) -> bytes:
        """Return the chunk of one delta."""
        if plain(delta, self._wanted):
            return self._head.text(delta.index, TEXT_COMPLETION, delta.text)
        return self._chunk(delta.index, delta.text, delta)

    def _chunk(self, index: int, text: str, delta: Delta | None = None) -> bytes:
        reports = self._reports(delta.logprobs, index) if delta and delta.logprobs else None
        finish = delta.finish if delta else None
        choice = {"index": index, "text": text, "logprobs": reports, "finish_reason": finish}
        if self._wanted.token_ids:
            choice["token_ids"] = delta.tokens if delta else ()
        return self._head.chunk([choice])

    def closing(self, reply: Reply) -> bytes:
        """Return the chunk of usage."""
        return self._head.with_usage([], reply)

    def whole(self, choices: Sequence[Choice], reply: Reply) -> bytes:
        """Return the whole answer."""
        content = [
            {
                "index": index,
                "text": self._echo(index) + choice.text,
                "logprobs": self._reports(choice.logprobs, index) if self._wanted.logprobs else None,
                "finish_reason": choice.finish,
            }
            | ({"token_ids": choice.tokens} if self._wanted.token_ids else {})
            for index, choice in enumerate(choices)
        ]
        return self._head.with_usage(content, reply)

    def _reports(self, reports: Reports, index: int) -> dict[str, Any]:
        shift = len(self._echo(index))
        tops = []
        for _, one in reports:
            top = {self._word(token): value for token, value in zip(one.top_ids, one.top_logprobs, strict=True)}
            top.setdefault(self._word(one.token), one.logprob)
            tops.append({word: max(value, LOWEST_LOGPROB) for word, value in top.items()})
        return {
            "tokens": [self._word(one.token) for _, one in reports],
            "token_logprobs": [max(one.logprob, LOWEST_LOGPROB) for _, one in reports],
            "top_logprobs": tops,
            "text_offset": [shift + begin for begin, _ in reports],
        }

    def _word(self, token: int) -> str:
        return word_of(self._token_bytes(token))


def word_of(raw: bytes) -> str:
    """Return a token's text; tokens that are no whole characters are told apart by their bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{one:02x}" for one in raw)
