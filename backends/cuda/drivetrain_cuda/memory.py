"""Memory in use as the card reports it: torch's allocator sees neither the context nor loaded code nor graphs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from drivetrain_api.v1 import Baseline, DeviceRuntime, generic_profiler

GRAPH_BYTES = 1 << 20  # of one graph: its nodes and their arguments
CODE_BYTES = 224 << 20  # kernels and cuBLAS, loaded with the first steps: 194 MiB with 28 buckets' graphs, measured


class CudaMemory:
    """``MemoryProfiler`` over the card's own figures."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self.measure = generic_profiler(runtime).measure

    def baseline(self) -> Baseline:
        """The context of this process is what the card has in use now, tensors of an engine beside this one included;
        another process's share can't be told from it and is counted with it."""
        device = self._runtime.device
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Baseline(context=total - free - idle + CODE_BYTES, others=0, total=total)

    def peak_in_use(self) -> int:
        """What lies outside torch's allocator now, and the most that it has held."""
        device = self._runtime.device
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        return outside + torch.cuda.max_memory_reserved(device)

    def graph_estimate(self, num_graphs: int, largest_tokens: int) -> Mapping[str, int]:
        """Nodes and arguments; activations are the core's to count."""
        return {"bytes": num_graphs * GRAPH_BYTES}
