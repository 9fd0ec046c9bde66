"""Drives a loop for callers that wait: prompts in, completions out, or one prompt's text as it comes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from drivetrain.errors import DrivetrainError
from drivetrain.fanout import FanOut, Prompt, check_budget
from drivetrain.params import (
    Finished,
    FinishReason,
    GenerateRequest,
    PoolingParams,
    SamplingParams,
    StepOutputs,
    TokenLogprobs,
)
from drivetrain.server.assembly import Delta, TextAssembly
from drivetrain.server.text import Text


class StepLoop(Protocol):
    """What is driven: ``drivetrain.loop.Loop``, or ``RemoteLoop`` over one in its own process."""

    def submit(self, request: GenerateRequest) -> None: ...
    def abort(self, request_id: int) -> None: ...
    def step(self) -> tuple[StepOutputs, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sample. ``token_ids``: without the end token. ``logprobs``: one a token where asked for, else None.

    ``finish_reason`` ``error``: the sequence failed alone; ``error`` says why and what came before it stands.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt. ``num_cached``: its tokens that were cached before the first sample began."""

    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    num_cached: int


@dataclass(slots=True, eq=False)
class Running:
    """One sequence in the loop. ``prompt``: which of the call's prompts; ``index``: which of its samples."""

    prompt: int
    index: int
    assembly: TextAssembly
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int = 0
    last: Delta | None = None

    def take(self, delta: Delta | None) -> None:
        """Keep what became final."""
        if delta is not None:
            self.text.append(delta.text)
            self.logprobs.extend(report for _, report in delta.logprobs)
            self.last = delta if delta.finish else None

    def completion(self, *, logprobs: bool) -> Completion:
        """Return the finished sample."""
        assert self.last is not None and self.last.finish is not None, "the sequence has ended"
        return Completion(
            index=self.index,
            text="".join(self.text),
            token_ids=tuple(self.tokens[: self.assembly.num_tokens]),
            finish_reason=self.last.finish,
            logprobs=tuple(self.logprobs) if logprobs else None,
            error=self.last.error,
        )


class Completer:
    """Runs one call at a time over a loop. One thread owns it. ``longest``: prompt plus output, in tokens."""

    def __init__(self, loop: StepLoop, text: Text, *, longest: int, seed: int = 0) -> None:
        self._loop = loop
        self._text = text
        self._longest = longest
        self._fan_out = FanOut(seed)

    def complete(self, prompts: Sequence[np.ndarray], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Complete all prompts together. RequestError for one that is too long, before any runs."""
        with self._submitted(prompts, params) as running:
            everyone = list(running.values())
            while running:
                for _ in self._step(running):
                    pass
        outputs = []
        for place, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            mine = sorted((s for s in everyone if s.prompt == place), key=lambda s: s.index)
            outputs.append(
                RequestOutput(
                    prompt_ids=tuple(prompt.tolist()),
                    completions=tuple(s.completion(logprobs=one.logprobs is not None) for s in mine),
                    num_cached=min(s.num_cached for s in mine),
                )
            )
        return outputs

    def stream(self, prompt: np.ndarray, params: SamplingParams) -> Iterator[Delta]:
        """Yield what becomes final of one prompt's samples; leaving early ends them. DrivetrainError when one fails."""
        with self._submitted([prompt], [params]) as running:
            while running:
                for delta in self._step(running):
                    if delta.finish == "error":
                        raise DrivetrainError(delta.error)
                    yield delta

    def pool(self, prompts: Sequence[np.ndarray], pooling: PoolingParams) -> list[np.ndarray]:
        """Return one float32 [hidden] a prompt. DrivetrainError naming the first prompt that failed."""
        places: dict[int, int] = {}
        vectors: dict[int, np.ndarray] = {}
        for place, prompt in enumerate(prompts):
            check_budget(self._longest, len(prompt), 1)
            (request,) = self._fan_out.requests(self._prompt(prompt), SamplingParams(temperature=0.0), 1)
            self._loop.submit(replace(request, pooling=pooling))
            places[request.request_id] = place
        try:
            while places:
                for outputs in self._loop.step():
                    for end in outputs.finished:
                        if (place := places.pop(end.request_id, -1)) >= 0:
                            vectors[place] = _vector(end, place)
        finally:
            for request_id in places:
                self._loop.abort(request_id)
        return [vectors[place] for place in range(len(prompts))]

    def _prompt(self, ids: np.ndarray) -> Prompt:
        return Prompt(ids=ids, eos_ids=self._text.eos_ids, arrival=time.monotonic())

    @contextmanager
    def _submitted(
        self, prompts: Sequence[np.ndarray], params: Sequence[SamplingParams]
    ) -> Iterator[dict[int, Running]]:
        """Submit everything; on the way out end what still runs. The dict loses sequences as they end."""
        budgets = [
            check_budget(self._longest, len(prompt), one.max_tokens)
            for prompt, one in zip(prompts, params, strict=True)
        ]
        running: dict[int, Running] = {}
        try:
            for place, (ids, one, budget) in enumerate(zip(prompts, params, budgets, strict=True)):
                for request in self._fan_out.requests(self._prompt(ids), one, budget):
                    self._loop.submit(request)
                    running[request.request_id] = Running(place, request.sample_index, self._assembly(request, one))
            yield running
        finally:
            for request_id in running:
                self._loop.abort(request_id)

    def _assembly(self, request: GenerateRequest, params: SamplingParams) -> TextAssembly:
        stops = self._text.stops(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        return TextAssembly(
            request.sample_index,
            self._text.detokenizer(request.prompt_ids, skip_special=True),
            stops,
            logprobs=params.logprobs is not None,
        )

    def _step(self, running: dict[int, Running]) -> Iterator[Delta]:
        """Run one step; sequences that end leave ``running``. Yields what became final."""
        for outputs in self._loop.step():
            for start in outputs.started:
                if one := running.get(start.request_id):
                    one.num_cached = start.num_cached
            reports: dict[int, list[TokenLogprobs]] = {}
            for request_id, report in outputs.logprobs:
                reports.setdefault(request_id, []).append(report)
            tokens, end = outputs.tokens.tolist(), 0
            for request_id, count in zip(outputs.request_ids.tolist(), outputs.counts.tolist(), strict=True):
                begin, end = end, end + count
                if (one := running.get(request_id)) and count:
                    one.tokens.extend(tokens[begin:end])
                    delta = one.assembly.take(tokens[begin:end], reports.get(request_id, ()))
                    one.take(delta)
                    if one.assembly.finished:
                        del running[request_id]
                        self._loop.abort(request_id)
                    if delta is not None:
                        yield delta
            for finished in outputs.finished:
                if one := running.pop(finished.request_id, None):
                    delta = one.assembly.finish(finished.reason, finished.error)
                    one.take(delta)
                    yield delta


def _vector(end: Finished, place: int) -> np.ndarray:
    if end.pooled is None:
        raise DrivetrainError(f"prompt {place} gave no vector: {end.error or end.reason}")
    return end.pooled
