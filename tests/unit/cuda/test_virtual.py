"""Mapped memory against a driver that keeps books: what is reserved, made, mapped, given back, and what goes wrong."""

from __future__ import annotations

import ctypes
import gc
import logging

import pytest
import torch

from drivetrain_cuda import virtual
from drivetrain_cuda.driver import DriverError
from drivetrain_cuda.virtual import LARGE, SMALL, Mapping, cut, shrinkable

GRANULARITY, BASE = 2 << 20, 0x7F00_0000_0000
GIB = 1 << 30


class Books:
    """libcuda's virtual memory calls over books. ``room``: bytes of the card; ``code``: what a named call says."""

    def __init__(self, room: int = 200 * GIB, able: int = 1) -> None:
        self.room, self.able = room, able
        self.code: dict[str, int] = {}
        self.calls: list[str] = []
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.access: list[tuple[int, int]] = []

    def __getattr__(self, name: str):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*given) -> int:
            self.calls.append(name)
            return self.code.get(name) or getattr(self, "_" + name)(*given) or 0

        return call

    def _cuInit(self, flags) -> None:
        assert flags == 0

    def _cuDeviceGet(self, device, index) -> None:
        device._obj.value = index

    def _cuDeviceGetAttribute(self, value, number, device) -> None:
        assert number == 102
        value._obj.value = self.able

    def _cuGetErrorString(self, code, text) -> None:
        text._obj.value = {2: b"out of memory", 801: b"operation not supported"}.get(code, b"invalid argument")

    def _cuMemGetAllocationGranularity(self, size, kind, option) -> None:
        assert (kind._obj.kind, kind._obj.location.kind, kind._obj.location.index, option) == (1, 1, 3, 0)
        size._obj.value = GRANULARITY

    def _cuMemAddressReserve(self, address, size, alignment, wanted, flags) -> None:
        assert size.value % GRANULARITY == 0 == alignment.value == wanted.value == flags.value
        address._obj.value = BASE
        self.reserved[BASE] = size.value

    def _cuMemCreate(self, handle, size, kind, flags) -> int:
        assert kind._obj.handle_kinds == 0 and size.value % GRANULARITY == 0
        if sum(self.mapped.values()) + size.value > self.room:
            return 2
        handle._obj.value = len(self.calls)
        self.handles[len(self.calls)] = size.value
        return 0

    def _cuMemMap(self, address, size, offset, handle, flags) -> None:
        assert offset.value == 0 and self.handles[handle.value] == size.value
        assert address.value >= BASE and address.value + size.value <= BASE + self.reserved[BASE]
        assert address.value not in self.mapped
        self.mapped[address.value] = size.value

    def _cuMemRelease(self, handle) -> None:
        del self.handles[handle.value]

    def _cuMemSetAccess(self, address, size, access, count) -> None:
        assert (access._obj.flags, access._obj.location.index, count.value) == (3, 3, 1)
        self.access.append((address.value, size.value))

    def _cuMemUnmap(self, address, size) -> None:
        assert self.mapped.pop(address.value) == size.value, "a mapping is taken away whole"

    def _cuMemAddressFree(self, address, size) -> None:
        assert not self.mapped, "addresses are freed last"
        assert self.reserved.pop(address.value) == size.value


@pytest.fixture
def books(monkeypatch) -> Books:
    made = Books()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: made.calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.calls.append("empty_cache"))
    return made


def test_structures_are_as_the_driver_has_them() -> None:
    assert [ctypes.sizeof(s) for s in (virtual.Location, virtual.Properties, virtual.Access)] == [8, 32, 12]
    assert virtual.Properties.location.offset == 8 and virtual.Properties.flags.offset == 24


@pytest.mark.parametrize("size", [GRANULARITY, SMALL + GRANULARITY, GIB, 3 * GIB + GRANULARITY, 140 * GIB + 6 * SMALL])
def test_pieces_are_few_and_small_at_the_end(size: int) -> None:
    pieces = cut(size, SMALL)
    assert [begin for begin, _ in pieces] == [sum(s for _, s in pieces[:i]) for i in range(len(pieces))]
    assert sum(length for _, length in pieces) == size and len(pieces) < 310
    assert all(length <= SMALL and begin % SMALL == 0 for begin, length in pieces if begin >= size - size // 32)
    assert size < 32 * GIB or [length for _, length in pieces[:8]] == [LARGE] * 8


def test_all_is_mapped_and_the_end_goes_back_in_pieces(books: Books) -> None:
    size = 64 * GIB + 5
    mapping = Mapping(3, size)
    whole = 64 * GIB + GRANULARITY
    assert sum(books.mapped.values()) == whole and books.access == [(BASE, whole)]
    assert not books.handles, "the mappings alone keep the memory"
    told = mapping.__cuda_array_interface__
    assert told["shape"] == (size,) and told["data"] == (BASE, False) and told["typestr"] == "|u1"
    assert mapping.shrink(size) == 0 and mapping.shrink(whole) == 0
    assert mapping.shrink(64 * GIB - 1) == GRANULARITY, "a piece that is needed in part stays"
    assert mapping.shrink(63 * GIB + SMALL) == GIB - SMALL
    assert sum(books.mapped.values()) == 63 * GIB + SMALL and mapping.shrink(64 * GIB) == 0
    books.calls.clear()
    del mapping
    gc.collect()
    assert not books.mapped and not books.reserved
    assert books.calls[0] == "synchronize" and books.calls[-1] == "cuMemAddressFree"


def test_what_lacks_memory_says_so_and_leaves_nothing(books: Books) -> None:
    books.room = 10 * GIB
    with pytest.raises(DriverError, match=r"cuMemCreate says out of memory \(error 2\)") as raised:
        shrinkable(3, 12 * GIB)
    assert "out of memory" in str(raised.value) and books.calls.count("empty_cache") == 1
    assert not books.mapped and not books.reserved and not books.handles


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_call_that_fails_is_named_and_leaves_nothing(books: Books, call: str) -> None:
    books.code[call] = 1
    with pytest.raises(DriverError, match=rf"{call} says invalid argument \(error 1\)"):
        shrinkable(3, 2 * GIB)
    assert not books.mapped and not books.reserved and not books.handles


def test_without_virtual_memory_torch_is_left_to_it(books: Books, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    books.able = 0
    assert shrinkable(3, GIB) is None and "no virtual memory calls for card 3" in caplog.text
    assert "cuMemCreate" not in books.calls
    books.able, books.code = 1, {"cuMemCreate": 801}
    assert shrinkable(3, GIB) is None and "cuMemCreate says operation not supported" in caplog.text
    assert not books.mapped and not books.reserved
