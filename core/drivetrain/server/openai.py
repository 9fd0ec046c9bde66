"""What clients may ask: the bodies of the completion routes, checked in full, and the values they become.

A field that would change the answer and isn't supported is refused unless it has its neutral value; a field that
nobody knows is ignored, and named in the answer's ``Warning`` header.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from drivetrain.errors import RequestError
from drivetrain.params import MAX_LOGPROBS, MAX_N, SamplingParams
from drivetrain.server.failures import HttpError, invalid

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_PROMPTS = 256
MAX_CHOICES = 1024
MAX_MESSAGES = 10_000
DEFAULT_COMPLETION_TOKENS = 16
ROLES = ("system", "developer", "user", "assistant", "tool")

# Fields whose other values would change the answer. None is neutral for each.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "use_beam_search": (False,),
}
# Hints about the caller or the service: accepted, and without meaning here.
HINTS = frozenset(
    "user metadata store service_tier prompt_cache_key safety_identifier parallel_tool_calls verbosity "
    "request_id session_id".split()
)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What every body may have. None always means the default."""

    model: str | None = None


class Sampling(Body, frozen=True, kw_only=True):
    """The fields that both kinds of completion have."""

    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def params(self, logprobs: int | None) -> SamplingParams:
        """Return the checked parameters. RequestError or HttpError naming the field."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        stops = tuple(one for one in stops if one) if self.stop == "" else stops
        if len(stops) > MAX_STOPS or any(len(one) > MAX_STOP_LENGTH for one in stops):
            raise invalid(f"stop takes at most {MAX_STOPS} strings of {MAX_STOP_LENGTH} characters", "stop")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed with stream", "stream_options")
        if self.n is not None and not 1 <= self.n <= MAX_N:
            raise invalid(f"n is {self.n}; it must be between 1 and {MAX_N}", "n")
        if self.priority is not None and abs(self.priority) >= 1 << 31:
            raise invalid("priority must be a 32-bit integer", "priority")
        if any(not 0 <= one < 1 << 31 for one in self.stop_token_ids or ()):
            raise invalid("stop_token_ids holds a number that is no token id", "stop_token_ids")
        return SamplingParams(
            temperature=_default(self.temperature, 1.0),
            top_k=0 if self.top_k is None or self.top_k == -1 else _int32(self.top_k, "top_k"),
            top_p=_default(self.top_p, 1.0),
            min_p=_default(self.min_p, 0.0),
            seed=self.seed,
            n=_default(self.n, 1),
            stop=stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            repetition_penalty=_default(self.repetition_penalty, 1.0),
            presence_penalty=_default(self.presence_penalty, 0.0),
            frequency_penalty=_default(self.frequency_penalty, 0.0),
            logit_bias=tuple((self.logit_bias or {}).items()),
            bad_words=tuple(self.bad_words or ()),
            min_tokens=_default(self.min_tokens, 0),
        )


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> tuple[str | list[int], ...]:
        """Return the prompts one by one: texts, or lists of token ids."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        kinds = {type(one) for one in self.prompt}
        if len(kinds) != 1:
            raise invalid("prompt is empty or mixes strings, tokens and lists of tokens", "prompt")
        if kinds == {int}:
            return ([int(one) for one in self.prompt],)  # type: ignore[arg-type]
        if len(self.prompt) * _default(self.n, 1) > MAX_CHOICES or len(self.prompt) > MAX_PROMPTS:
            raise invalid(f"at most {MAX_PROMPTS} prompts and {MAX_CHOICES} choices in one request", "prompt")
        return tuple(one for one in self.prompt if not isinstance(one, int))

    def tokens(self) -> int:
        """Return how many tokens are asked for; 0 only with ``echo``."""
        asked = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if asked < (0 if self.echo else 1):
            raise invalid(f"max_tokens is {asked}; it must be 1 or more", "max_tokens")
        return asked

    def checked(self) -> SamplingParams:
        """Return the checked parameters."""
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise invalid(f"logprobs is {self.logprobs}; it must be 0 to {MAX_LOGPROBS}", "logprobs")
        if self.echo and self.logprobs is not None:
            raise invalid("log-probabilities of the prompt (echo with logprobs) are not supported", "logprobs")
        return self.params(self.logprobs)


