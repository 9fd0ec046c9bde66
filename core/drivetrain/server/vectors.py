"""Texts to vectors: one job of pooled sequences, for the routes that embed, score and rerank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from drivetrain.errors import ModelError, RequestError
from drivetrain.models.sentence import Sentence
from drivetrain.params import PoolingParams, SamplingParams
from drivetrain.server.bodies import require_good, token_ids
from drivetrain.server.exchange import Exchange
from drivetrain.server.failures import ClientGoneError, invalid
from drivetrain.server.frontend import FrontEnd, Job, Reply
from drivetrain.server.text import Text, TextPool

MAX_INPUTS = 2048
MAX_CHARACTERS = 4 << 20  # of all inputs of one request

Input = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be embedded. ``names``: of each input, for errors. ``normalize`` None: as the model says."""

    inputs: Sequence[Input]
    names: Sequence[str]
    normalize: bool | None = None
    special: bool = True
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedded:
    """``vectors``: float32 [num_inputs, hidden]. ``tokens``: of all inputs. ``normalized``: whether lengths are 1."""

    vectors: np.ndarray
    tokens: int
    cached: int
    normalized: bool


class Vectors:
    """Embeds. What the checkpoint says about its vectors is read when they are first wanted."""

    def __init__(self, front: FrontEnd, pool: TextPool, sentence: Callable[[], Sentence]) -> None:
        self._front = front
        self._pool = pool
        self._read = sentence
        self._sentence: Sentence | None = None

    async def sentence(self) -> Sentence:
        """Return how this model makes vectors. HttpError 400 saying why it can make none."""
        if self._sentence is None:
            try:
                self._sentence = await self._pool.run(self._read)
            except ModelError as error:
                raise invalid(f"this model gives no vectors: {error}", "model", "unsupported_model") from None
        return self._sentence

    async def embed(self, exchange: Exchange, asked: Asked) -> Embedded:
        """Return the inputs' vectors. RequestError naming the input that can't be embedded; ClientGoneError when the
        client leaves, whose sequences then end."""
        text, model = self._front.check_ready(), self._front.model
        sentence = await self.sentence()
        _check_size(asked)
        prompts = await self._pool.run(_encoded, asked, text, model.vocabulary, model.max_model_len)
        normalize = sentence.normalize if asked.normalize is None else asked.normalize
        job = Job(
            prompts=tuple(prompts),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=1,
            arrival=exchange.arrival,
            cache_salt=asked.cache_salt,
            priority=asked.priority,
            pooling=PoolingParams(kind=sentence.kind, normalize=normalize),
        )
        return await self._run(exchange, job, normalize)

    async def _run(self, exchange: Exchange, job: Job, normalized: bool) -> Embedded:
        gone: list[bool] = []
        reply: Reply | None = None

        def leave() -> None:
            gone.append(True)
            if reply is not None:
                self._front.abandon(reply)

        async with exchange.watched(leave):
            reply = await self._front.submit(job)
            try:
                while not (reply.done or gone):
                    for delta in await reply.next():
                        require_good(delta, reply)
            finally:
                self._front.abandon(reply)
        if gone:
            raise ClientGoneError
        vectors = np.stack([reply.vectors[place] for place in range(len(job.prompts))])
        return Embedded(vectors=vectors, tokens=reply.prompt_tokens, cached=reply.cached_tokens, normalized=normalized)


def _check_size(asked: Asked) -> None:
    if not 0 < len(asked.inputs) <= MAX_INPUTS:
        raise RequestError(
            f"{asked.names[0] if asked.names else 'input'}: a request has 1 to {MAX_INPUTS} inputs; "
            f"this has {len(asked.inputs)}",
            param="input",
        )
    size = sum(len(one) for one in asked.inputs if isinstance(one, str))
    if size > MAX_CHARACTERS:
        message = f"the inputs have {size} characters; send at most {MAX_CHARACTERS} at once"
        raise RequestError(message, param=asked.names[0].partition("[")[0])


def _encoded(asked: Asked, text: Text, vocabulary: int, longest: int) -> list[np.ndarray]:
    """Return the inputs' ids; each has 1 to ``longest`` of them."""
    found = []
    for one, name in zip(asked.inputs, asked.names, strict=True):
        ids = text.encode(one, asked.special) if isinstance(one, str) else token_ids(one, vocabulary, name)
        if not len(ids):
            raise RequestError(f"{name} has no tokens", fix="leave it out, or give it text", param=name)
        if len(ids) > longest:
            raise RequestError(
                f"{name} has {len(ids)} tokens; this model's context is {longest}",
                fix="shorten it, or split it",
                param=name,
                code="context_length_exceeded",
            )
        found.append(ids)
    return found
