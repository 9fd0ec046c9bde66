"""What the routes have in common: reading a body, its model, and what its fields must fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drivetrain.errors import RequestError
from drivetrain.server.admission import UnavailableError
from drivetrain.server.assembly import Delta
from drivetrain.server.exchange import Exchange
from drivetrain.server.failures import Failure, HttpError, failure_of, invalid
from drivetrain.server.frontend import Reply
from drivetrain.server.openai import Request, decode
from drivetrain.server.text import Text

MOST_WARNED = 10


async def read_body(exchange: Exchange, kind: type[Request], served: str) -> Request:
    """Return the checked body of a request for the model ``served``; fields that nobody knows are named in the
    answer's ``Warning``. HttpError 400 naming the field, 404 for another model."""
    request, unknown = decode(await exchange.json_body(), kind)
    if request.model is not None and request.model != served:
        raise HttpError(
            Failure(
                status=404,
                message=f"the model {request.model!r} does not exist; this server has {served!r}",
                param="model",
                code="model_not_found",
            )
        )
    if unknown:
        names = [one.encode("ascii", "replace").decode()[:64] for one in unknown[:MOST_WARNED]]
        safe = ", ".join("".join(c if c.isalnum() or c in "_-." else "?" for c in one) for one in names)
        exchange.answer_headers["Warning"] = f'299 drivetrain "unknown fields ignored: {safe}"'
    return request


def require_template(text: Text, served: str) -> None:
    """HttpError 400 where the model can't encode a conversation."""
    if not text.has_template:
        raise invalid(
            f"model {served} has no chat template; start the server with --chat-template FILE, or use /v1/completions",
            "messages",
            "no_chat_template",
        )


def token_ids(ids: Sequence[int], vocabulary: int, param: str) -> np.ndarray:
    """Return token ids, int32 [len(ids)]. RequestError naming one that the model does not have."""
    for token in ids:
        if not 0 <= token < vocabulary:
            raise RequestError(f"{param} holds {token}, which is no token id of this model", param=param)
    return np.asarray(ids, np.int32)


def require_good(delta: Delta, reply: Reply) -> None:
    """Raise what ended a choice, when that is no regular end."""
    if delta.finish not in ("error", "abort"):
        return
    message = delta.error or "the request was aborted by the server"
    if reply.lost:
        raise HttpError(failure_of(UnavailableError(message, retry_after=1)))
    raise HttpError(Failure(status=500, message=message, kind="server_error"))
