"""Chat templates: a model's own Jinja2 program, run in a sandbox with bounded size and processor time.

What users wrote is protected before it goes in (``guard.py``), so that a message that spells a control token stays
text, while the template's own control tokens work.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from drivetrain.errors import RequestError, TokenizerError
from drivetrain.tokens.guard import without_marks
from drivetrain.tokens.tokenizer import Tokenizer

MAX_SOURCE = 1 << 20  # characters
MAX_OUTPUT = 1 << 24
MAX_SECONDS = 5.0  # of this thread's processor time
LINES_BETWEEN_LOOKS = 64
FILE = "<chat template>"
# Plain lines for models without a template; used only when it is asked for by name.
PLAIN = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


class TemplateRefusal(Exception):
    """The template itself said that it can't take these messages (``raise_exception``)."""


class TemplateTooMuch(Exception):
    """The template passed a bound."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, with products and powers bounded too."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) < 1 << 16 and abs(right) < 64):
            raise TemplateTooMuch("a power is too large")
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(count, int) and len(text) * count > MAX_OUTPUT:
                    raise TemplateTooMuch("a repetition is too long")
        return super().call_binop(context, operator, left, right)


class Generation(Extension):
    """``{% generation %}`` marks an assistant's words for training; here its content is simply part of the text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja2 reads a class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise TemplateRefusal(str(message))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as templates expect it: nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _environment() -> Sandbox:
    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return made


class ChatTemplate:
    """A compiled chat template of one tokenizer. Rendering is safe from several threads."""

    def __init__(self, source: str, tokenizer: Tokenizer, origin: str = "the chat template") -> None:
        """TokenizerError when the source is too long or not Jinja2. ``origin`` names it in errors."""
        if len(source) > MAX_SOURCE:
            raise TokenizerError(f"{origin} has {len(source)} characters; {MAX_SOURCE} are taken")
        environment = _environment()
        try:
            code = environment.compile(source, filename=FILE)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"{origin} is not a Jinja2 template: {error}", fix="correct it") from error
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        self._tokenizer = tokenizer
        self._origin = origin

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> str:
        """Return the conversation as the model reads it; see ``encode``."""
        return without_marks(self._render(messages, options or {}))

    def encode(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> list[int]:
        """Return the conversation's ids. Control tokens come from the template alone, never from what is put in.

        ``messages``: mappings with ``role``, ``content`` and what else the template reads. ``options``: more
        variables, such as ``tools``; ``add_generation_prompt`` is True unless it says otherwise. RequestError when
        the template refuses the messages, fails on them, or takes too long over them.
        """
        text = self._render(messages, options or {})
        return self._tokenizer.encode(text, add_special=False, control=True)

    def _render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        guard = self._tokenizer.guard
        values: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
        values |= guard.protect_all(dict(options))
        values |= self._tokenizer.special
        values["messages"] = guard.protect_all(list(messages))
        try:
            with _bounded():
                return self._joined(self._template.generate(values))
        except TemplateRefusal as error:
            raise RequestError(f"{self._origin} refuses these messages: {error}", param="messages") from error
        except TemplateTooMuch as error:
            raise RequestError(f"{self._origin} was stopped: {error}", param="messages") from error
        except Exception as error:  # a program of somebody else's: anything may come out of it
            raise RequestError(
                f"{self._origin} fails on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error

    def _joined(self, parts: Iterator[str]) -> str:
        found, size = [], 0
        for part in parts:
            size += len(part)
            if size > MAX_OUTPUT:
                raise TemplateTooMuch(f"it writes more than {MAX_OUTPUT} characters")
            found.append(part)
        return "".join(found)


@contextmanager
def _bounded() -> Iterator[None]:
    """Stop the template's code when its processor time is used up, wherever it loops. One thread's affair."""
    end = time.thread_time() + MAX_SECONDS
    lines = 0

    def line(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines % LINES_BETWEEN_LOOKS == 0 and time.thread_time() > end:
            raise TemplateTooMuch(f"it takes more than {MAX_SECONDS} seconds")
        return line

    def call(frame: FrameType, event: str, value: Any) -> Any:
        return line if frame.f_code.co_filename == FILE else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


def template_source(tokenizer: Tokenizer, choice: str | None) -> tuple[str, str] | None:
    """Return (source, origin) of the template to use, or None when there is none.

    ``choice``: None for the model's own; ``plain`` for plain lines ("User: ..."); else a file's path.
    TokenizerError when the file can't be read.
    """
    if choice is None:
        own = tokenizer.templates.get("default")
        return None if own is None else (own, f"the chat template of {tokenizer.origin}")
    if choice == "plain":
        return PLAIN, "the plain chat template"
    try:
        with open(choice, encoding="utf-8") as file:
            return file.read(MAX_SOURCE + 1), f"the chat template {choice}"
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"--chat-template {choice} can't be read: {error}", fix="give a Jinja2 file, or `plain`"
        ) from error
