"""Drives a loop for callers that wait: prompts in, completions out, or one prompt's text as it comes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import RLock
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
    """One sequence in the loop. ``prompt``: which of its call's prompts; ``index``: which of its samples.

    ``ready``: what became final and its call has not taken yet. ``vector``: of a sequence that pools, once it ended.
    """

    prompt: int
    index: int
    assembly: TextAssembly | None
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int = 0
    last: Delta | None = None
    end: Finished | None = None
    done: bool = False
    ready: deque[Delta] = field(default_factory=deque)

    def take(self, delta: Delta | None) -> None:
        """Keep what became final."""
        if delta is not None:
            self.text.append(delta.text)
            self.logprobs.extend(report for _, report in delta.logprobs)
            self.last = delta if delta.finish else None
            self.ready.append(delta)

    def completion(self, *, logprobs: bool) -> Completion:
        """Return the finished sample."""
        assert self.assembly is not None and self.last is not None and self.last.finish is not None, "it has ended"
        return Completion(
            index=self.index,
            text="".join(self.text),
            token_ids=tuple(self.tokens[: self.assembly.num_tokens]),
            finish_reason=self.last.finish,
            logprobs=tuple(self.logprobs) if logprobs else None,
            error=self.last.error,
        )


def okay(request: GenerateRequest) -> None:
    """Nothing to check."""


class Completer:
    """Runs calls over a loop. ``longest``: prompt plus output, in tokens.

    Calls may overlap: a stream that is read now and then, a call amid it, calls from several threads. Whoever steps
    the loop hands every call's outputs to it; a lock lets one at a time do so.
    """

    def __init__(
        self,
        loop: StepLoop,
        text: Text,
        *,
        longest: int,
        seed: int = 0,
        check: Callable[[GenerateRequest], None] = okay,
    ) -> None:
        """``check``: raises RequestError for a request that the loop would refuse later."""
        self._check = check
        self._loop = loop
        self._text = text
        self._longest = longest
        self._fan_out = FanOut(seed)
        self._running: dict[int, Running] = {}
        self._lock = RLock()
        self._closed = False

    def close(self) -> None:
        """Refuse all further calls, and the rest of streams that are under way."""
        with self._lock:
            self._closed = True
            self._running.clear()

    def require_open(self) -> None:
        """Raise DrivetrainError once it is closed."""
        if self._closed:
            raise DrivetrainError("this LLM is closed", fix="open another; streams end with the LLM they came from")

    def complete(self, prompts: Sequence[np.ndarray], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Complete all prompts together. RequestError for one that is too long, before any runs."""
        with self._submitted(prompts, params) as everyone:
            while not all(one.done for one in everyone):
                self._step(everyone)
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
        with self._submitted([prompt], [params]) as everyone:
            while True:
                for one in everyone:
                    while one.ready:
                        delta = one.ready.popleft()
                        if delta.finish == "error":
                            raise DrivetrainError(delta.error)
                        yield delta
                if all(one.done and not one.ready for one in everyone):
                    return
                self._step(everyone)

    def pool(self, prompts: Sequence[np.ndarray], pooling: PoolingParams) -> list[np.ndarray]:
        """Return one float32 [hidden] a prompt. DrivetrainError naming the first prompt that failed."""
        for prompt in prompts:
            check_budget(self._longest, len(prompt), 1)
        with self._entered() as submit:
            for place, prompt in enumerate(prompts):
                (request,) = self._fan_out.requests(self._prompt(prompt), SamplingParams(temperature=0.0), 1)
                submit(replace(request, pooling=pooling), Running(place, 0, None))
            everyone = submit.mine
            while not all(one.done for one in everyone):
                self._step(everyone)
        return [_vector(one.end, place) for place, one in enumerate(everyone)]

    def _prompt(self, ids: np.ndarray) -> Prompt:
        return Prompt(ids=ids, eos_ids=self._text.eos_ids, arrival=time.monotonic())

    @contextmanager
    def _submitted(self, prompts: Sequence[np.ndarray], params: Sequence[SamplingParams]) -> Iterator[list[Running]]:
        """Submit everything; on the way out end what still runs."""
        budgets = [
            check_budget(self._longest, len(prompt), one.max_tokens)
            for prompt, one in zip(prompts, params, strict=True)
        ]
        with self._entered() as submit:
            for place, (ids, one, budget) in enumerate(zip(prompts, params, budgets, strict=True)):
                entry = replace(self._prompt(ids), bad_words=self._text.words(one.bad_words) if one.bad_words else ())
                for request in self._fan_out.requests(entry, one, budget):
                    self._check(request)
                    submit(request, Running(place, request.sample_index, self._assembly(request, one)))
            yield submit.mine

    @contextmanager
    def _entered(self) -> Iterator[Submit]:
        """What submits a call's requests; on the way out those that still run end."""
        self.require_open()
        submit = Submit(self._loop, self._running, self._lock)
        try:
            yield submit
        finally:
            submit.end()

    def _assembly(self, request: GenerateRequest, params: SamplingParams) -> TextAssembly:
        stops = self._text.stops(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        return TextAssembly(
            request.sample_index,
            self._text.detokenizer(request.prompt_ids, skip_special=True),
            stops,
            logprobs=params.logprobs is not None,
            min_tokens=params.min_tokens,
        )

    def _step(self, mine: Sequence[Running]) -> None:
        """Run one step for all calls, unless another thread has just brought what this call waits for."""
        with self._lock:
            self.require_open()
            if all(one.done for one in mine):
                return
            for outputs in self._loop.step():
                self._hand_out(outputs)

    def _hand_out(self, outputs: StepOutputs) -> None:
        """Give a step's outputs to the sequences they belong to; those that end leave the running ones."""
        running = self._running
        for start in outputs.started:
            if one := running.get(start.request_id):
                one.num_cached = start.num_cached
        reports: dict[int, list[TokenLogprobs]] = {}
        for request_id, report in outputs.logprobs:
            reports.setdefault(request_id, []).append(report)
        tokens, end = outputs.tokens.tolist(), 0
        for request_id, count in zip(outputs.request_ids.tolist(), outputs.counts.tolist(), strict=True):
            begin, end = end, end + count
            if (one := running.get(request_id)) and count and one.assembly is not None:
                one.tokens.extend(tokens[begin:end])
                one.take(one.assembly.take(tokens[begin:end], reports.get(request_id, ())))
                if one.assembly.finished:
                    del running[request_id]
                    one.done = True
                    self._loop.abort(request_id)
        for finished in outputs.finished:
            if one := running.pop(finished.request_id, None):
                if one.assembly is not None:
                    one.take(one.assembly.finish(finished.reason, finished.error))
                one.end, one.done = finished, True


class Submit:
    """Submits one call's requests and ends them. ``mine``: the call's sequences in order of submission."""

    def __init__(self, loop: StepLoop, running: dict[int, Running], lock: RLock) -> None:
        self.mine: list[Running] = []
        self._loop, self._running, self._lock = loop, running, lock
        self._ids: list[int] = []

    def __call__(self, request: GenerateRequest, one: Running) -> None:
        """Submit one. RequestError when it can never be served."""
        with self._lock:
            self._loop.submit(request)
            self._running[request.request_id] = one
        self.mine.append(one)
        self._ids.append(request.request_id)

    def end(self) -> None:
        """Abort what still runs."""
        with self._lock:
            for request_id in self._ids:
                if self._running.pop(request_id, None) is not None:
                    self._loop.abort(request_id)


def _vector(end: Finished | None, place: int) -> np.ndarray:
    assert end is not None, "it has ended"
    if end.pooled is None:
        raise DrivetrainError(f"prompt {place} gave no vector: {end.error or end.reason}")
    return end.pooled
