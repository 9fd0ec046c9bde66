"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any, Literal

import msgspec
import numpy as np

from drivetrain.server.bodies import read_body
from drivetrain.server.exchange import Exchange
from drivetrain.server.failures import invalid
from drivetrain.server.frontend import FrontEnd
from drivetrain.server.openai import Body
from drivetrain.server.text import TextPool
from drivetrain.server.vectors import Asked, Embedded, Input, Vectors


class EmbeddingRequest(Body, frozen=True, kw_only=True):
    """A text, texts, token ids, or lists of token ids."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None

    def asked(self) -> Asked:
        """Return the checked inputs. HttpError naming the field."""
        inputs, names = self._inputs()
        if self.priority is not None and abs(self.priority) >= 1 << 31:
            raise invalid("priority must be a 32-bit integer", "priority")
        return Asked(
            inputs=inputs,
            names=names,
            normalize=self.normalize,
            special=self.add_special_tokens is not False,
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
        )

    def _inputs(self) -> tuple[list[Input], list[str]]:
        if isinstance(self.input, str):
            return [self.input], ["input"]
        kinds = {type(one) for one in self.input}
        if len(kinds) != 1:
            raise invalid("input is empty or mixes strings, tokens and lists of tokens", "input")
        if kinds == {int}:
            return [[one for one in self.input if isinstance(one, int)]], ["input"]
        found = [one for one in self.input if not isinstance(one, int)]
        return found, [f"input[{place}]" for place in range(len(found))]

    def check_dimensions(self, width: int | None) -> None:
        """HttpError unless the vectors can be cut to what was asked for."""
        if self.dimensions is not None and not 1 <= self.dimensions <= (width or 1 << 31):
            upper = f" and {width}, this model's" if width else " and the model's own"
            raise invalid(f"dimensions is {self.dimensions}; it must be between 1{upper}", "dimensions")


class Embeddings:
    """Handles the route."""

    def __init__(self, front: FrontEnd, pool: TextPool, vectors: Vectors, model: str) -> None:
        self._front = front
        self._pool = pool
        self._vectors = vectors
        self._model = model

    async def embed(self, exchange: Exchange) -> None:
        """Answer with one vector an input, in order."""
        request = await read_body(exchange, EmbeddingRequest, self._model)
        asked = request.asked()
        self._front.check_ready()
        request.check_dimensions((await self._vectors.sentence()).width)
        embedded = await self._vectors.embed(exchange, asked)
        request.check_dimensions(embedded.vectors.shape[1])
        await exchange.answer(200, await self._pool.run(_answer, embedded, request, self._model))


def cut(embedded: Embedded, dimensions: int | None) -> np.ndarray:
    """Return the first entries of each vector, float32 [num, dimensions]; of length 1 again where they were."""
    vectors = embedded.vectors[:, :dimensions]
    if dimensions is None or not embedded.normalized:
        return vectors
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    unit: np.ndarray = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return unit


def _answer(embedded: Embedded, request: EmbeddingRequest, model: str) -> bytes:
    vectors = cut(embedded, request.dimensions)
    if request.encoding_format == "base64":
        written: list[Any] = [base64.b64encode(one.astype("<f4").tobytes()).decode("ascii") for one in vectors]
    else:
        written = vectors.tolist()
    data = [{"object": "embedding", "index": place, "embedding": one} for place, one in enumerate(written)]
    usage = {
        "prompt_tokens": embedded.tokens,
        "total_tokens": embedded.tokens,
        "prompt_tokens_details": {"cached_tokens": embedded.cached},
    }
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})
