"""The step loop. One step = one plan: schedule -> forward -> sample -> result -> commit.

    while in_flight < depth: submit(schedule())     # plan N+1 while N runs
    commit(poll())                                  # the oldest result first

The scheduler decides which tokens are computed (``sched/scheduler.py``), owns every counter of a request
(``sched/request.py``) and, through the cache manager, every block. The runner decides nothing: it runs plans in
order and draws tokens. A plan is submitted twice: ``forward`` at once, ``sample`` when its late input is known.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain.dist.executor import Executor
from drivetrain.moments import passed
from drivetrain.params import GenerateRequest, StepOutputs
from drivetrain.sched.grammar import GrammarSession
from drivetrain.sched.plan import StepPlan
from drivetrain.sched.scheduler import Scheduler, SchedulerStats

LATER_SHARE = 0.05
REST_SECONDS = 0.1


@dataclass(slots=True)
class Flight:
    """A plan under way. ``late_pending``: its late rows have not been sampled yet."""

    plan: StepPlan
    late_pending: bool


class Loop:
    """The only caller of the scheduler and the executor of one replica. Not thread-safe: one thread owns it."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; at least one step must be in flight")
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self._flights: deque[Flight] = deque()
        self._steps = 0
        self._put_off = True
        self._owed = False  # some of it, since the last step
        self._later_at = 0.0
        self._rested_at = time.perf_counter() + REST_SECONDS

    def submit(self, request: GenerateRequest, grammar: GrammarSession | None = None) -> None:
        """Queue a request. RequestError when it can never be served; nothing else is disturbed."""
        self.scheduler.add(request, grammar)
        passed("admitted")

    def abort(self, request_id: int) -> None:
        """End a request; its tokens in flight are dropped. Unknown ids are ignored: it may just have finished."""
        self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """Return whether ``step`` would do anything."""
        return bool(self._flights) or self.scheduler.has_work()

    def step(self) -> tuple[StepOutputs, ...]:
        """Fill the pipeline, then commit the oldest result. Returns what the outside must hear, in order."""
        self.fill()
        if self._owed:
            self._work_off()
        outputs = self.scheduler.take_events()
        if self._flights:
            self._sample_late()
            outputs = (*outputs, self._commit_oldest())
            self._sample_late()
            if self._put_off:
                self._owed, self._rested_at = True, time.perf_counter() + REST_SECONDS
        return outputs

    def fill(self) -> None:
        """Let the device have as many plans as may be in flight; ``step`` begins with it."""
        while len(self._flights) < self.depth and (plan := self.scheduler.schedule()) is not None:
            self._submit(plan)

    def settle(self) -> None:
        """Tidy up after requests that ended, and do some of what was put off; called once a step's tokens are told.
        Without a call the next step does that part, while the device works on it."""
        self.scheduler.settle()
        if self._owed:
            self._work_off()

    def rest(self) -> float:
        """Called when there is no work. Without work for ``REST_SECONDS``, one piece of what was put off is done: soon
        after a request another may come, and would wait for it. Returns in how many seconds to call again."""
        if not self._put_off:
            return math.inf
        left = self._rested_at - time.perf_counter()
        if left > 0.0:
            return left
        return 0.0 if self.idle() else math.inf

    def idle(self) -> bool:
        """Do one piece of what was put off. Returns whether there may be more."""
        self._put_off = self._put_off and self.executor.later()
        return self._put_off

    def _work_off(self) -> None:
        """The same between steps, for at most ``LATER_SHARE`` of the time."""
        self._owed = False
        begin = time.perf_counter()
        if begin >= self._later_at:
            self.idle()
            end = time.perf_counter()
            self._later_at = end + (end - begin) / LATER_SHARE
            self._rested_at = end + REST_SECONDS

    def _submit(self, plan: StepPlan) -> None:
        passed("planned")
        self.executor.forward(plan)
        self.executor.sample(plan.plan_id, None)
        passed("copy queued")
        self._flights.append(Flight(plan, bool(plan.late_rows)))

    def _sample_late(self) -> None:
        """Submit the late input of every plan, oldest first, whose earlier tokens are all known to the host."""
        for flight in self._flights:
            if flight.late_pending:
                late = self.scheduler.late_input(flight.plan)
                if late is None:
                    return
                self.executor.sample(flight.plan.plan_id, late)
                flight.late_pending = False

    def _commit_oldest(self) -> StepOutputs:
        passed("waiting")
        result = self.executor.poll(wait=True)
        passed("copied")
        flight = self._flights.popleft()
        assert result is not None and result.plan_id == flight.plan.plan_id, "results come in the order of plans"
        self._steps += 1
        outputs = self.scheduler.commit(flight.plan, result)
        passed("committed")
        return outputs

    @property
    def in_flight(self) -> int:
        """Plans submitted and not yet committed."""
        return len(self._flights)

    @property
    def steps(self) -> int:
        """Plans committed since the loop was made."""
        return self._steps

    def stats(self) -> SchedulerStats:
        """Return the present figures; all gauges are 0 when nothing is queued or running."""
        return self.scheduler.stats()

    def figures(self) -> Mapping[str, int]:
        """Return the executor's figures."""
        return self.executor.figures()

    def check_integrity(self) -> None:
        """Raise AssertionError naming the first inconsistency of blocks, slabs, index and counters."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Drop what is in flight and release the device."""
        self._flights.clear()
        self.executor.close()
