"""From a prompt and its parameters to the requests that enter a loop: length checks, seeds, one request a sample."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from drivetrain.errors import RequestError
from drivetrain.params import GenerateRequest, SamplingParams

UINT64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One prompt to complete. ``ids``: int32 [num_prompt]; ``arrival``: on the monotonic clock; ``bad_words``: the
    token sequences of the parameters' texts."""

    ids: np.ndarray
    eos_ids: tuple[int, ...]
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()


def check_budget(longest: int, length: int, asked: int | None) -> int:
    """Return how many tokens may follow a prompt of ``length`` where the model holds ``longest`` in all.

    RequestError (``context_length_exceeded``) when the prompt, or the prompt with what was asked for, is too long.
    """
    if length == 0:
        raise RequestError("the prompt has no tokens", fix="give at least one token", param="prompt")
    room = longest - length
    if room < 1 or (asked is not None and asked > room):
        wants = "at least one" if asked is None else str(asked)
        raise RequestError(
            f"this model's context is {longest} tokens; the prompt has {length} and {wants} more are asked for",
            fix="shorten the prompt or lower max_tokens",
            param="max_tokens" if room > 0 else "prompt",
            code="context_length_exceeded",
        )
    return room if asked is None else asked


class FanOut:
    """Numbers requests and draws the seeds of those that bring none. Owned by one thread."""

    def __init__(self, seed: int) -> None:
        self._ids = itertools.count(1)
        self._draw = random.Random(seed)

    def requests(self, prompt: Prompt, sampling: SamplingParams, max_tokens: int) -> Iterator[GenerateRequest]:
        """Yield ``sampling.n`` requests of one prompt. They share its seed: the sample's index keeps draws apart.

        Stop strings are text's business and do not travel.
        """
        seed = self._draw.getrandbits(64) if sampling.seed is None else sampling.seed & UINT64
        first = next(self._ids)
        for sample in range(sampling.n):
            yield GenerateRequest(
                request_id=first if sample == 0 else next(self._ids),
                prompt_ids=prompt.ids,
                sampling=replace(sampling, n=1, stop=(), max_tokens=max_tokens),
                max_tokens=max_tokens,
                seed=seed,
                eos_ids=prompt.eos_ids,
                arrival=prompt.arrival,
                priority=prompt.priority,
                sample_index=sample,
                fanout=first if sampling.n > 1 else None,
                cache_salt=prompt.cache_salt,
                bad_words=prompt.bad_words,
            )