class ChatRequest(Sampling, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    reasoning_effort: str | None = None

    def tokens(self) -> int | None:
        """Return how many tokens are asked for; None: as many as the model's length has room for."""
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        asked: int | None = getattr(self, name)
        if asked is not None and asked < 1:
            raise invalid(f"{name} is {asked}; it must be 1 or more", name)
        return asked

    def checked(self) -> SamplingParams:
        """Return the checked parameters."""
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise invalid(f"top_logprobs is {self.top_logprobs}; it must be 0 to {MAX_LOGPROBS}", "top_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        return self.params(_default(self.top_logprobs, 0) if self.logprobs else None)

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as a template takes them: plain text, known roles."""
        return conversation_of(self.messages)

    def template_options(self) -> dict[str, Any]:
        """Return what the template is told beside the messages."""
        options: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        options["add_generation_prompt"] = self.add_generation_prompt is not False
        return options


def conversation_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as a template takes them: plain text, known roles. HttpError naming the message."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise invalid(f"messages must hold between 1 and {MAX_MESSAGES} messages", "messages")
    return [_message(one, f"messages[{place}]") for place, one in enumerate(messages)]


Request = TypeVar("Request", bound=Body)


def decode(body: bytes, kind: type[Request]) -> tuple[Request, tuple[str, ...]]:
    """Parse a body. Returns the request and the names of the fields that nobody knows; raises a 400."""
    try:
        fields: dict[str, msgspec.Raw] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _validation(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    unknown = []
    for name, raw in fields.items():
        if name in kind.__struct_fields__:
            continue
        if name in NEUTRAL:
            _check_neutral(name, raw)
        elif name not in HINTS:
            unknown.append(name)
    return request, tuple(unknown)


def _check_neutral(name: str, raw: msgspec.Raw) -> None:
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise invalid(f"{name} is nested too deeply", name) from None
    if value is not None and value not in NEUTRAL[name]:
        raise invalid(f"{name} is not supported by this server", name, "unsupported_parameter")


def _validation(error: msgspec.ValidationError) -> HttpError:
    """Turn ``Expected `int`, got `str` - at `$.max_tokens``` into a message that begins with the field."""
    what, _, where = str(error).partition(" - at `$")
    path = where.removesuffix("`").lstrip(".")
    missing = re.search(r"missing required field `(\w+)`", what)
    if missing:
        path = f"{path}.{missing[1]}".lstrip(".")
        return invalid(f"{path} is required", path)
    return invalid(f"{path}: {what}" if path else f"the body: {what}", path or None)


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise invalid(f"{where}.role is {message.role!r}; it must be one of {', '.join(ROLES)}", f"{where}.role")
    content = message.content
    if isinstance(content, list):
        for place, part in enumerate(content):
            if part.type not in ("text", "refusal") or (part.text is None and part.refusal is None):
                param = f"{where}.content[{place}]"
                raise invalid(f"{param}: this model takes text, not {part.type!r}", param)
        content = "\n".join(part.text if part.text is not None else part.refusal or "" for part in content)
    if message.tool_calls or message.role == "tool":
        raise invalid(f"{where}: tool calls are not supported by this server", where, "unsupported_parameter")
    if content is None:
        raise invalid(f"{where}.content is required", f"{where}.content")
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content} | ({"name": message.name} if message.name else {})


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _int32(value: int, name: str) -> int:
    if not -(1 << 31) <= value < 1 << 31:
        raise RequestError(f"{name} is {value}; it must be a 32-bit integer", param=name)
    return value
