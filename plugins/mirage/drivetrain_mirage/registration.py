"""The device type ``mirage`` in torch: the third-party dispatch key under its own name, with refusing factories."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.backend_registration import (
    _setup_privateuseone_for_python_backend,
)

from .rules import RuleError

DEVICE_TYPE = "mirage"
FACTORIES = ("empty.memory_format", "empty_strided")


class _Module:
    """What torch expects of a device module; it has no streams, so that nothing bypasses the runtime."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """There is no generator on the device."""


def _refuse_factory(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuleError(
            "runtime-allocates",
            f"torch asked for a new tensor on the device (aten::{name} {args[0] if args else ''})",
            "make tensors with DeviceRuntime.empty, zeros or from_host, or with new_* and *_like of a device tensor",
        )

    return refuse


@functools.cache
def torch_device() -> torch.device:
    """Register the device type once a process and return ``mirage:0``.

    RuntimeError when another package has given the dispatch key its own name.
    """
    from .tensors import host_scalar

    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", DEVICE_TYPE):
        raise RuntimeError(f"torch's third-party device key already belongs to {name!r}: unload that package")
    _setup_privateuseone_for_python_backend(DEVICE_TYPE, _Module())
    for factory in FACTORIES:
        _LIBRARY.impl(factory, _refuse_factory(factory), "PrivateUse1")
    _LIBRARY.impl("scalar_tensor", host_scalar, "PrivateUse1")
    return torch.device(DEVICE_TYPE, 0)


_LIBRARY = torch.library.Library("aten", "IMPL")
