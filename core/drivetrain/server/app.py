"""The ASGI application: who may ask, which route it is, how failures are told. Routes are a table, not a framework."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from drivetrain import __version__
from drivetrain.errors import DrivetrainError
from drivetrain.models.sentence import Sentence
from drivetrain.server.admission import Admission
from drivetrain.server.completions import Completions
from drivetrain.server.embeddings import Embeddings
from drivetrain.server.exchange import Exchange, Receive, Scope, Send
from drivetrain.server.failures import ClientGoneError, Failure, HttpError, failure_of
from drivetrain.server.frontend import FrontEnd
from drivetrain.server.metrics import CONTENT_TYPE
from drivetrain.server.scoring import Scoring
from drivetrain.server.text import TextPool
from drivetrain.server.tokenizing import Tokenizing
from drivetrain.server.vectors import Vectors

log = logging.getLogger("drivetrain.server")
Handler = Callable[[Exchange], Awaitable[None]]
MODELS = "/v1/models"
OPEN_PATHS = frozenset({"/health", "/ready"})  # for probes; any other spelling needs the key


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What the application must know about its operator's wishes. ``sentence``: reads how the model makes vectors;
    ModelError where it can't make any."""

    model: str
    api_key: str | None = None
    max_queued_requests: int = 1024
    ping_seconds: float = 15.0
    sentence: Callable[[], Sentence] = Sentence


class App:
    """One served model. Every path but /health and /ready needs the key, known or unknown."""

    def __init__(self, front: FrontEnd, pool: TextPool, door: Door) -> None:
        self._front = front
        self._door = door
        self._created = int(time.time())
        self._admission = Admission(door.max_queued_requests)
        completions = Completions(front, pool, door.model, door.ping_seconds)
        vectors = Vectors(front, pool, door.sentence)
        embeddings, scoring = Embeddings(front, pool, vectors, door.model), Scoring(front, vectors, door.model)
        tokenizing = Tokenizing(front, pool, door.model)
        self._routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics},
            MODELS: {"GET": self._models},
            "/v1/completions": {"POST": self._admitted(completions.complete)},
            "/v1/chat/completions": {"POST": self._admitted(completions.chat)},
            "/v1/embeddings": {"POST": self._admitted(embeddings.embed)},
            "/v1/score": {"POST": self._admitted(scoring.score)},
            "/v1/rerank": {"POST": self._admitted(scoring.rerank)},
            "/tokenize": {"POST": self._admitted(tokenizing.tokenize)},
            "/detokenize": {"POST": self._admitted(tokenizing.detokenize)},
        }

    @property
    def admission(self) -> Admission:
        """The door's count."""
        return self._admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "http":
            await self._serve(Exchange(scope, receive, send))
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1003})
        else:
            raise NotImplementedError(f"scope {scope['type']}: nothing happens at startup and shutdown here")

    async def _serve(self, exchange: Exchange) -> None:
        try:
            self._check_key(exchange)
            await self._route(exchange)(exchange)
        except ClientGoneError:
            pass
        except DrivetrainError as error:
            failure = failure_of(error)
            if failure.status in (429, 503):
                self._front.metrics.refused.labels(str(failure.status)).inc()
            await exchange.fail(failure)
        except Exception:
            log.exception("%s %s failed (request %s)", exchange.method, exchange.path, exchange.request_id)
            message = f"an error inside the server; its log has request {exchange.request_id}"
            await exchange.fail(Failure(status=500, message=message, kind="server_error"))

    def _check_key(self, exchange: Exchange) -> None:
        """HttpError 401 unless the key is right; takes equally long wherever a wrong key differs."""
        key = self._door.api_key
        if key is None or exchange.path in OPEN_PATHS:
            return
        scheme, _, given = exchange.headers.get(b"authorization", b"").partition(b" ")
        right = hmac.compare_digest(given.strip(), key.encode())
        if not (right and scheme.lower() == b"bearer"):
            raise HttpError(
                Failure(
                    status=401,
                    message="the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            )

    def _route(self, exchange: Exchange) -> Handler:
        methods = self._routes.get(exchange.path)
        if methods is None and exchange.path.startswith(MODELS + "/"):
            methods = {"GET": self._one_model}
        if methods is None:
            raise HttpError(Failure(status=404, message=f"there is no {exchange.path}", code="not_found"))
        method = "GET" if exchange.method == "HEAD" else exchange.method
        if method not in methods:
            allowed = ", ".join(methods)
            status = HTTPStatus.METHOD_NOT_ALLOWED
            message = f"{exchange.path} takes {allowed}, not {exchange.method}"
            raise HttpError(Failure(status=status, message=message, headers={"Allow": allowed}))
        return methods[method]

    def _admitted(self, handler: Handler) -> Handler:
        """Wrap a handler in the door: counted from the headers on, refused before the body is read."""

        async def admitted(exchange: Exchange) -> None:
            metrics = self._front.metrics
            self._front.check_ready()
            self._admission.enter()
            metrics.held.inc()
            try:
                await handler(exchange)
            finally:
                self._admission.leave()
                metrics.held.dec()
                metrics.duration.observe(time.monotonic() - exchange.arrival)

        return admitted

    async def _health(self, exchange: Exchange) -> None:
        """GET /health: this process answers."""
        await self._json(exchange, {"status": "ok"})

    async def _ready(self, exchange: Exchange) -> None:
        """GET /ready: requests are served now; 503 with the reason otherwise."""
        self._front.check_awake()
        await self._json(exchange, {"status": "ready"})

    async def _version(self, exchange: Exchange) -> None:
        await self._json(exchange, {"version": __version__})

    async def _metrics(self, exchange: Exchange) -> None:
        metrics = self._front.metrics
        metrics.ready.set(self._front.awake)
        await exchange.answer(200, metrics.render(), {"Content-Type": CONTENT_TYPE})

    async def _models(self, exchange: Exchange) -> None:
        await self._json(exchange, {"object": "list", "data": [self._card()]})

    async def _one_model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix(MODELS + "/")
        if name != self._door.model:
            message = f"the model {name!r} does not exist; this server has {self._door.model!r}"
            raise HttpError(Failure(status=404, message=message, param="model", code="model_not_found"))
        await self._json(exchange, self._card())

    def _card(self) -> dict[str, object]:
        ready = self._front.supervisor.ready
        return {
            "id": self._door.model,
            "object": "model",
            "created": self._created,
            "owned_by": "drivetrain",
            "max_model_len": ready.max_model_len if ready else None,
        }

    async def _json(self, exchange: Exchange, content: dict[str, object]) -> None:
        await exchange.answer(200, msgspec.json.encode(content))
