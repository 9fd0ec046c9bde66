"""CUDA graphs. All share one memory pool: only one of them runs at a time, and what a recorded callable returned stays
allocated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from drivetrain_api.v1 import Graph, GraphBudget


class CudaGraph:
    """One recorded run."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self.replay = graph.replay

    def release(self) -> None:
        """Free it."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
            self.replay = _released


def _released() -> None:
    raise RuntimeError("a released graph was replayed")


class CudaGraphs:
    """``Graphs`` of one device."""

    budget = GraphBudget()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device=device)

    def capture(self, run: Callable[[], Any]) -> tuple[Graph, Any]:
        """Record on a stream of its own, beside whatever runs; other threads may use the device meanwhile.

        ``torch.cuda.graph`` would wait for the device, collect garbage and empty the cache first: too long a pause
        between two steps, and nothing here needs it.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return CudaGraph(graph), result

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture whose run failed. What ending it then says only follows from that; and the pool may be left
        as one that is being recorded to, which no other capture can use."""
        self._pool = torch.cuda.graph_pool_handle()
        with suppress(RuntimeError):
            graph.capture_end()
