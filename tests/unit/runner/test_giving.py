"""A shared pool in memory that can shrink: it begins as zeros, its end goes back in pieces, the rest stays."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from drivetrain.cache.manager import CacheManager
from drivetrain.cache.sizing import GroupNeed, plan_cache
from drivetrain.runner.caches import CacheMemory
from drivetrain.runner.giving import SHARE, GiveBack
from drivetrain_api.v1 import Shrinkable, ShrinkableMemory, torch_runtime, torch_storage

PIECE, GARBAGE, GONE = 4096, 0x5A, 0xFF
NEEDS = (
    GroupNeed(kind="full", layer_bytes=512, num_layers=3, block_tokens=16),
    GroupNeed(kind="window", layer_bytes=512, num_layers=1, block_tokens=16, window=40),
)


class Buffer:
    piece_bytes = PIECE

    def __init__(self, num_bytes: int) -> None:
        self.data = torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)
        self.end = -(-num_bytes // 512) * 512

    def shrink(self, nbytes: int) -> int:
        edge = -(-nbytes // PIECE) * PIECE
        given, self.end = max(0, self.end - edge), min(self.end, edge)
        self.data[edge:] = GONE
        return given


class Setup:
    def __init__(self, budget: int = 4 << 20, able: bool = True) -> None:
        self.buffers: list[Buffer] = []
        self.runtime = torch_runtime("cpu", shrinkable=self.make if able else None)
        storage = torch_storage(self.runtime)
        self.plan = plan_cache(NEEDS, budget, shared=True, max_tokens=96, chunk=32)
        self.pool = storage.allocate_pool(self.plan.total_bytes)
        self.memory = CacheMemory(handles=(None,), pool=self.pool)
        self.cache = CacheManager(self.plan, max_rows=4, max_tokens=96, unit=16)
        places = [SimpleNamespace(plan_group=g, layers=()) for g in range(2)]
        tables = [torch.full((5, 6), g.num_blocks - 1, dtype=torch.int32) for g in self.plan.groups]
        self.runner = SimpleNamespace(
            runtime=self.runtime,
            config=SimpleNamespace(max_model_len=96, max_num_batched_tokens=32),
            tables=SimpleNamespace(tables=tables),
            passes=SimpleNamespace(places=places),
        )

    def make(self, num_bytes: int) -> Buffer:
        self.buffers.append(Buffer(num_bytes))
        return self.buffers[-1]


def test_a_pool_lies_in_such_memory_where_there_is_some() -> None:
    made = Setup()
    assert isinstance(made.runtime, ShrinkableMemory) and isinstance(made.pool, Shrinkable)
    assert made.memory.shrinkable and made.memory.piece_bytes == PIECE
    assert not made.pool.data.any() and made.pool.data.data_ptr() == made.buffers[0].data.data_ptr()
    plain = Setup(able=False)
    assert not isinstance(plain.runtime, ShrinkableMemory) and not isinstance(plain.pool, Shrinkable)
    assert not plain.memory.shrinkable and not plain.pool.data.any()
    refused = torch_storage(torch_runtime("cpu", shrinkable=lambda num_bytes: None)).allocate_pool(100)
    assert not isinstance(refused, Shrinkable) and refused.nbytes == 100
    assert not CacheMemory(handles=(None, None), pool=None).shrinkable


@pytest.mark.parametrize("asked", [(1,), (PIECE,), (PIECE + 1, 3 * PIECE), (70_000,)])
def test_as_much_as_is_asked_for_goes_and_little_more(asked: tuple[int, ...]) -> None:
    made = Setup()
    made.pool.data.fill_(1)
    giving, slab = GiveBack(made.runner, made.memory, made.cache), made.plan.slab_bytes
    for nbytes in asked:
        before, given = made.cache.num_blocks, giving.given
        assert giving.settled() and giving.ask(nbytes) and giving.settled()
        assert nbytes <= giving.given - given < nbytes + PIECE + slab
        assert made.cache.num_blocks < before
    kept = made.cache.kept_bytes
    assert kept <= made.buffers[0].end < kept + PIECE + slab
    assert (made.pool.data[:kept] == 1).all(), "what is left was touched"
    for table, group in zip(made.runner.tables.tables, made.cache.pool.groups, strict=True):
        assert int(table.max()) < group.limit
    made.cache.check_integrity()


def test_a_stated_share_goes_at_most_and_then_nothing_more() -> None:
    made = Setup()
    giving, total = GiveBack(made.runner, made.memory, made.cache), made.plan.total_bytes
    assert not giving.ask(int(total * SHARE) + 1) and not giving.possible and made.cache.kept_bytes == total
    made = Setup()
    giving = GiveBack(made.runner, made.memory, made.cache)
    while giving.ask(2 * PIECE):
        assert giving.settled()
    assert total * (1 - SHARE) <= made.cache.kept_bytes < total * (1 - SHARE) + 4 * PIECE + made.plan.slab_bytes
    small = Setup(budget=made.plan.slab_bytes * 12)
    giving = GiveBack(small.runner, small.memory, small.cache)
    giving._least = 0
    while giving.ask(PIECE):
        assert giving.settled()
    row = small.cache.open(0, [], 0)
    assert row == [] and small.cache.extend(0, 96), "the longest sequence still fits"


def test_memory_that_does_not_go_back_is_said_and_not_asked_for_again(caplog) -> None:
    made = Setup()
    made.pool.shrink = lambda nbytes: 1 / 0
    giving = GiveBack(made.runner, made.memory, made.cache)
    assert giving.ask(PIECE) and giving.settled() and "could not be given back" in caplog.text
    assert giving.given == 0 and not giving.possible and not giving.ask(1) and giving.settled()
    assert made.runtime.activate is nullcontext
