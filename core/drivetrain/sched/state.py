"""What the parts of the scheduler share: requests, rows, the cache, and what the next plan must carry."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from drivetrain.cache.connector import Connector
from drivetrain.cache.manager import CacheManager, Held
from drivetrain.cache.prefix import DIGEST_BYTES, Chain, Known, PrefixRoot
from drivetrain.params import Finished, FinishReason, GenerateRequest, Started
from drivetrain.sched.plan import RowStart
from drivetrain.sched.policy import Policy
from drivetrain.sched.request import Request, RequestTable, State

ROWS_A_ROUND = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one replica's scheduler. ``model`` and ``layout`` go into prefix hashes (see ``PrefixRoot``).

    ``grid_positions``: the model takes positions of three rows; ``max_num_batched_tokens``: query tokens a step;
    ``max_drafts``: draft tokens a row and step; ``checkpoint_tokens``:
    how often recurrent states are checkpointed; ``fixed_chunk``: with deterministic results, prompts are computed in
    chunks that end at its multiples, whatever else runs (0: chunks fill the budget). ``max_adjusted_seqs``: requests
    with changed logits that have a row at once; ``vocabulary`` 0: token ids of parameters are not checked.
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
    grid_positions: bool = True
    max_adjusted_seqs: int = 0
    vocabulary: int = 0


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


def period(num_rows: int, most: int) -> int:
    """Return every how many steps work that can wait is done for so many rows: few rows share a round over several
    steps, so that its fixed cost is spread; many rows need one each step, so that no step is much longer than others.
    """
    return max(1, min(most, ROWS_A_ROUND // max(1, num_rows)))


class Ones:
    """Read-only arrays of ones, Trues and minus ones, cut to length: steady decode makes none of its own."""

    def __init__(self, most: int) -> None:
        self._int, self._bool, self._minus = np.ones(most, np.int32), np.ones(most, bool), np.full(most, -1, np.int32)
        for array in (self._int, self._bool, self._minus):
            array.setflags(write=False)

    def ints(self, num: int) -> np.ndarray:
        """Return int32 ones [num]."""
        return self._int[:num]

    def trues(self, num: int) -> np.ndarray:
        """Return bool Trues [num]."""
        return self._bool[:num]

    def minus(self, num: int) -> np.ndarray:
        """Return int32 minus ones [num]."""
        return self._minus[:num]


@dataclass(slots=True)
class Writing:
    """What plans in flight write for others to share, so that a failed one takes all that came of it along.

    ``blocks``: plan -> (group, block, writer); ``plan_of``: (group, block) -> the plan in flight that writes it;
    ``hits``: plan -> (reader, group, block) of requests that share a block before its plan is done.
    """

    blocks: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    plan_of: dict[Held, int] = field(default_factory=dict)
    hits: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    def note(self, plan_id: int, written: list[tuple[int, int, int]]) -> None:
        """A plan in flight writes and has named these."""
        if written:
            self.blocks[plan_id] = written
            self.plan_of.update({(group, block): plan_id for group, block, _ in written})

    def shared(self, reader: int, held: Sequence[Sequence[int]]) -> None:
        """A request builds on these blocks of each group."""
        for group, blocks in enumerate(held) if self.plan_of else ():
            for block in blocks:
                plan_id = self.plan_of.get((group, block))
                if plan_id is not None:
                    self.hits.setdefault(plan_id, []).append((reader, group, block))

    def done(self, plan_id: int) -> None:
        """A plan has written what it was to write."""
        self.hits.pop(plan_id, None)
        for group, block, _ in self.blocks.pop(plan_id, ()):
            if self.plan_of.get((group, block)) == plan_id:
                del self.plan_of[group, block]


@dataclass(slots=True, eq=False)
class SchedulerState:
    """The scheduler's whole state. ``decoding`` and ``prefilling`` hold rows, in the order in which they came.

    ``decode_rows``: ``decoding`` as int32 and intp arrays, None when they must be made again; ``departed``: epoch of a
    lost row -> its preempted request; ``departed_plans``: epoch of a lost row -> plans still in flight;
    ``late_outputs``: tokens of preempted requests; ``in_flight``: plan -> requests whose prompts it computes;
    ``left``: rows of requests that ended, their blocks still held; ``stuck``: nothing waiting could get blocks, and
    none came free.
    """

    config: SchedulerConfig
    cache: CacheManager
    table: RequestTable
    policy: Policy
    connector: Connector | None = None
    requests: dict[int, Request] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    remote: dict[int, Request] = field(default_factory=dict)
    pinned: dict[int, list[Held]] = field(default_factory=dict)
    departed: dict[int, Request] = field(default_factory=dict)
    departed_plans: dict[int, int] = field(default_factory=dict)
    fanouts: dict[int, Fanout] = field(default_factory=dict)
    prefilling: dict[int, Request] = field(default_factory=dict)
    decoding: dict[int, None] = field(default_factory=dict)
    decode_rows: tuple[np.ndarray, np.ndarray] | None = None
    starts: list[RowStart] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    ended: list[Finished] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    late_outputs: list[tuple[int, list[int]]] = field(default_factory=list)
    writing: Writing = field(default_factory=Writing)
    in_flight: dict[int, list[int]] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    known: Known = field(default_factory=Known)
    last_root: tuple[object, bytes] = (None, b"")  # what a chain's root is made of beside the model, and that root
    ones: Ones = field(init=False)
    places: np.ndarray = field(init=False)  # 0 .. unit - 1
    next_plan: int = 0
    next_order: int = 0
    stuck: bool = False

    def __post_init__(self) -> None:
        self.ones = Ones(self.table.max_rows)
        self.places = np.arange(self.cache.unit, dtype=np.int32)

    def rows_decoding(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that decode, int32 and intp, made anew only when the set changed."""
        if self.decode_rows is None:
            rows = np.fromiter(self.decoding, np.intp, len(self.decoding))
            self.decode_rows = (rows.astype(np.int32), rows)
        return self.decode_rows

    def caches(self, request: Request) -> bool:
        """Return whether a request's blocks may be found by others."""
        if request.asked.pooling is not None:
            return False
        return self.config.prefix_caching or request.asked.fanout is not None

    def new_chain(self, asked: GenerateRequest) -> Chain:
        """Return an empty chain for a request."""
        media = tuple([array_digest(a) for a in (asked.embeds, asked.positions) if a is not None])
        own = asked.adapter, asked.cache_salt, None if self.config.prefix_caching else asked.fanout, media
        if own != self.last_root[0]:
            root = PrefixRoot(
                model=self.config.model,
                layout=self.config.layout,
                adapter=asked.adapter,
                cache_salt=asked.cache_salt,
                fanout=own[2],
                media=media,
            )
            self.last_root = own, root.digest(self.cache.unit)
        return Chain(self.last_root[1], self.cache.unit, self.known)

    def publish_confirmed(self, row: int) -> None:
        """Name the blocks of a row that are complete, confirmed and not yet named."""
        table, begin = self.table, int(self.table.published[row])
        upto = int(table.confirmed[row]) // self.cache.unit * self.cache.unit
        if upto > begin and self.config.prefix_caching:
            chain = table.at(row).chain
            chain.extend(table.tokens[row], upto)
            self.cache.publish(row, chain.digests, begin, upto)
            table.published[row] = upto

    def settle(self) -> None:
        """Let go of the blocks of rows whose requests ended: the outside hears of an end before that is done."""
        if not self.left:
            return
        for row in self.left:
            self.cache.close(row)
        self.left.clear()
        self.stuck = False

    def leave_row(self, row: int, *, blocks_later: bool = False) -> Request:
        """Take the row of a running request away, with its blocks; the next plan tells the runner. ``blocks_later``:
        these go with ``settle``, which comes before anything else is decided."""
        self.prefilling.pop(row, None)
        if self.decoding.pop(row, row) is None:
            self.decode_rows = None
        flights = int(self.table.in_flight[row])
        request = self.table.stop(row)
        if flights:
            self.departed_plans[request.epoch] = flights
        if blocks_later:
            self.left.append(row)
        else:
            self.cache.close(row)
        self.stuck = False
        if any(start.row == row for start in self.starts):
            self.starts = [start for start in self.starts if start.row != row]
        elif request.state is State.RUNNING:
            self.ends.append(row)
        return request

    def preempt(self, row: int, *, keep: bool = True) -> Request:
        """Take a running request's row; it waits again and is computed anew, first what it had.

        Its tokens in flight are accepted before that, or dropped where ``keep`` is False: then they came of nothing.
        """
        if keep:
            self.publish_confirmed(row)
        request = self.wait_again(row)
        if request.departed:
            self.departed[request.epoch] = request
        if not keep:
            self.drop_flights(request)
        request.num_preemptions += 1
        self.totals.preemptions += 1
        return request

    def wait_again(self, row: int) -> Request:
        """Take a request's row; it waits again."""
        request = self.leave_row(row)
        request.state = State.WAITING
        self.waiting.append(request)
        return request

    def drop_flights(self, request: Request) -> None:
        """Drop what is in flight for a request that lost its row."""
        for epoch in request.departed:
            self.departed.pop(epoch, None)
        request.departed.clear()

    def finish(self, request: Request, end: Finished) -> Finished:
        """End a request wherever it is, let go of what it holds, and forget it."""
        if request.row >= 0:
            if end.reason != "error":
                self.publish_confirmed(request.row)
            self._pin(request)
            self.leave_row(request.row, blocks_later=end.reason != "error")
        elif request in self.waiting:
            self.waiting.remove(request)
        self.drop_flights(request)
        request.state = State.PINNED if request.request_id in self.pinned else State.FINISHED
        del self.requests[request.request_id]
        self._leave_fanout(request)
        self.totals.finished += 1
        return end

    def _pin(self, request: Request) -> None:
        if self.connector is None or request.state is not State.RUNNING:
            return
        places = self.cache.places(request.row)
        if self.connector.finished(request.request_id, int(self.table.confirmed[request.row]), places):
            self.pinned[request.request_id] = [(group, block) for group, _, block in places]
            for group, block in self.pinned[request.request_id]:
                self.cache.pool.hold(group, block)

    def release(self, request_id: int) -> None:
        """Nothing reads the blocks of an ended request any more."""
        self.stuck = False
        for group, block in self.pinned.pop(request_id, ()):
            self.cache.pool.drop(group, block)

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


def array_digest(array: np.ndarray) -> bytes:
    """Return a content hash of an array: its type, shape and bytes."""
    state = hashlib.blake2b(f"{array.dtype.str}{array.shape}".encode(), digest_size=DIGEST_BYTES)
    state.update(np.ascontiguousarray(array).tobytes())
    return state.digest()
