"""A request's counters, and the only place where they change. Counters of running requests are numpy arrays by row.

For a running row:  confirmed <= reserved.  ``confirmed``: tokens whose cache entries are valid, as the host knows;
``reserved``: their upper bound once all plans in flight are done; ``known``: tokens whose values the host knows;
``target``: tokens that prefill must compute (all that were known when the row started). A row is in prefill while
reserved < target, and decodes after. A step that computes up to position c - 1 draws the token of index c.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from drivetrain.cache.prefix import Chain
from drivetrain.params import Finished, GenerateRequest
from drivetrain.sched.grammar import GrammarSession

NO_EPOCH = 0
STOP_SLOTS = 8
NEVER = 1 << 30


class State(Enum):
    """Where a request is."""

    WAITING = "waiting"
    WAITING_REMOTE = "waiting for remote blocks"
    RUNNING = "running"
    PINNED = "finished, blocks still read"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. ``tokens`` while it has no row: prompt and what was generated before it lost its row."""

    asked: GenerateRequest
    order: int
    chain: Chain
    tokens: np.ndarray
    grammar: GrammarSession | None = None
    state: State = State.WAITING
    row: int = -1
    epoch: int = NO_EPOCH
    limit: int = 0
    num_preemptions: int = 0
    skipped: int = 0
    started: bool = False
    num_cached: int = 0
    remote_tokens: int = 0
    departed: set[int] = field(default_factory=set)  # epochs of lost rows that still have plans in flight
    hint: int = -1  # tokens that the cache had when it was last asked (-1: never); a policy's estimate, nothing more
    doom: Finished | None = None  # how it ends once what is loading for it has arrived
    again: bool = False  # it waits anew once that has arrived: what its row began with turned out to be nothing

    @property
    def request_id(self) -> int:
        """Its number."""
        return self.asked.request_id

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.asked.prompt_ids)


