"""POST /v1/score and /v1/rerank: how near texts are, as cosines of their vectors."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
import numpy as np

from drivetrain.server.bodies import read_body
from drivetrain.server.exchange import Exchange
from drivetrain.server.failures import invalid
from drivetrain.server.frontend import FrontEnd
from drivetrain.server.openai import Body
from drivetrain.server.vectors import Asked, Embedded, Vectors

Named = list[tuple[str, str]]  # texts, each with its field's name


class ScoreRequest(Body, frozen=True, kw_only=True):
    """Pairs of texts: one with each of many, or two lists of one length."""

    text_1: str | list[str]
    text_2: str | list[str]

    def sides(self) -> tuple[Named, Named]:
        """Return the checked texts of both sides. HttpError naming the field."""
        left, right = _named(self.text_1, "text_1"), _named(self.text_2, "text_2")
        for side, name in ((left, "text_1"), (right, "text_2")):
            if not side:
                raise invalid(f"{name} is empty; give a text or texts", name)
        if len(left) not in (1, len(right)):
            message = f"text_1 has {len(left)} texts and text_2 {len(right)}; give one, or equally many"
            raise invalid(message, "text_1")
        return left, right


class Document(msgspec.Struct, frozen=True):
    """A document as an object."""

    text: str


class RerankRequest(Body, frozen=True, kw_only=True):
    """A query, and documents to order by it."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        """Return the checked documents. HttpError naming the field."""
        if self.top_n is not None and self.top_n < 1:
            raise invalid(f"top_n is {self.top_n}; it must be 1 or more", "top_n")
        if not self.documents:
            raise invalid("documents is empty; give at least one", "documents")
        return [one if isinstance(one, str) else one.text for one in self.documents]


class Scoring:
    """Handles both routes, for checkpoints that say how they make vectors."""

    def __init__(self, front: FrontEnd, vectors: Vectors, model: str) -> None:
        self._front = front
        self._vectors = vectors
        self._model = model

    async def score(self, exchange: Exchange) -> None:
        """Answer with one score a pair, in order."""
        request = await read_body(exchange, ScoreRequest, self._model)
        left, right = request.sides()
        embedded, scores = await self._cosines(exchange, left, right)
        data = [{"index": place, "object": "score", "score": one} for place, one in enumerate(scores)]
        content = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        await self._answer(exchange, content | {"data": data}, embedded)

    async def rerank(self, exchange: Exchange) -> None:
        """Answer with the documents, best first; equal ones in their order."""
        request = await read_body(exchange, RerankRequest, self._model)
        texts = request.texts()
        embedded, scores = await self._cosines(exchange, [(request.query, "query")], _named(texts, "documents"))
        order = sorted(range(len(scores)), key=lambda place: -scores[place])[: request.top_n]
        results: list[dict[str, Any]] = [{"index": place, "relevance_score": scores[place]} for place in order]
        if request.return_documents is not False:
            results = [one | {"document": {"text": texts[one["index"]]}} for one in results]
        await self._answer(exchange, {"id": f"rerank-{secrets.token_hex(12)}", "results": results}, embedded)

    async def _cosines(self, exchange: Exchange, left: Named, right: Named) -> tuple[Embedded, list[float]]:
        """Return the cosine of each pair; one text on the left goes with all on the right."""
        self._front.check_ready()
        if not (await self._vectors.sentence()).declared:
            raise invalid(
                "this model's checkpoint does not say how it makes vectors (it has no modules.json), so that cosines "
                "would mean nothing; serve an embedding model (rerankers that answer yes or no are not supported)",
                "model",
                "unsupported_model",
            )
        inputs, names = zip(*left, *right, strict=True)
        embedded = await self._vectors.embed(exchange, Asked(inputs=inputs, names=names, normalize=True))
        first, second = embedded.vectors[: len(left)], embedded.vectors[len(left) :]
        scores: list[float] = np.clip((first.astype(np.float64) * second).sum(1), -1, 1).tolist()
        return embedded, scores

    async def _answer(self, exchange: Exchange, content: dict[str, Any], embedded: Embedded) -> None:
        usage = {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens}
        await exchange.answer(200, msgspec.json.encode(content | {"model": self._model, "usage": usage}))


def _named(texts: str | list[str], name: str) -> Named:
    if isinstance(texts, str):
        return [(texts, name)]
    return [(one, f"{name}[{place}]") for place, one in enumerate(texts)]
