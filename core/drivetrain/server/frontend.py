"""Between HTTP and the loop: prompts become sequences, the loop's columns become text, an end here ends it there.

Everything runs on the event loop's thread, except for tokenizing and templates (``text.py``).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from drivetrain.errors import DrivetrainError, RequestError
from drivetrain.fanout import FanOut, Prompt, check_budget
from drivetrain.params import PoolingParams, SamplingParams, TokenLogprobs
from drivetrain.server.admission import UnavailableError
from drivetrain.server.assembly import Delta, TextAssembly
from drivetrain.server.child import LoopSpec
from drivetrain.server.messages import (
    Abort,
    Accepted,
    End,
    FromLoop,
    Outputs,
    Ready,
    Refused,
    Stats,
    submit_of,
)
from drivetrain.server.metrics import Metrics
from drivetrain.server.supervisor import Supervisor, Watch
from drivetrain.server.text import Text

RESTART_SECONDS = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """What one HTTP request asks of the loop. Choices are numbered prompt by prompt, ``sampling.n`` each.

    ``max_tokens`` None: up to the model's length. ``arrival``: on the monotonic clock. ``pooling``: vectors are wanted,
    no tokens; prompts have 1 token to the model's length.
    """

    prompts: tuple[np.ndarray, ...]
    sampling: SamplingParams
    max_tokens: int | None
    arrival: float
    cache_salt: str = ""
    priority: int = 0
    skip_special: bool = True
    pooling: PoolingParams | None = None


class Reply:
    """The answer of one job, as it comes. One reader."""

    def __init__(self, num_choices: int, prompt_tokens: int, arrival: float) -> None:
        self.prompt_tokens = prompt_tokens
        self.arrival = arrival
        self.sequences: dict[int, Sequence] = {}
        self.vectors: dict[int, np.ndarray] = {}  # by prompt; float32 [hidden]
        self.lost = False  # the loop went away under it
        self._open_choices = num_choices
        self._not_accepted = num_choices
        self._deltas: deque[Delta] = deque()
        self._wake = asyncio.Event()
        self._quiet = False  # the reader has waited for as long as it wanted to
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: DrivetrainError | None = None
        self._abandoned = False

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far; end tokens are not counted."""
        return sum(one.assembly.num_tokens for one in self.sequences.values())

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cached before; of equal prompts, what the first of them found."""
        least: dict[int, int] = {}
        for one in self.sequences.values():
            least[one.prompt] = min(one.num_cached, least.get(one.prompt, one.num_cached))
        return sum(least.values())

    @property
    def abandoned(self) -> bool:
        """Whether nobody reads any more."""
        return self._abandoned

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._abandoned or (self._open_choices == 0 and not self._deltas)

    def push(self, delta: Delta) -> None:
        """Add what became sendable."""
        self._deltas.append(delta)
        self._open_choices -= delta.finish is not None
        self._wake.set()

    def accept(self, count: int = 1) -> None:
        """Note that the loop took sequences."""
        self._not_accepted -= count
        self._wake.set()

    def refuse(self, error: DrivetrainError) -> None:
        """Note that the job can't be served."""
        self._refusal = self._refusal or error
        self._wake.set()

    def abandon(self) -> None:
        """Note that nobody reads on; a reader that waits is woken and finds ``done``."""
        self._abandoned = True
        self._wake.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def accepted(self) -> None:
        """Wait until the loop has taken the job. Raises why it was refused, or why there is no loop any more."""
        while self._not_accepted > 0 and self._refusal is None and not self._abandoned:
            self._wake.clear()
            await self._wake.wait()
        if self._refusal is not None:
            raise self._refusal

    async def next(self, timeout: float | None = None) -> list[Delta]:
        """Return all that came since, at least one delta; empty when done or after ``timeout`` seconds."""
        self._quiet = False
        while not (self._deltas or self._quiet or self.done):
            if timeout is not None:
                self._wait_until(timeout)
            self._wake.clear()
            await self._wake.wait()
        deltas = list(self._deltas)
        self._deltas.clear()
        return [] if self._abandoned else deltas

    def _wait_until(self, timeout: float) -> None:
        """Wake the reader after so many seconds from now: one timer for many waits, set anew if it comes too early."""
        loop = asyncio.get_running_loop()
        self._until = loop.time() + timeout
        if self._timer is None:
            self._timer = loop.call_later(timeout, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        left = self._until - loop.time()
        self._timer = loop.call_later(left, self._ring, loop) if left > 0 else None
        if self._timer is None:
            self._quiet = True
            self._wake.set()


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence in the loop, as the front end sees it. ``prompt``: index of its prompt in the job."""

    request_id: int
    prompt: int
    reply: Reply
    assembly: TextAssembly
    num_cached: int = 0


class FrontEnd:
    """Owns the loop's supervisor and every sequence in flight."""

    def __init__(
        self,
        spec: LoopSpec,
        metrics: Metrics,
        watch: Watch | None = None,
    ) -> None:
        self.metrics = metrics
        self.supervisor = Supervisor(spec, watch or Watch(), on_message=self._hear, on_lost=self._lost)
        self.text: Text | None = None
        self._held: dict[int, Sequence] = {}
        self._fan_out = FanOut(spec.config.seed)

    @property
    def num_held(self) -> int:
        """Sequences that the loop has and that have not ended."""
        return len(self._held)

    @property
    def model(self) -> Ready:
        """What the loop said about the model. UnavailableError before it ever said anything."""
        if self.supervisor.ready is None:
            raise self._unavailable()
        return self.supervisor.ready

    @property
    def awake(self) -> bool:
        """Whether requests are taken and the loop has answered lately."""
        return self.supervisor.state == "ready" and self.text is not None and not self.supervisor.silent_seconds

    def check_awake(self) -> None:
        """UnavailableError while no loop takes requests, or the one that does has not answered for long."""
        self.check_ready()
        if silent := self.supervisor.silent_seconds:
            raise self._unavailable(f"the loop has not answered for {silent:.0f} s")

    def check_ready(self) -> Text:
        """Return the tokenizer's side. UnavailableError while no loop takes requests."""
        if self.supervisor.state != "ready" or self.text is None:
            raise self._unavailable()
        return self.text

    def _unavailable(self, why: str = "") -> UnavailableError:
        why = why or self.supervisor.why or "the tokenizer is being loaded"
        return UnavailableError(why, retry_after=RESTART_SECONDS, fix=f"try again in {RESTART_SECONDS} s")

    async def submit(self, job: Job) -> Reply:
        """Hand a job to the loop; returns when the loop has taken it.

        RequestError when the job can't be served, UnavailableError when there is no loop.
        """
        text = self.check_ready()
        longest = self.model.max_model_len + (job.pooling is not None)  # a vector needs no room behind its prompt
        budgets = [check_budget(longest, len(prompt), job.max_tokens) for prompt in job.prompts]
        sampling = job.sampling
        bad_words = text.words(sampling.bad_words) if sampling.bad_words else ()
        reply = Reply(len(job.prompts) * sampling.n, sum(map(len, job.prompts)), job.arrival)
        for place, (prompt, budget) in enumerate(zip(job.prompts, budgets, strict=True)):
            entry = Prompt(
                ids=prompt,
                eos_ids=text.eos_ids,
                arrival=job.arrival,
                priority=job.priority,
                cache_salt=job.cache_salt,
                bad_words=bad_words,
            )
            for request in self._fan_out.requests(entry, sampling, budget):
                assembly = TextAssembly(
                    place * sampling.n + request.sample_index,
                    text.detokenizer(prompt, skip_special=job.skip_special),
                    text.stops(sampling.stop, include=sampling.include_stop_str_in_output) if sampling.stop else None,
                    logprobs=sampling.logprobs is not None,
                    min_tokens=sampling.min_tokens,
                )
                sequence = Sequence(request.request_id, place, reply, assembly)
                reply.sequences[request.request_id] = self._held[request.request_id] = sequence
                self.supervisor.send(submit_of(replace(request, pooling=job.pooling) if job.pooling else request))
        try:
            await reply.accepted()
        except BaseException:
            self.abandon(reply)
            raise
        self.metrics.prompt_tokens.inc(reply.prompt_tokens)
        return reply

    def abandon(self, reply: Reply) -> None:
        """End what a job still has in the loop: its client is gone, or one of its choices failed."""
        mine = [one for one in reply.sequences if self._held.pop(one, None) is not None]
        if mine:
            self.supervisor.send(Abort(tuple(mine)))
            self.metrics.finished.labels("abort").inc(len(mine))
        reply.abandon()

    async def close(self) -> None:
        """End the loop's process."""
        await self.supervisor.stop()
        self.end_all()

    def end_all(self) -> None:
        """End what still runs: its clients are told that the server is stopping."""
        self._end_all("the server is stopping")

    def _hear(self, message: FromLoop) -> None:
        if isinstance(message, Outputs):
            self._take_outputs(message)
        elif isinstance(message, Stats):
            self.metrics.take_stats(message)
        elif isinstance(message, Accepted):
            for request_id in message.request_ids:
                if sequence := self._held.get(request_id):
                    sequence.reply.accept()
        elif isinstance(message, Refused) and (sequence := self._held.pop(message.request_id, None)):
            error = RequestError(message.message, param=message.param, code=message.code)
            sequence.reply.refuse(error if message.client_fault else DrivetrainError(message.message))

    def _take_outputs(self, outputs: Outputs) -> None:
        """Turn one step's columns into deltas; sequences whose stop string matched are aborted together."""
        for request_id, num_cached in outputs.started:
            if sequence := self._held.get(request_id):
                sequence.num_cached = num_cached
                self.metrics.cached_tokens.inc(num_cached)
        reports: dict[int, list[TokenLogprobs]] = {}
        for request_id, report in outputs.logprobs:
            reports.setdefault(request_id, []).append(report)
        tokens = np.frombuffer(outputs.tokens, np.int32).tolist()
        ids = np.frombuffer(outputs.request_ids, np.int64).tolist()
        counts = np.frombuffer(outputs.counts, np.int32).tolist()
        stopped: list[int] = []
        end = taken = 0
        for request_id, count in zip(ids, counts, strict=True):
            begin, end = end, end + count
            sequence = self._held.get(request_id)
            if sequence is None or not count:
                continue
            before = sequence.assembly.num_tokens
            if self._take_tokens(sequence, tokens[begin:end], reports.get(request_id, [])):
                stopped.append(request_id)
            taken += sequence.assembly.num_tokens - before
        if taken:
            self.metrics.generated_tokens.inc(taken)
        if stopped:
            self.supervisor.send(Abort(tuple(stopped)))
        for one in outputs.finished:
            self._finish(one)

    def _take_tokens(self, sequence: Sequence, tokens: list[int], reports: list[TokenLogprobs]) -> bool:
        """Give a sequence its tokens. Returns whether a stop string ended it."""
        assembly, reply = sequence.assembly, sequence.reply
        if not assembly.num_tokens and reply.arrival and reply.completion_tokens == 0:
            self.metrics.time_to_first_token.observe(time.monotonic() - reply.arrival)
        delta = assembly.take(tokens, reports)
        if delta is not None:
            reply.push(delta)
        if not assembly.finished:
            return False
        del self._held[sequence.request_id]
        self.metrics.finished.labels("stop").inc()
        return True

    def _finish(self, end: End) -> None:
        sequence = self._held.pop(end.request_id, None)
        if sequence is not None:
            if end.pooled is not None:
                sequence.reply.vectors[sequence.prompt] = end.pooled.numpy()
            delta = sequence.assembly.finish(end.reason, end.error)
            self.metrics.finished.labels(delta.finish).inc()
            sequence.reply.push(delta)

    def _lost(self, why: str) -> None:
        self.metrics.restarts.inc()
        self._end_all(why)

    def _end_all(self, why: str) -> None:
        """End everything that the lost loop held, each with the reason; its gauges are 0."""
        held, self._held = list(self._held.values()), {}
        for sequence in held:
            reply = sequence.reply
            reply.lost = True
            reply.refuse(UnavailableError(f"the request was lost: {why}", retry_after=RESTART_SECONDS))
            reply.push(sequence.assembly.finish("error", f"the request was lost: {why}"))
            self.metrics.finished.labels("error").inc()
        self.metrics.take_stats(Stats())
