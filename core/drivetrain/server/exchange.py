"""One HTTP request over ASGI: its body within limits, its answer, its stream, and whether the client is still there."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from drivetrain.server.failures import ClientGoneError, Failure, HttpError, invalid

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
MAX_BODY = 32 << 20
LONGEST_ID = 128
JSON = "application/json"
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Exchange:
    """A request and its answer. Every answer carries ``X-Request-Id``: the client's own, or a new one."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.arrival = time.monotonic()
        self.headers = {name.lower(): value for name, value in scope["headers"]}
        self.request_id = self._own_id() or secrets.token_hex(16)
        self.answer_headers: dict[str, str] = {"X-Request-Id": self.request_id}
        self.started = False
        self.status = 0
        self._receive = receive
        self._send = send

    def _own_id(self) -> str:
        given = self.headers.get(b"x-request-id", b"")
        fits = 0 < len(given) <= LONGEST_ID and all(33 <= one < 127 for one in given)
        return given.decode("ascii") if fits else ""

    async def json_body(self) -> bytes:
        """Return the body. HttpError 413 or 415, ClientGoneError when the client leaves before its end."""
        kind = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != JSON.encode():
            raise HttpError(Failure(status=415, message=f"Content-Type must be {JSON}"))
        length = self.headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18:
            raise invalid("Content-Length is no number")
        parts: list[bytes] = []
        more, size = int(length) <= MAX_BODY, 0
        while more and size <= MAX_BODY:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            more = event.get("more_body", False)
        if max(size, int(length)) > MAX_BODY:
            raise HttpError(Failure(status=413, message=f"the body is longer than {MAX_BODY} bytes"))
        return b"".join(parts)

    async def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer; JSON unless ``headers`` name another type."""
        given = {"Content-Type": JSON, "Content-Length": str(len(body))} | dict(headers or {})
        await self._begin(status, given)
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def fail(self, failure: Failure) -> None:
        """Send an error: as an answer, or as the last event of a stream that has begun."""
        if self.started:
            await self.event(failure.payload())
            await self.end()
        else:
            await self.answer(failure.status, failure.payload(), failure.headers)

    async def begin_stream(self) -> None:
        """Send the headers of an event stream."""
        await self._begin(200, STREAM_HEADERS)

    async def event(self, *payloads: bytes) -> None:
        """Send events, together."""
        body = b"".join(b"data: " + one + b"\n\n" for one in payloads)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def ping(self) -> None:
        """Send a comment, so that nobody between us and the client closes a quiet stream."""
        await self._send({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})

    async def end(self) -> None:
        """End the stream."""
        await self._send({"type": "http.response.body", "body": b""})

    @contextlib.asynccontextmanager
    async def watched(self, on_gone: Callable[[], None]) -> AsyncIterator[None]:
        """Call ``on_gone`` if the client leaves while the block runs. The body must have been read."""
        watcher = asyncio.create_task(self._wait_gone(on_gone))
        try:
            yield
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _wait_gone(self, on_gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_gone()

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.started, self.status = True, status
        every = self.answer_headers | dict(headers)
        pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in every.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
