"""What the parts of the scheduler share: requests, rows, the cache, and what the next plan must carry."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drivetrain.cache.connector import Connector
from drivetrain.cache.manager import CacheManager
from drivetrain.cache.prefix import Chain, PrefixRoot
from drivetrain.params import Finished, FinishReason, GenerateRequest, Started
from drivetrain.sched.plan import RowStart
from drivetrain.sched.policy import Policy
from drivetrain.sched.request import Request, RequestTable, State


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one replica's scheduler. ``model`` and ``layout`` go into prefix hashes (see ``PrefixRoot``).

    ``max_num_batched_tokens``: query tokens a step; ``max_drafts``: draft tokens a row and step; ``checkpoint_tokens``:
    how often recurrent states are checkpointed; ``fixed_chunk``: with deterministic results, prompts are computed in
    chunks that end at its multiples, whatever else runs (0: chunks fill the budget).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    model: str = ""
    layout: str = ""
    prefix_caching: bool = True
    max_drafts: int = 0
    checkpoint_tokens: int = 256
    fixed_chunk: int = 0


@dataclass(slots=True)
class Totals:
    """Counted since the scheduler was made."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: int = 0


@dataclass(slots=True)
class Fanout:
    """Requests of one prompt: all but the first wait until a plan that writes the prompt is out."""

    leader: int
    members: int
    written: bool = False


@dataclass(slots=True, eq=False)
class SchedulerState:
    """The scheduler's whole state. ``decoding`` and ``prefilling`` hold rows, in the order in which they came."""

    config: SchedulerConfig
    cache: CacheManager
    table: RequestTable
    policy: Policy
    connector: Connector | None = None
    requests: dict[int, Request] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    remote: dict[int, Request] = field(default_factory=dict)
    pinned: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    departed: dict[int, Request] = field(default_factory=dict)  # epoch of a lost row -> its preempted request
    departed_plans: dict[int, int] = field(default_factory=dict)  # epoch of a lost row -> plans still in flight
    fanouts: dict[int, Fanout] = field(default_factory=dict)
    prefilling: dict[int, Request] = field(default_factory=dict)
    decoding: dict[int, None] = field(default_factory=dict)
    decode_rows: np.ndarray | None = None  # ``decoding`` as an array, None when it must be made again
    starts: list[RowStart] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    ended: list[Finished] = field(default_factory=list)
    late_outputs: list[tuple[int, list[int]]] = field(default_factory=list)  # tokens of preempted requests
    published: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    in_flight: set[int] = field(default_factory=set)
    totals: Totals = field(default_factory=Totals)
    next_plan: int = 0
    next_order: int = 0

    def rows_decoding(self) -> np.ndarray:
        """Return the rows that decode, int32, made anew only when the set changed."""
        if self.decode_rows is None:
            self.decode_rows = np.fromiter(self.decoding, np.int32, len(self.decoding))
        return self.decode_rows

    def caches(self, request: Request) -> bool:
        """Return whether a request's blocks may be found by others."""
        return self.config.prefix_caching or request.asked.fanout is not None

    def root(self, asked: GenerateRequest) -> bytes:
        """Return the root of a request's digests."""
        media = tuple(a.tobytes() for a in (asked.embeds, asked.positions) if a is not None)
        return PrefixRoot(
            model=self.config.model,
            layout=self.config.layout,
            adapter=asked.adapter,
            cache_salt=asked.cache_salt,
            fanout=None if self.config.prefix_caching else asked.fanout,
            media=media,
        ).digest(self.cache.unit)

    def new_chain(self, asked: GenerateRequest) -> Chain:
        """Return an empty chain for a request."""
        return Chain(self.root(asked), self.cache.unit)

    def leave_row(self, row: int) -> Request:
        """Take the row of a running request away, with its blocks; the next plan tells the runner."""
        self.prefilling.pop(row, None)
        if self.decoding.pop(row, row) is None:
            self.decode_rows = None
        flights = int(self.table.in_flight[row])
        request = self.table.stop(row)
        if flights:
            self.departed_plans[request.epoch] = flights
        self.cache.close(row)
        if any(start.row == row for start in self.starts):
            self.starts = [start for start in self.starts if start.row != row]
        elif request.state is State.RUNNING:
            self.ends.append(row)
        return request

    def preempt(self, row: int) -> Request:
        """Take a running request's row; it waits again and is computed anew, first what it had."""
        request = self.leave_row(row)
        if request.departed:
            self.departed[request.epoch] = request
        request.state = State.WAITING
        request.num_preemptions += 1
        self.totals.preemptions += 1
        self.waiting.append(request)
        return request

    def finish(self, request: Request, end: Finished) -> Finished:
        """End a request wherever it is, let go of what it holds, and forget it."""
        if request.row >= 0:
            self._pin(request)
            self.leave_row(request.row)
            request.departed.clear()
        elif request in self.waiting:
            self.waiting.remove(request)
        self.departed.pop(request.epoch, None)
        request.state = State.PINNED if request.request_id in self.pinned else State.FINISHED
        del self.requests[request.request_id]
        self._leave_fanout(request)
        self.totals.finished += 1
        return end

    def _pin(self, request: Request) -> None:
        if self.connector is None:
            return
        held = self.cache.held(request.row)
        if self.connector.finished(request.request_id, int(self.table.confirmed[request.row]), held):
            for group, block in held:
                self.cache.pool.hold(group, block)
            self.pinned[request.request_id] = held

    def _leave_fanout(self, request: Request) -> None:
        number = request.asked.fanout
        if number is None:
            return
        fanout = self.fanouts[number]
        fanout.members -= 1
        if not fanout.members:
            del self.fanouts[number]
        elif fanout.leader == request.request_id and not fanout.written:
            rest = [r for r in self.requests.values() if r.asked.fanout == number]
            fanout.leader = min(rest, key=lambda r: r.order).request_id

    def fail(self, request: Request, message: str) -> Finished:
        """End a request with an error."""
        return self.finish(request, Finished(request_id=request.request_id, reason="error", error=message))

    def end(self, request: Request, reason: FinishReason, stop_token: int | None = None) -> Finished:
        """End a request without an error."""
        return self.finish(request, Finished(request_id=request.request_id, reason=reason, stop_token=stop_token))
