"""Requests whose logits are changed before a draw: what makes one impossible, and what its slot is told."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from drivetrain.errors import RequestError
from drivetrain.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_HELD, GenerateRequest
from drivetrain.sched.plan import AdjustStart
from drivetrain.sched.request import Request, stop_ids
from drivetrain.sched.state import SchedulerState


def check_adjusts(asked: GenerateRequest, slots: int, vocabulary: int) -> None:
    """RequestError naming what can't be done."""
    sampling = asked.sampling
    if not slots:
        raise RequestError(
            "penalties, logit_bias, bad_words and min_tokens are off",
            fix="start with --max-adjusted-seqs 1 or more",
            param="sampling",
        )
    if sampling.min_tokens > asked.max_tokens:
        what = f"min_tokens is {sampling.min_tokens}; at most {asked.max_tokens} tokens are generated"
        raise RequestError(what, param="min_tokens")
    if sampling.min_tokens and len(stop_ids(asked)) > MAX_HELD:
        what = f"min_tokens goes with at most {MAX_HELD} end and stop tokens; there are {len(stop_ids(asked))}"
        raise RequestError(what, param="stop_token_ids")
    words = bad_words(asked)
    if len(words) > MAX_BAD_WORDS or any(len(word) > MAX_BAD_WORD_TOKENS for word in words):
        what = f"at most {MAX_BAD_WORDS} token sequences of up to {MAX_BAD_WORD_TOKENS} tokens"
        raise RequestError(f"bad_words become {len(words)} token sequences; {what} are taken", param="bad_words")
    _check_ids("logit_bias", (token for token, _ in sampling.logit_bias), vocabulary)
    _check_ids("bad_words", (token for word in words for token in word), vocabulary)


def _check_ids(name: str, ids: Iterable[int], vocabulary: int) -> None:
    wrong = next((one for one in ids if vocabulary and one >= vocabulary), None)
    if wrong is not None:
        raise RequestError(f"{name} names token {wrong}; ids are 0 to {vocabulary - 1}", param=name)


def bad_words(asked: GenerateRequest) -> tuple[tuple[int, ...], ...]:
    """Return all token sequences that must not appear, each once."""
    return tuple(dict.fromkeys((*asked.bad_words, *map(tuple, asked.sampling.bad_word_ids))))


def adjust_start(state: SchedulerState, request: Request) -> AdjustStart | None:
    """Return what the slot of a request that starts is told; None where it has none."""
    slot = int(state.table.slot[request.row])
    if slot < 0:
        return None
    asked, sampling = request.asked, request.asked.sampling
    return AdjustStart(
        slot=slot,
        tokens=_known(request),
        prompt=request.num_prompt if asked.embeds is None else 0,
        prompt_end=request.num_prompt,
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        bias=tuple(sampling.logit_bias),
        held=tuple(dict.fromkeys(stop_ids(asked))) if sampling.min_tokens else (),
        first_stop=request.num_prompt + sampling.min_tokens,
        bad_words=bad_words(asked),
    )


def _known(request: Request) -> np.ndarray:
    """Prompt and output; of a prompt of embeddings, whose ids stand for nothing, the output alone."""
    return request.tokens if request.asked.embeds is None else request.tokens[request.num_prompt :]
