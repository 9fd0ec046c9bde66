"""What the loop asks of whatever runs its plans. No torch here: the loop imports this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from drivetrain.sched.plan import LateInput, StepPlan, StepResult


class Executor(Protocol):
    """Runs plans in the order in which they are submitted; at most ``depth`` may be unpolled."""

    @property
    def depth(self) -> int:
        """Plans that may be in flight at once."""

    @property
    def recycles(self) -> bool:
        """Whether any of its caches wants plans to name the blocks that became void."""

    def forward(self, plan: StepPlan) -> None:
        """Submit a plan. Never waits for the device; what fails comes back as the plan's result."""

    def sample(self, plan_id: int, late: LateInput | None) -> None:
        """Sample: first with None (all rows but the plan's late ones), then, if it has late rows, with their
        input.

        Late input names every late row of the plan that is still alive; others are given up and draw nothing.
        """

    def poll(self, wait: bool) -> StepResult | None:
        """Return the oldest plan's result, waiting for it if asked; None while it is not complete.

        A plan whose late rows have not all been sampled is not complete, whatever ``wait`` says.
        """

    def later(self) -> bool:
        """Do one piece of work that was put off at the start, without waiting for the device. Returns whether there was
        any."""

    def figures(self) -> Mapping[str, int]:
        """Return counts of what was put off and of memory, by the names of ``server.messages.Stats``; cheap."""

    def close(self) -> None:
        """Forget what is in flight and free the device's memory."""
