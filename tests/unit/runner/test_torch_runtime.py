"""The runtimes composed over torch: where host memory for copies comes from, and that a copy is one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drivetrain_api.v1 import torch_runtime

MARK = 7


class FakeEvent:
    def __init__(self) -> None:
        self.finished = False

    def query(self) -> bool:
        return self.finished

    def synchronize(self) -> None:
        self.finished = True


class FakeModule:
    """A device module with streams whose tensors lie on the host."""

    Stream = SimpleNamespace
    device = staticmethod(nullcontext)

    def __init__(self) -> None:
        self.events: list[FakeEvent] = []

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(record_event=self._record)

    def _record(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]


class Locked:
    """Makes host tensors, never zeroed, and remembers them."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(shape, tuple)
        self.made.append(torch.full(shape, MARK, dtype=dtype))
        return self.made[-1]


@pytest.fixture
def module(monkeypatch) -> FakeModule:
    made = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


def test_buffers_lie_in_the_vendors_memory_and_are_zeroed(module) -> None:
    locked = Locked()
    runtime = torch_runtime("cuda", 0, host=locked)
    assert runtime.asynchronous
    buffer = runtime.host_buffer((2, 3), "int32")
    assert buffer.dtype == np.int32 and buffer.tolist() == [[0, 0, 0], [0, 0, 0]]
    (tensor,) = locked.made
    tensor[1, 2] = 5
    assert buffer[1, 2] == 5, "the buffer is that memory, not a copy of it"


def test_copies_to_the_host_lie_there_too_and_are_waited_for_once(module) -> None:
    locked = Locked()
    runtime = torch_runtime("cuda", 0, host=locked)
    sources = torch.arange(4), torch.ones(2, 3)
    copy = runtime.to_host(sources)
    assert [(t.shape, t.dtype) for t in locked.made] == [(t.shape, t.dtype) for t in sources]
    assert not copy.ready() and runtime.counters().waits == 0
    first, second = copy.get()
    assert first.tolist() == [0, 1, 2, 3] and second.tolist() == [[1.0] * 3] * 2
    assert np.shares_memory(first, locked.made[0].numpy()) and np.shares_memory(second, locked.made[1].numpy())
    copy.get()
    assert copy.ready() and len(module.events) == 1
    assert (runtime.counters().waits, runtime.counters().copies_to_host) == (1, 1)


def test_without_one_plain_memory_serves(module) -> None:
    runtime = torch_runtime("cuda", 0)
    assert runtime.host_buffer((5,), "float32").tolist() == [0.0] * 5
    module_copy = runtime.to_host((torch.arange(3),))
    assert module_copy.get()[0].tolist() == [0, 1, 2]


def test_trimming_returns_the_vendors_host_memory_too(module) -> None:
    calls: list[str] = []
    module.empty_cache = lambda: calls.append("device")
    torch_runtime("cuda", 0).trim()
    torch_runtime("cuda", 0, free_host=lambda: calls.append("host")).trim()
    assert calls == ["device", "device", "host"]


def test_a_synchronous_upload_is_a_copy() -> None:
    runtime = torch_runtime("cpu")
    source, target = np.arange(4, dtype=np.int32), runtime.zeros((4,), torch.int32)
    runtime.upload(source, target)
    source[:] = 9
    assert target.tolist() == [0, 1, 2, 3]
    half = runtime.zeros((8,), torch.int32)
    runtime.upload(source[:2], half[3:5])
    assert half.tolist() == [0, 0, 0, 9, 9, 0, 0, 0], "a part of a buffer, and nothing beside it"
    assert runtime.counters().copies_to_device == 2


def test_a_synchronous_copy_to_the_host_does_not_follow_its_source() -> None:
    runtime = torch_runtime("cpu")
    source = torch.arange(6)
    copy = runtime.to_host((source, source[2:4]))
    source.fill_(-1)
    assert copy.ready() and [array.tolist() for array in copy.get()] == [[0, 1, 2, 3, 4, 5], [2, 3]]
    assert runtime.counters().copies_to_host == 1 and runtime.counters().waits == 0
