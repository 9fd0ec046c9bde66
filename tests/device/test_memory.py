"""Memory after ready, on the device's own allocator: a step's bytes stay held, running out of memory is survived."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drivetrain.runner.reserve import MARGIN, MIB, Reserve
from drivetrain_api.v1 import ErrorClass

pytestmark = pytest.mark.device
STEP = 256 * MIB


def test_the_largest_step_is_held_for_pieces_of_other_sizes(backend) -> None:
    if backend.capabilities.shared_host_memory:
        pytest.skip("a host's memory is not held ahead")
    reserve = Reserve(backend)
    reserve.plan(graphs=0, step=STEP)
    reserve.renew()
    if reserve._open == STEP:
        pytest.skip("this allocator keeps nothing; captures leave the step's bytes alone instead")
    before = reserve.free()
    pieces = [backend.device.empty((STEP // 4,), torch.uint8) for _ in range(4)]
    assert before - reserve.free() <= MARGIN
    del pieces
    assert before - reserve.free() <= MARGIN
    reserve.clear()
    assert reserve.free() - before >= STEP - MARGIN


def test_a_run_that_asks_for_too_much_is_done_again(backend) -> None:
    too_much, runs = 2 * backend.device.memory().total, []

    def run() -> int:
        runs.append(1)
        return backend.device.empty((too_much if len(runs) == 1 else 8,), torch.uint8).numel()

    reserve = Reserve(backend)
    if backend.capabilities.shared_host_memory:
        pytest.skip("a host promises more than it has")
    assert reserve.once_more(run) == 8 and reserve.retried == 1


def test_a_capture_that_asks_for_too_much_leaves_others_as_they_are(backend) -> None:
    runtime, graphs = backend.device, backend.graphs
    if graphs is None:
        pytest.skip("no graphs")
    too_much = 2 * runtime.memory().total
    x = runtime.from_host(np.arange(8, dtype=np.float32))
    _ = x * 2, x + 3  # whatever is loaded at first use
    first, doubled = graphs.capture(lambda: x * 2)
    with pytest.raises(Exception) as raised:
        graphs.capture(lambda: (x + 3, runtime.empty((too_much,), torch.uint8)))
    assert runtime.classify_error(raised.value) is ErrorClass.OUT_OF_MEMORY
    Reserve(backend).renew()
    second, more = graphs.capture(lambda: x + 3)
    first.replay()
    second.replay()
    found = runtime.to_host([doubled, more]).get()
    assert found[0].tolist() == [2.0 * i for i in range(8)] and found[1].tolist() == [3.0 + i for i in range(8)]
    first.release()
    second.release()
