"""Every value that crosses between a front end and a loop's process: MessagePack of the structs below, nothing else.

The front end sends ``Launch`` once, then ``Submit``, ``Abort``, ``Stop``. The loop's process sends ``Hello``,
then ``Ready`` or ``LoopError``, then ``Accepted``, ``Refused``, ``Outputs`` and ``Stats`` (which is the heartbeat too).
Arrays travel as their bytes in the host's order: both ends are one machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import numpy as np

from drivetrain.config import EngineConfig
from drivetrain.params import (
    Finished,
    FinishReason,
    GenerateRequest,
    PoolingParams,
    SamplingParams,
    Started,
    StepOutputs,
    TokenLogprobs,
)
from drivetrain.select.choose import Choice

PROTOCOL = 1
EMPTY = b""


class Array(msgspec.Struct, frozen=True, array_like=True):
    """One array: C order, ``data`` holds exactly the items that ``shape`` says."""

    dtype: Literal["int32", "int64", "float32"]
    shape: tuple[int, ...]
    data: bytes

    def numpy(self) -> np.ndarray:
        """Return the read-only array. ValueError when bytes and shape disagree."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first word of a loop's process."""

    protocol: int
    pid: int


class Launch(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What to build. ``factory``: ``module:function`` of (config, choice); ``beat_seconds``: longest silence;
    ``given``: the variables of the process that are not its front end's own."""

    protocol: int
    factory: str
    config: EngineConfig
    choice: Choice | None
    beat_seconds: float
    given: dict[str, str] = {}


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The loop takes requests. ``figures``: seconds and bytes of its start by name; ``seconds``: building it took."""

    max_model_len: int
    vocabulary: int
    dtype: str
    seconds: float
    figures: dict[str, float]


class LoopError(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The loop can't be built or can't go on; the process ends after saying so. ``kind``: the error's class."""

    kind: str
    message: str
    fix: str = ""


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """One sequence to run: the fields of ``GenerateRequest``, arrays as bytes."""

    request_id: int
    prompt_ids: bytes
    sampling: SamplingParams
    max_tokens: int
    seed: int
    eos_ids: tuple[int, ...] = ()
    arrival: float = 0.0
    priority: int = 0
    sample_index: int = 0
    fanout: int | None = None
    cache_salt: str = ""
    adapter: str = ""
    pooling: PoolingParams | None = None
    embeds: Array | None = None
    positions: Array | None = None
    grammar: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End these requests; ids that are unknown or ended are ignored."""

    request_ids: tuple[int, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process; what is held is dropped."""


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """These requests are the loop's now: each will get an end."""

    request_ids: tuple[int, ...]


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A request that the loop can't serve. ``client_fault``: the request is at fault, not the server."""

    request_id: int
    message: str
    client_fault: bool
    param: str | None = None
    code: str | None = None


class End(msgspec.Struct, frozen=True, array_like=True):
    """How a request ended; the fields of ``Finished``."""

    request_id: int
    reason: FinishReason
    error: str = ""
    stop_token: int | None = None
    pooled: Array | None = None


class Outputs(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """One step's outputs in columns: int64 ``request_ids`` [n], int32 ``counts`` [n], int32 ``tokens`` [sum]."""

    request_ids: bytes = EMPTY
    counts: bytes = EMPTY
    tokens: bytes = EMPTY
    started: tuple[tuple[int, int], ...] = ()
    finished: tuple[End, ...] = ()
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()


class Stats(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The loop's figures now; sent at least every ``beat_seconds`` and when the loop falls idle."""

    waiting: int = 0
    running: int = 0
    cache_used: int = 0
    cache_total: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    steps: int = 0
    graphs_captured: int = 0
    graphs_wanted: int = 0
    graphs_given_up: int = 0
    graphs_planned_bytes: int = 0
    graphs_measured_bytes: int = 0
    memory_retries: int = 0
    memory_least_free_bytes: int = -1  # not known
    memory_given_back_bytes: int = 0


ToLoop = Launch | Submit | Abort | Stop
FromLoop = Hello | Ready | LoopError | Accepted | Refused | Outputs | Stats
Message = ToLoop | FromLoop


def array_of(values: np.ndarray | None) -> Array | None:
    """Pack an optional array of int32, int64 or float32."""
    if values is None:
        return None
    dtype: Any = values.dtype.name
    return Array(dtype, values.shape, np.ascontiguousarray(values).tobytes())


def submit_of(request: GenerateRequest) -> Submit:
    """Pack a request."""
    return Submit(
        request_id=request.request_id,
        prompt_ids=np.ascontiguousarray(request.prompt_ids, np.int32).tobytes(),
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        seed=request.seed,
        eos_ids=request.eos_ids,
        arrival=request.arrival,
        priority=request.priority,
        sample_index=request.sample_index,
        fanout=request.fanout,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        pooling=request.pooling,
        embeds=array_of(request.embeds),
        positions=array_of(request.positions),
        grammar=request.grammar,
        bad_words=request.bad_words,
    )


def request_of(message: Submit) -> GenerateRequest:
    """Unpack a request; its arrays are read-only."""
    return GenerateRequest(
        request_id=message.request_id,
        prompt_ids=np.frombuffer(message.prompt_ids, np.int32),
        sampling=message.sampling,
        max_tokens=message.max_tokens,
        seed=message.seed,
        eos_ids=message.eos_ids,
        arrival=message.arrival,
        priority=message.priority,
        sample_index=message.sample_index,
        fanout=message.fanout,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
        pooling=message.pooling,
        embeds=message.embeds.numpy() if message.embeds else None,
        positions=message.positions.numpy() if message.positions else None,
        grammar=message.grammar,
        bad_words=message.bad_words,
    )


def pack_outputs(outputs: StepOutputs) -> Outputs:
    """Pack what a step tells the outside."""
    return Outputs(
        request_ids=np.ascontiguousarray(outputs.request_ids, np.int64).tobytes(),
        counts=np.ascontiguousarray(outputs.counts, np.int32).tobytes(),
        tokens=np.ascontiguousarray(outputs.tokens, np.int32).tobytes(),
        started=tuple((one.request_id, one.num_cached) for one in outputs.started),
        finished=tuple(
            End(one.request_id, one.reason, one.error, one.stop_token, array_of(one.pooled)) for one in outputs.finished
        ),
        logprobs=outputs.logprobs,
    )


def unpack_outputs(message: Outputs) -> StepOutputs:
    """Unpack what a step tells the outside."""
    return StepOutputs(
        request_ids=np.frombuffer(message.request_ids, np.int64),
        counts=np.frombuffer(message.counts, np.int32),
        tokens=np.frombuffer(message.tokens, np.int32),
        started=tuple(Started(request_id=one, num_cached=cached) for one, cached in message.started),
        finished=tuple(finished_of(end) for end in message.finished),
        logprobs=message.logprobs,
    )


def finished_of(end: End) -> Finished:
    """Unpack one end."""
    return Finished(
        request_id=end.request_id,
        reason=end.reason,
        error=end.error,
        stop_token=end.stop_token,
        pooled=end.pooled.numpy() if end.pooled else None,
    )


def failed_outputs(request_ids: Iterable[int], why: str) -> StepOutputs:
    """Return outputs that end requests with an error: what a front end hears when their loop is gone."""
    empty = np.zeros(0, np.int32)
    ends = tuple(Finished(request_id=one, reason="error", error=why) for one in request_ids)
    return StepOutputs(request_ids=empty.astype(np.int64), counts=empty, tokens=empty, finished=ends)
