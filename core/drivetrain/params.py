"""What a request asks for and what comes back: values without torch, shared by front end, loop and ``LLM``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from drivetrain.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 20
MAX_N = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Names and meanings follow the field's completion APIs.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``logprobs``: how many
    alternatives to report beside each chosen token (0: the chosen token's alone), None for no report.
    ``seed`` None: a seed is drawn at admission and kept. Out-of-range values raise RequestError naming the field.
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

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            _check_kind(name, getattr(self, name), kind)
        for name, entry in (("stop", str), ("stop_token_ids", int)):
            _check_entries(name, getattr(self, name), entry)
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
        )
        for name, ok, allowed in checks:
            if not ok:
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be {allowed}", param=name)


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
    even with prefix caching off. ``grammar``: key of a compiled automaton known to the loop.
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
