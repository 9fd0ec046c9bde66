"""Memory that can shrink, on the device itself: it is really given back, what stays is intact, captured steps go on."""

from __future__ import annotations

import gc
import logging
import time

import numpy as np
import pytest
import torch

from drivetrain.runner.dummies import capture_missing
from drivetrain.runner.reserve import MARGIN, MIB
from drivetrain_api.v1 import ErrorClass, Shrinkable, ShrinkableMemory
from tests.checkpoints import random_ids
from tests.device.models import checkpoint
from tests.e2e.harness import Served

pytestmark = pytest.mark.device
GIB = 1 << 30
NOISE = 16 * MIB  # what else may come and go on the device meanwhile
PROMPTS = [random_ids(5 + 9 * i, 700 + i) for i in range(9)]


@pytest.fixture
def memory(backend) -> ShrinkableMemory:
    if not isinstance(backend.device, ShrinkableMemory) or backend.device.shrinkable(1 << 20) is None:
        pytest.skip("this device has no memory that can shrink")
    return backend.device


def free(backend) -> int:
    gc.collect()
    backend.device.synchronize()
    backend.device.trim()
    return backend.device.memory().free


def number(words: torch.Tensor) -> None:
    words.copy_(torch.arange(len(words), device=words.device))


def numbered(words: torch.Tensor) -> bool:
    return bool((words == torch.arange(len(words), device=words.device)).all())


def test_what_goes_back_is_free_and_what_stays_is_intact(backend, memory) -> None:
    size, runtime = 2 * GIB + 12345, backend.device
    small = runtime.zeros((64,), torch.int64)
    number(small)
    small.add_(1)
    assert not numbered(small), "and whatever is loaded at first use is there"
    before = free(backend)
    began = time.perf_counter()
    buffer = memory.shrinkable(size)
    print(f"{size / GIB:.1f} GiB made in {1e3 * (time.perf_counter() - began):.1f} ms")
    assert buffer.data.shape == (size,) and buffer.data.dtype == torch.uint8 and buffer.data.device == runtime.device
    assert size <= before - free(backend) <= size + NOISE
    words = buffer.data[: size // 8 * 8].view(torch.int64)
    number(words)
    full, kept = free(backend), size - 300 * MIB
    given = buffer.shrink(kept)
    assert 300 * MIB - buffer.piece_bytes <= given <= 300 * MIB + NOISE
    assert abs(free(backend) - full - given) <= NOISE
    left = words[: kept // 8]
    assert numbered(left)
    left.add_(1)
    assert runtime.to_host([left[-1:]]).get()[0][0] == len(left)
    assert buffer.shrink(kept) == 0 and buffer.shrink(size) == 0
    view = left[:4]
    del buffer, words, left
    assert before - free(backend) >= size - given - NOISE, "a view keeps it"
    assert runtime.to_host([view]).get()[0].tolist() == [1, 2, 3, 4]
    del view
    assert abs(before - free(backend)) <= NOISE


def test_a_captured_run_goes_on_reading_what_stays(backend, memory) -> None:
    runtime, graphs = backend.device, backend.graphs
    if graphs is None:
        pytest.skip("no graphs")
    buffer = memory.shrinkable(GIB)
    buffer.data.zero_()
    part = buffer.data[: 1 << 20].view(torch.float32)
    _ = part[:8] * 2, part[-8:] + 1  # whatever is loaded at first use
    graph, (doubled, more) = graphs.capture(lambda: (part[:8] * 2, part[-8:] + 1))
    values = runtime.from_host(np.arange(8, dtype=np.float32))
    part[:8].copy_(values)
    runtime.synchronize()
    assert buffer.shrink(GIB - 200 * MIB) >= 200 * MIB - buffer.piece_bytes
    part[-8:].copy_(values)
    graph.replay()
    found = runtime.to_host([doubled, more]).get()
    assert found[0].tolist() == [2.0 * i for i in range(8)] and found[1].tolist() == [1.0 + i for i in range(8)]
    graph.release()


def test_a_pool_of_most_of_the_device_is_made_at_once_and_too_large_a_one_is_an_error(backend, memory) -> None:
    runtime, room = backend.device, free(backend)
    with pytest.raises(Exception, match="out of memory") as raised:
        memory.shrinkable(2 * runtime.memory().total)
    assert runtime.classify_error(raised.value) is ErrorClass.OUT_OF_MEMORY
    assert abs(free(backend) - room) <= NOISE, "nothing is left of it"
    size = (room - 2 * GIB) // GIB * GIB
    if size <= 0:
        pytest.skip("too little is free")
    seconds = []
    for make in (lambda: runtime.empty((size,), torch.uint8), lambda: memory.shrinkable(size)):
        free(backend)
        began = time.perf_counter()
        made = make()
        seconds.append(time.perf_counter() - began)
        del made
    print(
        f"{size / GIB:.0f} GiB: {1e3 * seconds[0]:.1f} ms of the allocator's own, {1e3 * seconds[1]:.1f} ms in pieces"
    )
    assert seconds[1] <= seconds[0] + 0.2
    pool = backend.storage.allocate_pool(size)
    assert isinstance(pool, Shrinkable) and not bool(pool.data[-MIB:].any()) and not bool(pool.data[:MIB].any())
    runtime.synchronize()
    assert pool.shrink(size - GIB) >= GIB - pool.piece_bytes


def test_an_engine_whose_graphs_need_more_than_planned_gives_blocks_back(device, memory, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "enable_prefix_caching": True}
    served = Served(checkpoint("qwen3-even", tmp_path), device, cache_bytes=16 * GIB, **settings)
    runner = served.opened.runner
    reserve, runtime = runner.reserve, runner.runtime
    assert reserve.giving is not None, "the cache lies in memory that can shrink"
    wanted = served.greedy(PROMPTS, 24)
    while runner.graphs.count < 12:
        assert capture_missing(runner)
    reserve.plan(graphs=max(reserve.taken, 1), step=0)  # captures so small may have cost nothing that shows
    tokens = runner.graphs.missing().tokens
    runtime.trim()  # as making memory that can shrink does
    spare = runtime.memory().free - reserve.expected(tokens) - MARGIN + 4 * MIB
    ballast = runtime.shrinkable(spare)
    assert ballast is not None
    assert reserve.lacking(tokens) > 0, (spare, reserve.expected(tokens), runtime.memory().free)
    total, least = served.loop.stats().cache_total, runtime.memory().free
    assert served.greedy(PROMPTS, 24) == wanted, "steps, captures and giving back side by side"
    for _ in range(100_000):
        if not capture_missing(runner):
            break
    figures = served.loop.figures()
    assert figures["graphs_captured"] == figures["graphs_wanted"] and figures["graphs_given_up"] == 0
    assert figures["memory_given_back_bytes"] > 0 and figures["memory_retries"] == 0
    assert served.loop.stats().cache_total < total
    assert "given back for captured steps" in caplog.text
    given = figures["memory_given_back_bytes"] // MIB
    print(f"{given} MiB given back with {least // MIB} MiB free before, {runtime.memory().free // MIB} MiB afterwards")
    assert served.greedy(PROMPTS, 24) == wanted, "all in captured steps, prefixes from what stayed"
    served.loop.scheduler.reset_prefix_cache()
    assert served.greedy(PROMPTS, 24) == wanted
    del ballast
    served.close()
