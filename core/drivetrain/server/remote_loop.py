"""``RemoteLoop``: the interface of ``Loop`` over a loop in its own process, for callers without an event loop."""

from __future__ import annotations

import time

from drivetrain.errors import DrivetrainError
from drivetrain.params import GenerateRequest, StepOutputs
from drivetrain.server.child import LoopChild, LoopSpec
from drivetrain.server.messages import (
    Abort,
    FromLoop,
    LoopError,
    Outputs,
    Ready,
    Refused,
    Stats,
    failed_outputs,
    submit_of,
    unpack_outputs,
)

START_SECONDS = 1800.0
STOP_SECONDS = 5.0
WAIT_SECONDS = 0.1


class RemoteLoop:
    """Submit, step, abort. One thread owns it.

    When the process dies or is silent for ``hang_seconds``, every request that it held ends with reason ``error``
    in the next ``step``; the next ``submit`` starts another process.
    """

    def __init__(self, spec: LoopSpec, *, hang_seconds: float = 300.0) -> None:
        self._spec = spec
        self._hang_seconds = hang_seconds
        self._held: set[int] = set()
        self._stats = Stats()
        self._child: LoopChild | None = None
        self._open()

    def _open(self) -> LoopChild:
        child = LoopChild(self._spec)
        try:
            self.ready: Ready = child.wait_ready(START_SECONDS)
        except BaseException:
            child.kill()
            raise
        self._child = child
        self._heard = time.monotonic()
        return child

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self.ready.max_model_len

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.ready.vocabulary

    @property
    def dtype(self) -> str:
        """Type of weights and activations."""
        return self.ready.dtype

    @property
    def pid(self) -> int | None:
        """Id of the process that runs the loop; None when it died and no request has come since."""
        return self._child.pid if self._child else None

    def submit(self, request: GenerateRequest) -> None:
        """Send a request. What the loop refuses ends with reason ``error`` in a later ``step``."""
        child = self._child or self._open()
        if not self._held:
            self._heard = time.monotonic()
        child.channel.send(submit_of(request))
        self._held.add(request.request_id)

    def abort(self, request_id: int) -> None:
        """End a request. Unknown ids are ignored."""
        if self._child is not None and request_id in self._held:
            self._child.channel.send(Abort((request_id,)))

    def has_work(self) -> bool:
        """Return whether a request has been submitted that has not ended."""
        return bool(self._held)

    def step(self) -> tuple[StepOutputs, ...]:
        """Wait for the loop's next outputs, at most until something is known; empty without work."""
        while self._held:
            assert self._child is not None, "requests are held by a process"
            try:
                outputs = self._take(self._child.channel.receive(WAIT_SECONDS), self._child)
            except DrivetrainError as error:
                return (self._lost(str(error)),)
            if outputs is not None:
                self._held.difference_update(end.request_id for end in outputs.finished)
                return (outputs,)
        return ()

    def _take(self, message: FromLoop | None, child: LoopChild) -> StepOutputs | None:
        now = time.monotonic()
        if message is None:
            if ended := child.ended():
                raise DrivetrainError(ended)
            if now - self._heard > self._hang_seconds:
                raise DrivetrainError(f"the loop has been silent for {self._hang_seconds:g} s")
            return None
        self._heard = now
        if isinstance(message, Outputs):
            return unpack_outputs(message)
        if isinstance(message, Refused):
            return failed_outputs((message.request_id,), message.message)
        if isinstance(message, Stats):
            self._stats = message
        elif isinstance(message, LoopError):
            raise DrivetrainError(message.message, fix=message.fix)
        return None

    def _lost(self, why: str) -> StepOutputs:
        outputs = failed_outputs(sorted(self._held), f"the loop is gone: {why}")
        self._held.clear()
        self._stats = Stats()
        if self._child is not None:
            self._child.kill()
            self._child = None
        return outputs

    def stats(self) -> Stats:
        """Return the figures that the loop sent last."""
        while self._child is not None and not self._held and (message := self._child.channel.receive(0.0)):
            if isinstance(message, Stats):
                self._stats = message
        return self._stats

    def close(self) -> None:
        """End the process. Safe to call again."""
        if self._child is not None:
            self._child.stop(STOP_SECONDS)
            self._child = None
