"""The CUDA driver's own list of devices, through its C interface: no torch, no context, nothing left behind."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass

LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
MAJOR, MINOR = 75, 76  # CUdevice_attribute: compute capability
NO_DEVICE = 100


class DriverError(RuntimeError):
    """Why the driver does not do what it should, and what to do about it. ``code``: its result; 0: none came."""

    def __init__(self, reason: str, fix: str, code: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.fix, self.code = reason, fix, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One device, in the driver's order (which CUDA_VISIBLE_DEVICES changes)."""

    index: int
    name: str
    uuid: str
    memory_bytes: int
    capability: tuple[int, int]


def cards() -> list[Card]:
    """Return every device that the driver shows this process. DriverError when it can't say."""
    try:
        return _cards(load())
    except AttributeError as error:  # a call that this driver's library does not have
        raise DriverError(f"this CUDA driver is too old: {error}", "update NVIDIA's driver") from error


def _cards(driver: ctypes.CDLL) -> list[Card]:
    check(driver, "cuInit", driver.cuInit(0))
    count = ctypes.c_int()
    check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    return [_card(driver, index) for index in range(count.value)]


def make_context(index: int) -> None:
    """Make a device's primary context, which torch and all else of this process will use, and keep it. Where that
    fails nothing is said: whoever needs the context meets the reason."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch would; the driver reads it once
    with suppress(DriverError):
        driver = load()
        check(driver, "cuInit", driver.cuInit(0))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), index))
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def load() -> ctypes.CDLL:
    """Return the driver's library. DriverError where there is none."""
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DriverError("there is no CUDA driver (libcuda.so.1 is not found)", "install NVIDIA's driver")


def _card(driver: ctypes.CDLL, index: int) -> Card:
    device = ctypes.c_int()
    check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), index))
    name = ctypes.create_string_buffer(256)
    check(driver, "cuDeviceGetName", driver.cuDeviceGetName(name, len(name), device))
    memory = ctypes.c_size_t()
    check(driver, "cuDeviceTotalMem", driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
    uuid = (ctypes.c_ubyte * 16)()
    check(driver, "cuDeviceGetUuid", driver.cuDeviceGetUuid(ctypes.byref(uuid), device))
    return Card(
        index=index,
        name=name.value.decode(errors="replace"),
        uuid="GPU-" + _dashed(bytes(uuid).hex()),
        memory_bytes=memory.value,
        capability=(attribute(driver, MAJOR, device), attribute(driver, MINOR, device)),
    )


def attribute(driver: ctypes.CDLL, number: int, device: ctypes.c_int) -> int:
    """Return one of a device's CUdevice_attribute values."""
    value = ctypes.c_int()
    check(driver, "cuDeviceGetAttribute", driver.cuDeviceGetAttribute(ctypes.byref(value), number, device))
    return value.value


def _dashed(digits: str) -> str:
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def check(driver: ctypes.CDLL, call: str, code: int) -> None:
    """Raise DriverError, with the driver's own words, for a call's result other than success."""
    if code == 0:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    said = text.value.decode(errors="replace") if text.value else "no description"
    fix = "check CUDA_VISIBLE_DEVICES" if code == NO_DEVICE else "check the driver with nvidia-smi"
    raise DriverError(f"{call} says {said} (error {code})", fix, code)
