"""Order: streams, events, copies to the host, counters, graphs."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch

from drivetrain_mirage.device import DeviceOptions, MirageDevice
from drivetrain_mirage.graphs import MAX_GRAPHS, MirageGraphs
from drivetrain_mirage.rules import RuleError
from drivetrain_mirage.runtime import MirageRuntime
from drivetrain_mirage.streams import Pace


def test_calls_return_before_the_work_is_done(runtime, stall):
    stall(0.2)
    x = runtime.zeros((3,), torch.float32) + 1
    event, copy = runtime.stream().record(), runtime.to_host([x])
    assert not event.done() and not copy.ready()
    assert copy.get()[0].tolist() == [1, 1, 1]
    assert event.done() and copy.ready()


def test_a_stream_does_not_wait_for_another_unless_told(runtime, stall):
    first, second = runtime.stream(), runtime.new_stream()

    def run(ordered: bool) -> float:
        stall(0.2)
        x = runtime.zeros((1,), torch.float32) + 5
        if ordered:
            second.wait_event(first.record())
        with runtime.use(second):
            copy = runtime.to_host([x + 1])
        return float(copy.get()[0][0])

    assert math.isnan(run(ordered=False)), "an unordered read must see garbage"
    assert run(ordered=True) == 6.0
    assert runtime.stream().work is first.work


def test_pauses_are_seeded_and_change_nothing():
    def run(seed: int) -> list[float]:
        runtime = MirageRuntime(MirageDevice(DeviceOptions(pace=Pace(share=0.5, seed=seed))))
        x = runtime.from_host(np.ones(4, np.float32))
        for _ in range(60):
            x = x * 1.01 + 0.1
        (value,) = runtime.to_host([x]).get()
        runtime.owner.close()
        return value.tolist()

    assert run(1) == run(2)


def test_waits_and_copies_are_counted(runtime, stall):
    x = runtime.zeros((2,), torch.float32)
    runtime.synchronize()
    before = runtime.counters()
    stall(0.1)
    runtime.upload(np.ones(2, np.float32), x)
    runtime.from_host(np.ones(2, np.float32))
    copy = runtime.to_host([x, x])
    assert runtime.counters().waits == before.waits
    copy.get()
    copy.get()  # the second finds it done
    after = runtime.counters()
    assert after.waits - before.waits == 1
    assert after.copies_to_host - before.copies_to_host == 1
    assert after.copies_to_device - before.copies_to_device == 2
    event = runtime.stream().record()
    while not event.done():
        pass
    event.wait()
    assert runtime.counters().waits == after.waits, "a wait for something done is no wait"


def test_a_copy_holds_the_values_of_its_own_time(runtime):
    x = runtime.zeros((2,), torch.float32)
    early = runtime.to_host([x])
    x.add_(1)
    late = runtime.to_host([x])
    assert late.get()[0].tolist() == [1, 1] and early.get()[0].tolist() == [0, 0]


def test_a_host_copy_gives_its_values_by_get_alone(runtime, stall):
    stall(0.1)
    copy = runtime.to_host([runtime.zeros((2,), torch.float32)])
    assert [name for name in dir(copy) if not name.startswith("_")] == ["get", "ready"]
    copy.get()


def test_memory_counts_living_storages(runtime):
    x = runtime.zeros((1000,), torch.float32)
    view = x.view(10, 100)[2:, :3]
    assert runtime.memory().allocated == 4000
    y = view + 1
    assert runtime.memory().allocated == 4000 + 8 * 3 * 4
    del x, y
    assert runtime.memory().allocated == 4000, "a view keeps its base's bytes"
    del view
    gc.collect()
    now = runtime.memory()
    assert now.allocated == 0 and now.peak == 4096 and now.total == 64 << 20 and now.free == now.total
    runtime.reset_peak()
    assert runtime.memory().peak == 0
    weights = np.ones((256, 256), np.float32)
    held = runtime.from_host(weights)
    assert runtime.memory().peak == weights.nbytes, "an upload is never held twice"
    weights[:] = 0
    assert runtime.to_host([held]).get()[0].all(), "the source is free when from_host returns"


# -- graphs --------------------------------------------------------------------------------------------------


def test_a_graph_records_without_running_and_replays_over_the_same_memory(runtime):
    graphs = MirageGraphs(runtime.owner)
    x, total = runtime.zeros((3,), torch.float32), runtime.zeros((3,), torch.float32)

    def run():
        y = (x * 2).view(1, 3)
        total.add_(y[0])
        return y + 1

    graph, out = graphs.capture(run)
    runtime.synchronize()
    assert torch.isnan(out.raw).all() and (total.raw == 0).all(), "a capture runs nothing"
    for value in (1.0, 2.0, 3.0):
        runtime.upload(np.full(3, value, np.float32), x)
        graph.replay()
        assert runtime.to_host([out]).get()[0].tolist() == [[2 * value + 1] * 3]
    assert runtime.to_host([total]).get()[0].tolist() == [12.0] * 3


def test_a_graph_holds_its_memory_until_released(runtime):
    graphs = MirageGraphs(runtime.owner)
    x = runtime.zeros((1000,), torch.float32)
    graph, out = graphs.capture(lambda: ((x * 2) + 1) * 3)
    assert runtime.memory().allocated == 4 * 4000
    graph.release()
    assert runtime.memory().allocated == 2 * 4000
    with pytest.raises(RuleError, match="released-graph"):
        graph.replay()
    del out


def test_four_graphs_at_most(runtime):
    graphs = MirageGraphs(runtime.owner)
    x = runtime.zeros((2,), torch.float32)
    made = [graphs.capture(lambda: x + 1)[0] for _ in range(4)]
    assert graphs.budget.max_graphs == MAX_GRAPHS == 4
    with pytest.raises(RuleError, match="four-graphs"):
        graphs.capture(lambda: x + 1)
    made[0].release()
    made[0].release()
    graphs.capture(lambda: x + 1)
    with pytest.raises(RuleError, match="four-graphs"):
        graphs.capture(lambda: x + 1)


def test_a_capture_that_fails_leaves_nothing_behind(runtime):
    graphs = MirageGraphs(runtime.owner)
    x = runtime.zeros((2,), torch.float32)
    with pytest.raises(RuleError):
        graphs.capture(lambda: (x + 1)[0].item())
    assert graphs.count == 0
    assert runtime.to_host([x + 1]).get()[0].tolist() == [1, 1]


WAITS = {
    "to_host": lambda r, x: r.to_host([x]),
    "upload": lambda r, x: r.upload(np.zeros(2, np.float32), x),
    "from_host": lambda r, x: r.from_host(np.zeros(2, np.float32)),
    "synchronize": lambda r, x: r.synchronize(),
    "event": lambda r, x: r.stream().record(),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_capture_neither_waits_nor_copies(runtime, name):
    x = runtime.zeros((2,), torch.float32)
    with pytest.raises(RuleError, match="no-waits-in-capture"):
        MirageGraphs(runtime.owner).capture(lambda: WAITS[name](runtime, x))
