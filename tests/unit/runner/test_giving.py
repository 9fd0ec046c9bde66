"""A shared pool in memory that can shrink: it begins as zeros, its end goes back in pieces, the rest stays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from drivetrain.cache.manager import CacheManager
from drivetrain.cache.sizing import GroupNeed, plan_cache
from drivetrain.errors import DeviceError
from drivetrain.runner.caches import CacheMemory, allocate_memory
from drivetrain.runner.giving import SHARE, GiveBack
from drivetrain_api.v1 import Shrinkable, ShrinkableMemory, torch_runtime, torch_storage

PIECE, GARBAGE, GONE = 4096, 0x5A, 0xFF
NEEDS = (
    GroupNeed(kind="full", layer_bytes=512, num_layers=3, block_tokens=16),
    GroupNeed(kind="window", layer_bytes=512, num_layers=1, block_tokens=16, window=40),
)


class Vendor:
    def __init__(self, storage=None) -> None:
        self.storage = storage


Vendor.__module__ = "drivetrain_mirage.backend"  # an installed wheel's, for its name in messages


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
            backend=Vendor(),
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
    assert row == [[], []] and small.cache.extend(0, 96), "the longest sequence still fits"


@pytest.mark.parametrize("places", [1, 7, 13, 1 << 18])
def test_tables_forget_the_first_block_that_went_and_no_block_before_it(places: int, monkeypatch) -> None:
    monkeypatch.setattr("drivetrain.runner.giving.MASKED", places)
    made = Setup()
    giving, tables = GiveBack(made.runner, made.memory, made.cache), made.runner.tables.tables
    assert giving.ask(PIECE)
    limits = [group.limit for group in made.cache.pool.groups]
    for table, limit in zip(tables, limits, strict=True):
        table.copy_(torch.tensor([limit - 1, limit, limit + 1, 0, 1, limit]))
    assert giving.settled() and giving.given
    for table, limit in zip(tables, limits, strict=True):
        assert table.tolist() == [[limit - 1, 0, 0, 0, 1, 0]] * 5


class Full:
    """A table for whose mask there is no memory."""

    shape = (5, 6)

    def __getitem__(self, rows: slice) -> Full:
        return self

    def __ge__(self, limit: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for a mask")

    def masked_fill_(self, mask: torch.Tensor, value: int) -> None:
        """Never comes to be called."""


def _fails(*given):
    raise OSError("the driver says no")


FAULTS = {
    "shrink raises": (lambda made: setattr(made.pool, "shrink", _fails), "OSError: the driver says no"),
    "None": (lambda made: setattr(made.pool, "shrink", lambda nbytes: None), "returned None, expected 0 to "),
    "-1": (lambda made: setattr(made.pool, "shrink", lambda nbytes: -1), "returned int -1, expected 0 to "),
    "much": (lambda made: setattr(made.pool, "shrink", lambda nbytes: 1 << 60), f"returned int {1 << 60}, expected"),
    "true": (lambda made: setattr(made.pool, "shrink", lambda nbytes: True), "returned bool True, expected"),
    "mask": (lambda made: setattr(made.runner.tables, "tables", [Full()] * 2), "no memory for a mask"),
    "event": (
        lambda made: setattr(made.runtime, "stream", lambda: SimpleNamespace(record=lambda: None)),
        "'NoneType' object has no attribute 'done'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_goes_wrong_after_blocks_were_retired_ends_the_giving(name: str, caplog) -> None:
    made, (spoil, said) = Setup(), FAULTS[name]
    giving, before = GiveBack(made.runner, made.memory, made.cache), made.cache.num_blocks
    spoil(made)
    assert giving.ask(PIECE) and giving.possible and giving.settled() and giving.settled()
    assert giving.given == 0 and not giving.possible and not giving.ask(1) and giving.settled()
    lost = before - made.cache.num_blocks
    assert lost > 0, "what was retired stays so"
    (line,) = caplog.messages
    assert line.startswith("memory: drivetrain-mirage ") and said in line and f"{lost} of them stay out of use" in line
    made.cache.check_integrity()


@pytest.mark.parametrize("piece", [0, -4096, "x", None, 4096.0, True])
def test_a_piece_that_can_not_be_ends_the_giving_before_a_block_is_lost(piece, caplog) -> None:
    made = Setup()
    giving, before = GiveBack(made.runner, made.memory, made.cache), made.cache.num_blocks
    made.pool.piece_bytes = piece
    assert not giving.ask(PIECE) and not giving.possible and giving.settled() and not giving.ask(PIECE)
    (line,) = caplog.messages
    assert line.startswith("memory: drivetrain-mirage ") and f"{piece}" in line and "none is lost" in line
    assert made.cache.num_blocks == before and giving.given == 0


def test_up_to_one_piece_more_than_was_asked_for_may_go() -> None:
    for more, fine in ((0, True), (PIECE, True), (PIECE + 1, False)):
        made = Setup()
        giving, total = GiveBack(made.runner, made.memory, made.cache), made.plan.total_bytes
        made.pool.shrink = lambda nbytes, more=more, total=total: total - nbytes + more
        assert giving.ask(PIECE) and giving.settled() and giving.possible == fine and (giving.given > 0) == fine


BUFFERS = {
    "no tensor": ({"data": b"bytes"}, "whose data is bytes, expected a dense tensor of uint8"),
    "none": ({"data": None}, "whose data is NoneType, expected"),
    "dtype": ({"data": torch.zeros(100, dtype=torch.int8)}, r"whose data is torch.int8 \[100\], expected"),
    "shape": ({"data": torch.zeros((10, 10), dtype=torch.uint8)}, r"torch.uint8 \[10, 10\], expected"),
    "strided": ({"data": torch.zeros(200, dtype=torch.uint8)[::2]}, "expected a dense tensor"),
    "short": ({"data": torch.zeros(99, dtype=torch.uint8)}, "of 99 bytes"),
    "no piece": ({"piece_bytes": 0}, "whose piece_bytes is 0, expected"),
    "text": ({"piece_bytes": "x"}, "whose piece_bytes is 'x', expected"),
    "negative": ({"piece_bytes": -1}, "whose piece_bytes is -1, expected"),
    "fixed": ({"shrink": None}, "without shrink"),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_is_not_as_the_contract_says_is_refused(name: str) -> None:
    changed, said = BUFFERS[name]

    def make(num_bytes: int) -> Buffer:
        made = Buffer(num_bytes)
        vars(made).update(changed)
        return made

    storage = torch_storage(torch_runtime("cpu", shrinkable=make))
    with pytest.raises(ValueError, match=rf"shrinkable\(100\) made a Buffer .*{said}"):
        storage.allocate_pool(100)
    plan, decoder = SimpleNamespace(num_slabs=4, slab_bytes=25, shared=True), SimpleNamespace(cache_specs=())
    with pytest.raises(DeviceError, match=rf"^drivetrain-mirage .*allocate_pool raised ValueError: .*{said}"):
        allocate_memory(Vendor(storage), decoder, plan)


def test_a_buffer_larger_than_asked_for_is_used_in_part() -> None:
    pool = torch_storage(torch_runtime("cpu", shrinkable=lambda num_bytes: Buffer(2 * num_bytes))).allocate_pool(100)
    assert isinstance(pool, Shrinkable) and pool.nbytes == 100 and not pool.data.any()


def test_memory_that_ran_out_at_the_start_keeps_its_own_error() -> None:
    def make(num_bytes: int) -> Buffer:
        raise torch.OutOfMemoryError("none is left")

    plan, decoder = SimpleNamespace(num_slabs=4, slab_bytes=25, shared=True), SimpleNamespace(cache_specs=())
    with pytest.raises(torch.OutOfMemoryError, match="none is left"):
        allocate_memory(Vendor(torch_storage(torch_runtime("cpu", shrinkable=make))), decoder, plan)
