"""Inline loops over real backends, and what a test may ask of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from drivetrain.config import EngineConfig
from drivetrain.launch import Opened, Parts, open_loop, resolve_device
from drivetrain.params import Finished, GenerateRequest, PoolingParams, SamplingParams
from drivetrain.sched.grammar import GrammarSession
from drivetrain.select.choose import Choice

GREEDY = SamplingParams(temperature=0.0)


@cache
def choice_of(device: str, options: tuple[tuple[str, str], ...] = ()) -> Choice:
    return resolve_device(EngineConfig(model="none", device=device, backend_options=dict(options)))


@dataclass
class Done:
    """What a request produced."""

    tokens: list[int] = field(default_factory=list)
    end: Finished | None = None
    num_cached: int = 0
    first_step: int = -1
    logprobs: list = field(default_factory=list)


class Served:
    """One model on one device. ``run`` drives the loop until every request has ended."""

    def __init__(self, model: Path | str, device: str, parts: Parts | None = None, **settings: object) -> None:
        values = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        values |= {"cache_bytes": 4 << 20, **settings}
        config = EngineConfig(model=str(model), device=device, **values)
        choice = choice_of(device, tuple(sorted(config.backend_options.items())))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.opened: Opened = open_loop(config, choice, parts or Parts())
        self.loop = self.opened.loop
        self.next = 0
        self.open: dict[int, Done] = {}

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        sampling: SamplingParams = GREEDY,
        grammar: GrammarSession | None = None,
        seed: int = 0,
        **fields: object,
    ) -> int:
        number, self.next = self.next, self.next + 1
        self.open[number] = Done()
        request = GenerateRequest(
            request_id=number,
            prompt_ids=np.array(prompt, np.int32),
            sampling=sampling,
            max_tokens=max_tokens,
            seed=seed,
            **fields,
        )
        self.loop.submit(request, grammar)
        return number

    def step(self) -> None:
        for outputs in self.loop.step():
            at = 0
            for number, count in zip(outputs.request_ids.tolist(), outputs.counts.tolist(), strict=True):
                done = self.open[number]
                if count and done.first_step < 0:
                    done.first_step = self.loop.steps
                done.tokens += outputs.tokens[at : at + count].tolist()
                at += count
            for start in outputs.started:
                self.open[start.request_id].num_cached = start.num_cached
            for number, line in outputs.logprobs:
                self.open[number].logprobs.append(line)
            for end in outputs.finished:
                self.open[end.request_id].end = end

    def run(self, between: Callable[[int], None] | None = None, limit: int = 5000) -> None:
        """Step until nothing is left; ``between`` is called before each step with its number."""
        for count in range(limit):
            if not self.loop.has_work():
                break
            if between is not None:
                between(count)
            self.step()
        assert not self.loop.has_work(), "the loop did not come to its end"
        self.loop.check_integrity()
        stats = self.loop.stats()
        assert (stats.waiting, stats.running, stats.cache_used, stats.pinned) == (0, 0, 0, 0)
        for number, done in self.open.items():
            assert done.end is not None, f"request {number} was forgotten"
            assert done.end.reason != "error", done.end.error

    def greedy(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        numbers = [self.submit(prompt, max_tokens) for prompt in prompts]
        self.run()
        return [self.open[number].tokens for number in numbers]

    def pooled(self, prompt: Sequence[int], kind: str) -> np.ndarray:
        number = self.submit(prompt, 1, pooling=PoolingParams(kind=kind, normalize=False))
        self.run()
        return self.open[number].end.pooled

    def close(self) -> None:
        self.loop.close()