class RequestTable:
    """Counters of running requests, by row; ``requests[row]`` is the request or None."""

    def __init__(self, max_rows: int, max_tokens: int, max_adjusted: int = 0) -> None:
        self.max_rows = max_rows
        self.requests: list[Request | None] = [None] * max_rows
        self.request_id = np.zeros(max_rows, np.int64)
        self.epoch = np.full(max_rows, NO_EPOCH, np.int32)
        self.confirmed = np.zeros(max_rows, np.int32)
        self.reserved = np.zeros(max_rows, np.int32)
        self.known = np.zeros(max_rows, np.int32)
        self.target = np.zeros(max_rows, np.int32)
        self.limit = np.zeros(max_rows, np.int32)
        self.published = np.zeros(max_rows, np.int32)  # tokens whose blocks were offered to the index, or NEVER
        self.in_flight = np.zeros(max_rows, np.int32)
        self.late = np.zeros(max_rows, bool)
        self.unsampled = np.zeros(max_rows, bool)  # a late row whose last plan has not been sampled
        self.num_late = 0
        self.stops = np.full((STOP_SLOTS, max_rows), -1, np.int32)
        self.stops_used = 1  # slots of ``stops`` that any request has ever used
        self.many_stops: dict[int, frozenset[int]] = {}
        self.tokens = np.zeros((max_rows, max_tokens + 1), np.int32)
        self._flat, self._stride = self.tokens.reshape(-1), max_tokens + 1
        self._free = list(range(max_rows - 1, -1, -1))
        self.slot = np.full(max_rows, -1, np.int32)  # where what changes the row's logits lies; -1: nothing does
        self._max_slots = max_adjusted
        self._free_slots = list(range(max_adjusted - 1, -1, -1))
        self._next_epoch = NO_EPOCH + 1

    @property
    def num_free(self) -> int:
        """Rows that no request has."""
        return len(self._free)

    def has_slot(self, request: Request) -> bool:
        """Return whether there is a slot for a request, or it needs none."""
        return bool(self._free_slots) or not request.asked.adjusts

    def start(self, request: Request, computed: int) -> int:
        """Give a request a row and a new epoch; ``computed`` of its tokens are valid in the cache."""
        row = self._free.pop()
        known = len(request.tokens)
        self.requests[row] = request
        request.row, request.epoch = row, self._next_epoch
        self._next_epoch += 1
        self.request_id[row] = request.request_id
        self.epoch[row] = request.epoch
        self.confirmed[row] = self.reserved[row] = computed
        self.known[row] = self.target[row] = known
        self.limit[row] = request.limit
        self.published[row] = NEVER
        self.in_flight[row] = 0
        self.late[row] = request.grammar is not None
        self.num_late += request.grammar is not None
        self.unsampled[row] = False
        if request.asked.adjusts:
            self.slot[row] = self._free_slots.pop()
        self.tokens[row, :known] = request.tokens
        stops = stop_ids(request.asked)
        self.stops[:, row] = -1
        if len(stops) > STOP_SLOTS:
            self.many_stops[row] = frozenset(stops)
        else:
            self.stops[: len(stops), row] = stops
            self.stops_used = max(self.stops_used, len(stops))
        return row

    def stop(self, row: int) -> Request:
        """Take a request's row away; what is in flight for its epoch is no longer matched by the arrays."""
        request = self.requests[row]
        assert request is not None
        request.tokens = self.tokens[row, : self.known[row]].copy()
        if self.in_flight[row]:
            request.departed.add(request.epoch)
        request.row = -1
        self.requests[row] = None
        self.epoch[row] = NO_EPOCH
        self.num_late -= request.grammar is not None
        self.many_stops.pop(row, None)
        self._free.append(row)
        if self.slot[row] >= 0:
            self._free_slots.append(int(self.slot[row]))
            self.slot[row] = -1
        return request

    def at(self, row: int) -> Request:
        """Return the request of a row that has one."""
        request = self.requests[row]
        assert request is not None, f"row {row} has no request"
        return request

    def arrived(self, row: int, valid: int) -> None:
        """What was loading for a row has come: so many of its tokens are valid now."""
        self.confirmed[row] = self.reserved[row] = valid

    def reserve(self, rows: np.ndarray, bounds: np.ndarray) -> None:
        """A plan computes tokens for each row, so that it holds at most ``bounds`` when the plan is done."""
        self.reserved[rows] = bounds
        self.in_flight[rows] += 1

    def confirm(self, rows: np.ndarray, num_new: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """A plan is done: of ``num_new`` tokens computed for each row, ``kept`` stay valid; returns what is valid."""
        confirmed: np.ndarray = self.confirmed[rows] + kept
        self.confirmed[rows] = confirmed
        if kept is not num_new:
            self.reserved[rows] -= num_new - kept
        self.in_flight[rows] -= 1
        return confirmed

    def give_up(self, rows: np.ndarray) -> None:
        """A plan failed: it is not in flight any more, and computed nothing."""
        self.in_flight[rows] -= 1

    def append(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """One drawn token of each row becomes known; returns how many each knows."""
        known: np.ndarray = self.known[rows]
        self._flat[rows * self._stride + known] = tokens
        known += 1
        self.known[rows] = known
        return known

    def stops_at(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return for each row whether its token ends it, bool [n]."""
        found: np.ndarray = self.stops[0][rows] == tokens
        for slot in range(1, self.stops_used):
            found |= self.stops[slot][rows] == tokens
        for row, ends in self.many_stops.items():
            for i in np.flatnonzero(rows == row).tolist():
                found[i] = int(tokens[i]) in ends
        return found

    def check_integrity(self) -> None:
        """AssertionError naming the first row whose counters contradict each other."""
        taken = [row for row, request in enumerate(self.requests) if request is not None]
        assert sorted([*taken, *self._free]) == list(range(self.max_rows)), "rows lost or doubled"
        slots = [int(slot) for slot in self.slot if slot >= 0]
        assert sorted([*slots, *self._free_slots]) == list(range(self._max_slots)), "slots lost or doubled"
        for row in taken:
            request = self.requests[row]
            assert request is not None and request.row == row and request.epoch == self.epoch[row], f"row {row}: epoch"
            counts = (self.confirmed[row], self.reserved[row], self.known[row], self.limit[row])
            assert 0 <= counts[0] <= counts[1], f"row {row}: confirmed {counts[0]}, reserved {counts[1]}"
            assert counts[0] <= counts[2] <= counts[3], f"row {row}: known {counts[2]} of {counts[3]}"
            assert counts[1] < counts[3] or request.asked.pooling is not None, f"row {row}: reserved beyond the limit"
            assert self.in_flight[row] or counts[0] == counts[1], f"row {row}: nothing in flight, but reserved"


def stop_ids(asked: GenerateRequest) -> tuple[int, ...]:
    """Return the tokens that end a request."""
    ends = () if asked.sampling.ignore_eos else asked.eos_ids
    return (*ends, *asked.sampling.stop_token_ids)
