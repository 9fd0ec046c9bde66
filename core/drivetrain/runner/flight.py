"""A plan in flight: what the runner keeps of it between submission and result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.models.step import Carry
    from drivetrain.runner.graphs import Captured
    from drivetrain.runner.pooling import Pooled
    from drivetrain.runner.sampler import SampleSet
    from drivetrain.sched.plan import StepPlan
    from drivetrain_api.v1 import Event, HostCopy


@dataclass(slots=True)
class InFlight:
    """A plan between ``forward`` and ``poll``. ``late``: its late rows, until they have been sampled."""

    plan: StepPlan
    parts: list[SampleSet] = field(default_factory=list)
    early: SampleSet | None = None
    late: SampleSet | None = None
    pooled: list[Pooled] = field(default_factory=list)
    pooled_copy: HostCopy | None = None
    carry: Carry | None = None
    captured: Captured | None = None
    facts: int = 0
    done: Event | None = None
    sampled: bool = False
    failure: str = ""
    failure_class: str = ""

    def sets(self) -> list[tuple[str, SampleSet]]:
        """Return the sets of rows that sample, each with the prefix of its arrays' names."""
        named = (("early.", self.early), ("late.", self.late))
        return [(prefix, part) for prefix, part in named if part is not None]

    def ready(self) -> bool:
        """Return whether the device has finished what was submitted for sampling."""
        copies = [part.copy for part in self.parts] + [self.pooled_copy]
        done = self.done is None or self.done.done()
        return done and all(copy is None or copy.ready() for copy in copies)
