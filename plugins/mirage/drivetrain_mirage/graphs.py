"""Graph capture: queued work is recorded instead of run, and replayed over the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain_api.v1 import Graph, GraphBudget

from .device import MirageDevice
from .ledger import Slab
from .rules import RuleError
from .streams import Work, run_all

MAX_GRAPHS = 4


class MirageGraph:
    """Recorded work and the memory that it was recorded over."""

    def __init__(self, owner: MirageGraphs, works: list[Work], slabs: list[Slab]) -> None:
        self._owner = owner
        self._works: list[Work] | None = works
        self._slabs = slabs

    def replay(self) -> None:
        if self._works is None:
            raise RuleError("released-graph", "a released graph was replayed", "capture it again")
        self._owner.device.launch(run_all, (self._works,), None)

    def release(self) -> None:
        if self._works is not None:
            self._works = None
            self._slabs = []
            self._owner.count -= 1


class MirageGraphs:
    """``Graphs`` with a small budget. ``may_capture`` is asked before each capture (static shapes)."""

    budget = GraphBudget(max_graphs=MAX_GRAPHS)

    def __init__(self, device: MirageDevice, may_capture: Callable[[], None] = lambda: None) -> None:
        self.device = device
        self.count = 0
        self._may_capture = may_capture

    def capture(self, run: Callable[[], Any]) -> tuple[Graph, Any]:
        self._may_capture()
        if self.count >= MAX_GRAPHS:
            raise RuleError(
                "four-graphs", f"{self.count} graphs exist and another was captured", "release one, or capture fewer"
            )
        stream = self.device.current
        self.device.refuse_in_capture("capture")
        works: list[Work] = []
        slabs: list[Slab] = []
        stream.record, self.device.captured = works, slabs
        try:
            result = run()
        finally:
            stream.record = self.device.captured = None
        self.count += 1
        return MirageGraph(self, works, slabs), result
