"""Memory whose end can go back to the card: addresses are reserved at once, memory is mapped behind them in pieces.

The driver's virtual memory calls, through its C interface: torch can't free the end of a tensor. To kernels, tensor
maps and graphs these are plain device addresses. Most of a buffer lies in large pieces, so that few calls make it; its
last 32nd, which may go back, in small ones.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from contextlib import suppress
from typing import Any

import torch

from .driver import DriverError, attribute, check, load

VIRTUAL_MEMORY = 102  # CUdevice_attribute: CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
NOT_SUPPORTED = 801  # CUresult, of virtualised cards
PINNED, ON_DEVICE, READ_WRITE, MINIMUM = 1, 1, 3, 0
LARGE, SMALL, END = 1 << 30, 32 << 20, 32
logger = logging.getLogger(__name__)


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("kind", ctypes.c_int), ("index", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handle_kinds", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Mapping:
    """Mapped addresses of one card, freed with this object. ``pieces``: (begin, size) of what is mapped, in order."""

    def __init__(self, index: int, num_bytes: int) -> None:
        self.num_bytes, self.index = num_bytes, index
        self.base = 0
        self.pieces: list[tuple[int, int]] = []
        self._driver = load()
        self._kind = Properties(kind=PINNED, location=Location(ON_DEVICE, index))
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._kind), MINIMUM)
        self.piece_bytes = -(-SMALL // granularity.value) * granularity.value
        self._size = -(-num_bytes // granularity.value) * granularity.value
        try:
            self._reserve()
            for begin, size in cut(self._size, self.piece_bytes):
                self._map(begin, size)
            access = Access(Location(ON_DEVICE, index), READ_WRITE)
            whole = ctypes.c_uint64(self.base), ctypes.c_size_t(self._size)
            self._call("cuMemSetAccess", *whole, ctypes.byref(access), ctypes.c_size_t(1))
        except DriverError:
            unmap(self._driver, self.base, self._size, self.pieces)
            raise
        ended = weakref.finalize(self, free, self._driver, index, self.base, self._size, self.pieces)
        ended.atexit = False  # a process that ends gives all back

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What torch makes a tensor of without a copy; the tensor keeps this object."""
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.base, False), "version": 2}

    def shrink(self, nbytes: int) -> int:
        """Unmap the pieces behind the first ``nbytes``; returns their bytes."""
        given = 0
        while self.pieces and self.pieces[-1][0] >= nbytes:
            begin, size = self.pieces[-1]
            self._call("cuMemUnmap", ctypes.c_uint64(self.base + begin), ctypes.c_size_t(size))
            self.pieces.pop()
            given += size
        return given

    def _reserve(self) -> None:
        address = ctypes.c_uint64()
        sizes = ctypes.c_size_t(self._size), ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), *sizes, ctypes.c_uint64(0), ctypes.c_uint64(0))
        self.base = address.value

    def _map(self, begin: int, size: int) -> None:
        """Make a piece and map it. The mapping alone keeps it then."""
        handle, none = ctypes.c_uint64(), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self._kind), none)
        try:
            place = ctypes.c_uint64(self.base + begin), ctypes.c_size_t(size), ctypes.c_size_t(0)
            self._call("cuMemMap", *place, handle, none)
            self.pieces.append((begin, size))
        finally:
            self._driver.cuMemRelease(handle)

    def _call(self, name: str, *given: Any) -> None:
        check(self._driver, name, getattr(self._driver, name)(*given))


class Buffer:
    """``ShrinkableBuffer`` of one card. ``data``: uint8 [num_bytes]."""

    def __init__(self, mapping: Mapping) -> None:
        self.data = torch.as_tensor(mapping, device=torch.device("cuda", mapping.index))
        self.piece_bytes = mapping.piece_bytes
        self.shrink = mapping.shrink


def shrinkable(index: int, num_bytes: int) -> Buffer | None:
    """Make a buffer; None where the driver or the card has no virtual memory, so that torch's own is to be used.
    DriverError for what goes wrong otherwise, ``cuMemCreate says out of memory`` for one."""
    if not supported(index):
        logger.debug("the driver has no virtual memory calls for card %d: the cache is a tensor of torch's own", index)
        return None
    torch.cuda.empty_cache()
    try:
        return Buffer(Mapping(index, num_bytes))
    except DriverError as error:
        if error.code != NOT_SUPPORTED:
            raise
        logger.debug("%s: the cache is a tensor of torch's own", error.reason)
        return None


def supported(index: int) -> bool:
    """Return whether the driver says that memory of this card can be mapped."""
    driver, device = load(), ctypes.c_int()
    check(driver, "cuInit", driver.cuInit(0))
    check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), index))
    return hasattr(driver, "cuMemCreate") and bool(attribute(driver, VIRTUAL_MEMORY, device))


def cut(size: int, small: int) -> list[tuple[int, int]]:
    """Return (begin, size) of the pieces of so many bytes: large ones, then small ones from the last 32nd on or
    before."""
    pieces, begin = [], 0
    coarse = max(0, size - size // END) // LARGE * LARGE
    while begin < size:
        step = min(LARGE if begin < coarse else small, size - begin)
        pieces.append((begin, step))
        begin += step
    return pieces


def free(driver: ctypes.CDLL, index: int, base: int, size: int, pieces: list[tuple[int, int]]) -> None:
    """Unmap all once the card has done what it was asked to; nobody can ask for more."""
    with suppress(RuntimeError):
        torch.cuda.synchronize(index)
    unmap(driver, base, size, pieces)


def unmap(driver: ctypes.CDLL, base: int, size: int, pieces: list[tuple[int, int]]) -> None:
    """Give back memory, then addresses. Nothing is said: whoever needs them next meets the reason."""
    for begin, length in pieces:
        driver.cuMemUnmap(ctypes.c_uint64(base + begin), ctypes.c_size_t(length))
    pieces.clear()
    if base:
        driver.cuMemAddressFree(ctypes.c_uint64(base), ctypes.c_size_t(size))
