"""A loop without a model: tokens are bytes, and a prompt says what becomes of it. Runs in the loop's process.

``SAY text``: the answer is ``text``, then the end token. ``REFUSE``, ``BADSUBMIT``: submit raises. ``ERROR``: the
request fails after two tokens. ``CRASH``: the process dies by SIGKILL at the next step. ``RAISE``: a step raises.
``HANG``: a step never ends. Pooling: the prompt's first three bytes, of length 1 if wanted; ``cls`` adds 1 to
each and ``mean`` 2. Anything else: letters that depend on the prompt, the seed and the sample, without end.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from drivetrain.config import EngineConfig
from drivetrain.errors import ModelError, RequestError
from drivetrain.params import Finished, GenerateRequest, Started, StepOutputs, TokenLogprobs

EOS = 256
VOCABULARY = 300
LETTERS = b"abcdefghijklmnopqrstuvwxyz "


@dataclass
class Running:
    request: GenerateRequest
    script: bytes | None
    tokens: list[int] = field(default_factory=list)


class FakeLoop:
    def __init__(self, options: dict[str, str]) -> None:
        self.rows = int(options.get("rows", "64"))
        self.nap = float(options.get("step_seconds", "0"))
        self.per_step = int(options.get("per_step", "1"))
        self.waiting: list[Running] = []
        self.running: dict[int, Running] = {}
        self.events: list[Finished] = []
        self.seen: set[bytes] = set()
        self.steps = 0
        self.closed = False

    def submit(self, request: GenerateRequest) -> None:
        prompt = bytes(request.prompt_ids.astype(np.uint8))
        if b"REFUSE" in prompt:
            raise RequestError("this prompt is refused by the loop", param="prompt", code="refused")
        if b"BADSUBMIT" in prompt:
            raise ValueError("a bug in submit")
        _, says, script = prompt.partition(b"SAY ")
        self.waiting.append(Running(request, script if says else None))

    def abort(self, request_id: int) -> None:
        queued = [one for one in self.waiting if one.request.request_id == request_id]
        self.waiting = [one for one in self.waiting if one not in queued]
        if self.running.pop(request_id, None) or queued:
            self.events.append(Finished(request_id=request_id, reason="abort"))

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.events)

    def step(self) -> tuple[StepOutputs, ...]:
        time.sleep(self.nap)
        self.steps += 1
        started, finished, self.events = [], self.events, []
        while self.waiting and len(self.running) < self.rows:
            one = self.waiting.pop(0)
            prompt = bytes(one.request.prompt_ids.astype(np.uint8))
            if b"CRASH" in prompt:
                os.kill(os.getpid(), signal.SIGKILL)
            if b"RAISE" in prompt:
                raise RuntimeError("the step broke")
            while b"HANG" in prompt:
                time.sleep(1)
            cached = len(prompt) - 1 if prompt in self.seen else 0
            self.seen.add(prompt)
            self.running[one.request.request_id] = one
            started.append(Started(request_id=one.request.request_id, num_cached=cached))
        ids, counts, tokens, logprobs = [], [], [], []
        for request_id, one in list(self.running.items()):
            fresh, end = self.draw(one)
            ids.append(request_id)
            counts.append(len(fresh))
            tokens += fresh
            if one.request.sampling.logprobs is not None:
                logprobs += [(request_id, report(token, one.request.sampling.logprobs)) for token in fresh]
            if end is not None:
                del self.running[request_id]
                finished.append(end)
        outputs = StepOutputs(
            request_ids=np.array(ids, np.int64),
            counts=np.array(counts, np.int32),
            tokens=np.array(tokens, np.int32),
            started=tuple(started),
            finished=tuple(finished),
            logprobs=tuple(logprobs),
        )
        return (outputs,)

    def draw(self, one: Running) -> tuple[list[int], Finished | None]:
        request, fresh = one.request, []
        if request.pooling is not None and b"ERROR" not in bytes(request.prompt_ids.astype(np.uint8)):
            return fresh, Finished(request_id=request.request_id, reason="stop", pooled=vector(request))
        for _ in range(self.per_step):
            at = len(one.tokens)
            if b"ERROR" in bytes(request.prompt_ids.astype(np.uint8)) and (at == 2 or request.pooling is not None):
                return fresh, Finished(request_id=request.request_id, reason="error", error="logits are not finite")
            token = self.token(one, at)
            if token == EOS and not request.sampling.ignore_eos:
                return fresh, Finished(request_id=request.request_id, reason="stop", stop_token=EOS)
            one.tokens.append(token)
            fresh.append(token)
            if at + 1 == request.max_tokens:
                return fresh, Finished(request_id=request.request_id, reason="length")
        return fresh, None

    def token(self, one: Running, at: int) -> int:
        if one.script is not None:
            return one.script[at] if at < len(one.script) else EOS
        request = one.request
        noise = request.seed * 31 + request.sample_index * 17 if request.sampling.temperature > 0 else 0
        return LETTERS[(int(request.prompt_ids.sum()) + noise + at * at) % len(LETTERS)]

    def stats(self) -> SimpleNamespace:
        used = sum(len(one.request.prompt_ids) + len(one.tokens) for one in self.running.values())
        return SimpleNamespace(
            waiting=len(self.waiting), running=len(self.running), cache_used=used, cache_total=100_000
        )

    def close(self) -> None:
        self.closed = True


def vector(request: GenerateRequest) -> np.ndarray:
    found = np.zeros(3, np.float32)
    found[: len(request.prompt_ids)] = request.prompt_ids[:3]
    found += {"last": 0, "cls": 1, "mean": 2}[request.pooling.kind]
    return found / np.linalg.norm(found) if request.pooling.normalize else found


def report(token: int, width: int) -> TokenLogprobs:
    """Alternatives that can be recomputed by a test: the ids below, each half a nat less likely."""
    ids = tuple(max(token - place, 0) for place in range(width))
    return TokenLogprobs(
        token=token, logprob=-0.25, rank=1, top_ids=ids, top_logprobs=tuple(-0.25 - place / 2 for place in range(width))
    )


def open_loop(config: EngineConfig, choice: object) -> SimpleNamespace:
    options = dict(config.backend_options)
    if options.get("fail") == "model":
        raise ModelError("the model is no model", fix="name another")
    if options.get("fail") == "exit":
        os._exit(7)
    time.sleep(float(options.get("open_seconds", "0")))
    return SimpleNamespace(
        loop=FakeLoop(options),
        max_model_len=config.max_model_len or 4096,
        vocabulary=VOCABULARY,
        dtype="float32",
        figures={"weights": 123.0},
    )
