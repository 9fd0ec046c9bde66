"""Executors of one process: a runner as it is, and a pipeline of runners that each hold some of the
layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from drivetrain.errors import ConfigError
from drivetrain.runner.caches import recycles
from drivetrain.runner.dummies import capture_missing

if TYPE_CHECKING:
    from drivetrain.models.step import Carry
    from drivetrain.runner.runner import Runner
    from drivetrain.sched.plan import LateInput, StepPlan, StepResult


class InlineExecutor:
    """One runner, in the loop's own process and thread."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.poll = runner.poll
        self.later = partial(capture_missing, runner)
        self.close = runner.close

    def forward(self, plan: StepPlan) -> None:
        """Run a plan's layers."""
        self.runner.forward(plan)

    def sample(self, plan_id: int, late: LateInput | None) -> None:
        """Draw for the rows that can."""
        self.runner.sample(plan_id, late)

    def figures(self) -> dict[str, int]:
        """Graphs: captured, in all, given up, bytes planned and taken; parts of steps done again for want of memory."""
        graphs, reserve = self.runner.graphs, self.runner.reserve
        return {
            "graphs_captured": graphs.count,
            "graphs_wanted": graphs.wanted,
            "graphs_given_up": graphs.given_up,
            "graphs_planned_bytes": reserve.planned,
            "graphs_measured_bytes": reserve.taken,
            "memory_retries": reserve.retried,
            "memory_least_free_bytes": reserve.least_free,
            "memory_given_back_bytes": 0 if reserve.giving is None else reserve.giving.given,
        }

    @property
    def depth(self) -> int:
        """Plans that may be in flight at once."""
        return self.runner.config.depth

    @property
    def recycles(self) -> bool:
        """Whether any cache wants to know which blocks are void."""
        return recycles(self.runner.caches)


@dataclass(slots=True)
class _Item:
    """A plan on its way: ``stage``, the next stage to run it; its sampling calls wait for the last one."""

    plan: StepPlan
    stage: int = 0
    carry: Carry | None = None
    calls: deque[LateInput | None] = field(default_factory=deque)
    drawn: int = 0

    def rows_undrawn(self) -> set[int]:
        """Rows whose next token this plan has yet to draw."""
        if self.drawn == 0:
            return set(self.plan.rows.tolist())
        return set() if self.drawn > 1 else {int(self.plan.rows[i]) for i in self.plan.late_rows}


class StagedExecutor:
    """A pipeline inside one process. Stage s runs plan n while stage s + 1 runs plan n - 1, in the order of
    plans.

    The first stage holds a plan back while one of its rows is still to be drawn by an earlier plan: on
    separate devices it would wait for those tokens to arrive. Each stage has rows and caches of its own; what
    the last stage draws is handed to all others as a ``RowUpdate``.
    """

    def __init__(self, stages: Sequence[Runner], depth: int) -> None:
        """``stages`` in order. ConfigError unless the first, and only the last, end the model, and depth
        fits."""
        self._stages = tuple(stages)
        self._depth = depth
        ends = [(s.config.first, s.config.last) for s in stages]
        wanted = [(i == 0, i == len(stages) - 1) for i in range(len(stages))]
        if ends != wanted:
            raise ConfigError(f"stages are (first, last) = {ends}", fix=f"give runners configured as {wanted}")
        if any(s.config.depth < depth for s in stages):
            raise ConfigError(f"a stage has a smaller depth than {depth}", fix=f"configure every stage with {depth}")
        self._items: deque[_Item] = deque()

    @property
    def depth(self) -> int:
        """Plans that may be in flight at once; stages + 1 keeps every stage busy."""
        return self._depth

    @property
    def recycles(self) -> bool:
        """Whether any stage's cache wants to know which blocks are void."""
        return any(recycles(stage.caches) for stage in self._stages)

    def forward(self, plan: StepPlan) -> None:
        """Enter a plan into the pipeline and advance it by one beat."""
        self._items.append(_Item(plan))
        self._beat()

    def sample(self, plan_id: int, late: LateInput | None) -> None:
        """Note what the last stage is to sample; done as soon as the plan has reached it."""
        item = next((i for i in self._items if i.plan.plan_id == plan_id), None)
        if item is None:
            raise ValueError(f"plan {plan_id} is not in flight")
        item.calls.append(late)
        self._draw(item)

    def poll(self, wait: bool) -> StepResult | None:
        """Return the oldest plan's result; with ``wait`` the pipeline beats until it is there."""
        if not self._items:
            return None
        item = self._items[0]
        while wait and item.stage < len(self._stages) and self._beat():
            pass
        if item.stage < len(self._stages):
            return None
        result = self._stages[-1].poll(wait)
        if result is None:
            return None
        for stage in reversed(self._stages[:-1]):
            failed = stage.poll(wait)
            if failed is not None and failed.failure:
                result = failed  # what failed first; later stages only missed its carry
        self._items.popleft()
        return result

    def later(self) -> bool:
        """Nothing is put off: stages capture no graphs."""
        return False

    def figures(self) -> dict[str, int]:
        """None: stages capture no graphs."""
        return {}

    def close(self) -> None:
        """Close every stage."""
        self._items.clear()
        for stage in self._stages:
            stage.close()

    def _beat(self) -> bool:
        """Let every stage run at most one plan, all at once as far as a plan can tell. Returns whether any did."""
        ready = [
            item
            for number in reversed(range(len(self._stages)))
            if (item := next((i for i in self._items if i.stage <= number), None)) is not None
            and item.stage == number
            and not (number == 0 and self._waits(item))
        ]
        for item in ready:
            item.carry = self._stages[item.stage].forward(item.plan, item.carry)
            item.stage += 1
        for item in ready:
            self._draw(item)
        return bool(ready)

    def _waits(self, item: _Item) -> bool:
        rows = set(item.plan.rows.tolist())
        for earlier in self._items:
            if earlier is item:
                return False
            if rows & earlier.rows_undrawn():
                return True
        return False

    def _draw(self, item: _Item) -> None:
        if item.stage < len(self._stages):
            return
        while item.calls:
            update = self._stages[-1].sample(item.plan.plan_id, item.calls.popleft())
            item.drawn += 1
            if update is not None:
                for stage in self._stages[:-1]:
                    stage.update_rows(update)
