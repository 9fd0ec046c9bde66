"""What a request asks for and what comes back: values without torch, shared by front end, loop and ``LLM``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from drivetrain.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 20
MAX_N = 64
MAX_BIASES = 512
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 16
MAX_BAD_WORD_LENGTH = 256  # characters
MAX_HELD = 128  # end tokens that a minimum length holds back


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Names and meanings follow the field's completion APIs.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``logprobs``: how many
    alternatives to report beside each chosen token (0: the chosen token's alone), None for no report.
    ``seed`` None: a seed is drawn at admission and kept. Out-of-range values raise RequestError naming the field.

    ``repetition_penalty`` acts on tokens of prompt and output: logits above 0 are divided by it, others multiplied.
    ``frequency_penalty`` times the token's count in the output, and ``presence_penalty`` where it is there, are taken
    off. ``logit_bias``: (token, what is added) pairs, or a mapping. ``bad_words`` (texts) and ``bad_word_ids`` (token
    sequences) never appear in the output whole. ``min_tokens``: no end or stop token, and no end at a stop string,
    before so many tokens. Order: bias, repetition, frequency, presence, bad words and held tokens, temperature, top_k,
    top_p, min_p. Log-probabilities are those before all of it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            _check_kind(name, getattr(self, name), kind)
        for name, entry in (("stop", str), ("stop_token_ids", int), ("bad_words", str)):
            _check_entries(name, getattr(self, name), entry)
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        _check_bias(self.logit_bias)
        _check_bad_word_ids(self.bad_word_ids)
        checks = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) or more, in 32 bits"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("n", 1 <= self.n <= MAX_N, f"between 1 and {MAX_N}"),
            ("max_tokens", self.max_tokens is None or 1 <= self.max_tokens < 2**31, "1 or more, in 32 bits"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit integer"),
            ("stop", all(self.stop), "non-empty strings"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "above 0 and at most 100"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("min_tokens", 0 <= self.min_tokens < 2**31, "0 or more, in 32 bits"),
            ("min_tokens", self.max_tokens is None or self.min_tokens <= self.max_tokens, "at most max_tokens"),
            ("bad_words", all(word.strip() for word in self.bad_words), "non-empty strings"),
            ("bad_words", len(self.bad_words) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS} strings"),
            ("bad_words", max(map(len, self.bad_words), default=0) <= MAX_BAD_WORD_LENGTH, "of at most 256 characters"),
        )
        for name, ok, allowed in checks:
            if not ok:
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be {allowed}", param=name)

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a draw."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return penalties or bool(self.logit_bias or self.bad_words or self.bad_word_ids or self.min_tokens)


# What a field of ``SamplingParams`` takes. A whole number is also a real one; true and false are neither.
KINDS: dict[str, tuple[str, tuple[type, ...], bool]] = {
    "temperature": ("a number", (int, float), False),
    "top_k": ("a whole number", (int,), False),
    "top_p": ("a number", (int, float), False),
    "min_p": ("a number", (int, float), False),
    "seed": ("a whole number or None", (int,), True),
    "n": ("a whole number", (int,), False),
    "max_tokens": ("a whole number or None", (int,), True),
    "include_stop_str_in_output": ("true or false", (bool,), False),
    "ignore_eos": ("true or false", (bool,), False),
    "logprobs": ("a whole number or None", (int,), True),
    "repetition_penalty": ("a number", (int, float), False),
    "presence_penalty": ("a number", (int, float), False),
    "frequency_penalty": ("a number", (int, float), False),
    "min_tokens": ("a whole number", (int,), False),
}


def _check_kind(name: str, value: object, kind: tuple[str, tuple[type, ...], bool]) -> None:
    what, types, optional = kind
    if value is None and optional:
        return
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise RequestError(f"{name} is {value!r}; it must be {what}", param=name)


def _check_entries(name: str, value: object, entry: type) -> None:
    if not isinstance(value, tuple | list) or not all(type(one) is entry for one in value):
        what = "strings" if entry is str else "whole numbers"
        raise RequestError(f"{name} is {value!r}; it must be a tuple of {what}", param=name)


def _check_bias(pairs: object) -> None:
    if not isinstance(pairs, tuple | list):
        raise RequestError(f"logit_bias is {pairs!r}; it must map token ids to numbers", param="logit_bias")
    if len(pairs) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(pairs)} tokens; it takes at most {MAX_BIASES}", param="logit_bias")
    for pair in pairs:
        kinds = [type(one) for one in pair] if isinstance(pair, tuple | list) else []
        if len(kinds) != 2 or kinds[0] is not int or kinds[1] not in (int, float):
            raise RequestError(f"logit_bias has {pair!r}; it takes token ids and numbers", param="logit_bias")
        if not 0 <= pair[0] < 2**31 or not -100.0 <= pair[1] <= 100.0:
            what = "token ids are 0 or more, biases between -100 and 100"
            raise RequestError(f"logit_bias of token {pair[0]} is {pair[1]!r}; {what}", param="logit_bias")
    if len({token for token, _ in pairs}) < len(pairs):
        raise RequestError("logit_bias names a token twice", param="logit_bias")


def _check_bad_word_ids(words: object) -> None:
    what = f"at most {MAX_BAD_WORDS} sequences of 1 to {MAX_BAD_WORD_TOKENS} token ids"
    if not isinstance(words, tuple | list) or len(words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_word_ids must be {what}", param="bad_word_ids")
    for word in words:
        ids = word if isinstance(word, tuple | list) else ()
        if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS or any(type(one) is not int or one < 0 for one in ids):
            raise RequestError(f"bad_word_ids has {word!r}; it must be {what}", param="bad_word_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Ask for one vector a request instead of tokens: float32 [hidden] of the final normed hidden states."""

    kind: Literal["last", "mean", "cls"] = "last"
    normalize: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """One sequence to run, as it enters the loop. ``n`` > 1 is fanned out before: one of these a sample.

    ``prompt_ids``: int32 [num_prompt]; with ``embeds`` (float32 [num_prompt, hidden]) they only stand for length.
    ``positions``: int32 [3, num_prompt] where positions have three rows; generated tokens continue from
    max(positions) + 1 in all three rows. ``fanout``: requests of equal prompt and equal fanout share blocks
    even with prefix caching off. ``grammar``: key of a compiled automaton known to the loop. ``bad_words``: the tokens
    of ``sampling.bad_words``.
    """

    request_id: int
    prompt_ids: np.ndarray
    sampling: SamplingParams
    max_tokens: int
    seed: int
    eos_ids: tuple[int, ...] = ()
    arrival: float = 0.0
    priority: int = 0
    sample_index: int = 0
    fanout: int | None = None
    cache_salt: str = ""
    adapter: str = ""
    pooling: PoolingParams | None = None
    embeds: np.ndarray | None = None
    positions: np.ndarray | None = None
    grammar: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def adjusts(self) -> bool:
        """Whether the request needs a slot on the device: it draws tokens, from changed logits."""
        return self.pooling is None and self.sampling.adjusts


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of one generated token: its own, its rank (1 = likeliest), and the top alternatives."""

    token: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A request was scheduled for the first time; ``num_cached`` prompt tokens came from the prefix cache."""

    request_id: int
    num_cached: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finished:
    """A request ended. ``error``: what failed, for reason ``error``. ``stop_token``: the end token that it met."""

    request_id: int
    reason: FinishReason
    error: str = ""
    stop_token: int | None = None
    pooled: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutputs:
    """What one committed step tells the outside; columns, so that steady decode costs no Python a request.

    ``request_ids`` int64 [n]; ``counts`` int32 [n]; ``tokens`` int32 [sum(counts)] in the same order.
    An end token that stopped a request is not among its tokens.
    """

    request_ids: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    started: tuple[Started, ...] = ()
    finished: tuple[Finished, ...] = ()
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
