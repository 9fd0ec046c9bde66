"""Every way a request can fail, as an HTTP status and the OpenAI form of an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from drivetrain.errors import DrivetrainError, OverloadedError, RequestError
from drivetrain.server.admission import UnavailableError

INVALID, SERVER = "invalid_request_error", "server_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An answer that is an error. ``kind`` and ``code`` are OpenAI's ``type`` and ``code``."""

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def payload(self) -> bytes:
        """Return the JSON body."""
        return msgspec.json.encode(self.content())

    def content(self) -> dict[str, Any]:
        """Return ``{"error": {message, type, param, code}}``."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class HttpError(DrivetrainError):
    """Ends a request with a failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


def failure_of(error: DrivetrainError) -> Failure:
    """Return what the client is told about an error."""
    if isinstance(error, HttpError):
        return error.failure
    if isinstance(error, OverloadedError):
        gone = isinstance(error, UnavailableError)
        return Failure(
            status=503 if gone else 429,
            message=str(error),
            kind=SERVER if gone else "rate_limit_error",
            code="loop_unavailable" if gone else "too_many_requests",
            headers={"Retry-After": str(max(1, round(error.retry_after)))},
        )
    if isinstance(error, RequestError):
        return Failure(status=400, message=str(error), param=error.param, code=error.code)
    return Failure(status=500, message=str(error), kind=SERVER)


def invalid(message: str, param: str | None = None, code: str | None = None) -> HttpError:
    """Return a 400."""
    return HttpError(Failure(status=400, message=message, param=param, code=code))
