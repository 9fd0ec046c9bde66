"""The two completion routes: from a checked body to a job, and the job's reply to an answer or a stream."""

from __future__ import annotations

import numpy as np

from drivetrain.params import SamplingParams
from drivetrain.server.assembly import Delta
from drivetrain.server.bodies import read_body, require_good, require_template, token_ids
from drivetrain.server.exchange import Exchange
from drivetrain.server.frontend import FrontEnd, Job, Reply
from drivetrain.server.openai import ChatRequest, CompletionRequest, Sampling
from drivetrain.server.replies import ChatForm, Choice, CompletionForm, Form, Wanted
from drivetrain.server.text import Text, TextPool


class Completions:
    """Handles the completion routes for one served model."""

    def __init__(self, front: FrontEnd, pool: TextPool, model: str, ping_seconds: float) -> None:
        self._front = front
        self._model = model
        self._pool = pool
        self._ping_seconds = ping_seconds

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        request = await read_body(exchange, ChatRequest, self._model)
        sampling, messages, options = request.checked(), request.conversation(), request.template_options()
        tokens = request.tokens()
        text = self._front.check_ready()
        require_template(text, self._model)
        prompt = await self._pool.run(text.chat, messages, options)
        form = ChatForm(self._model, text.token_bytes, wanted(request, sampling))
        await self._answer(exchange, request, self._job(exchange, request, (prompt,), sampling, tokens), form)

    async def complete(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        request = await read_body(exchange, CompletionRequest, self._model)
        sampling, asked, tokens = request.checked(), request.prompts(), request.tokens()
        text = self._front.check_ready()
        prompts = [await self._prompt(text, request, one) for one in asked]
        echoes = [""] * len(prompts)
        if request.echo:
            echoes = [one if isinstance(one, str) else text.decode(one) for one in asked]
        form = CompletionForm(self._model, text.token_bytes, wanted(request, sampling), echoes=echoes, n=sampling.n)
        job = self._job(exchange, request, tuple(prompts), sampling, tokens)
        if tokens == 0:
            await self._echo_only(exchange, request, job, form)
        else:
            await self._answer(exchange, request, job, form)

    async def _prompt(self, text: Text, request: CompletionRequest, prompt: str | list[int]) -> np.ndarray:
        if isinstance(prompt, str):
            return await self._pool.run(text.encode, prompt, request.add_special_tokens is not False)
        return token_ids(prompt, self._front.model.vocabulary, "prompt")

    def _job(
        self,
        exchange: Exchange,
        request: Sampling,
        prompts: tuple[np.ndarray, ...],
        sampling: SamplingParams,
        tokens: int | None,
    ) -> Job:
        return Job(
            prompts=prompts,
            sampling=sampling,
            max_tokens=tokens,
            arrival=exchange.arrival,
            cache_salt=request.cache_salt or "",
            priority=request.priority or 0,
            skip_special=request.skip_special_tokens is not False,
        )

    async def _echo_only(self, exchange: Exchange, request: Sampling, job: Job, form: Form) -> None:
        """Answer a request for no tokens: the prompt itself."""
        num_choices = len(job.prompts) * job.sampling.n
        reply = Reply(num_choices, sum(map(len, job.prompts)), job.arrival)
        for index in range(num_choices):
            reply.push(Delta(index=index, finish="length"))
        await self._write(exchange, request, reply, form, num_choices)

    async def _answer(self, exchange: Exchange, request: Sampling, job: Job, form: Form) -> None:
        """Run a job for as long as its client is there."""
        gone: list[bool] = []
        replies: list[Reply] = []

        def leave() -> None:
            gone.append(True)
            for one in replies:
                self._front.abandon(one)

        async with exchange.watched(leave):
            reply = await self._front.submit(job)
            replies.append(reply)
            try:
                if not gone:
                    await self._write(exchange, request, reply, form, len(job.prompts) * job.sampling.n)
            finally:
                self._front.abandon(reply)

    async def _write(self, exchange: Exchange, request: Sampling, reply: Reply, form: Form, num_choices: int) -> None:
        if request.stream:
            await self._stream(exchange, request, reply, form, num_choices)
            return
        choices = [Choice() for _ in range(num_choices)]
        while not reply.done:
            for delta in await reply.next():
                require_good(delta, reply)
                choices[delta.index].add(delta)
        if not reply.abandoned:
            await exchange.answer(200, form.whole(choices, reply))

    async def _stream(self, exchange: Exchange, request: Sampling, reply: Reply, form: Form, num_choices: int) -> None:
        await exchange.begin_stream()
        openings = [one for index in range(num_choices) if (one := form.opening(index)) is not None]
        if openings:
            await exchange.event(*openings)
        while not reply.done:
            deltas = await reply.next(self._ping_seconds)
            for delta in deltas:
                require_good(delta, reply)
            if deltas:
                await exchange.event(*map(form.chunk, deltas))
            elif not reply.done:
                await exchange.ping()
        if reply.abandoned:
            return
        if request.include_usage:
            await exchange.event(form.closing(reply))
        await exchange.event(b"[DONE]")
        await exchange.end()


def wanted(request: Sampling, sampling: SamplingParams) -> Wanted:
    """Return what a request wants to be told beside the text."""
    return Wanted(
        logprobs=sampling.logprobs is not None,
        usage=request.include_usage,
        token_ids=bool(request.return_token_ids),
    )
