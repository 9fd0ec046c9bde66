"""The wheel's own compiled kernels (``src``), called through C functions on the memory of tensors.

``drivetrain_linear``: float32 rows times a bfloat16 weight as it lies in memory, sums in float32, in an order that a
row meets alone as in any batch. Helper threads join in when they wake; nothing waits for one that has not begun.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

ABI = 2
LIBRARY = Path(__file__).with_name("_kernels.so")
Pointer, Count, Number, Real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class AttentionJob(ctypes.Structure):
    """The C struct ``Attention`` of ``src/kernels.h``, field by field."""

    _fields_ = (
        *((name, Pointer) for name in ("q", "k", "v", "out", "sinks", "table", "tokens", "rows", "lows", "ends")),
        *((name, Count) for name in ("entries", "heads", "kv_heads", "dim", "v_dim", "width", "block_tokens")),
        *((name, Count) for name in ("q_stride", "k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head")),
        ("scale", Real),
        ("soft_cap", Real),
        ("half", Count),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The loaded library. ``levels``: the instruction levels that run on this processor, best first."""

    library: ctypes.CDLL
    levels: tuple[str, ...]

    def linear(self, x: torch.Tensor, weight: torch.Tensor, level: int, threads: int) -> torch.Tensor:
        """x [T, in] float32, weight [out, in] bfloat16, both contiguous -> [T, out] float32. ``level``: a place in
        ``levels``. MemoryError where there is no room for a copy of x."""
        (rows, size), outs = x.shape, weight.shape[0]
        out = torch.empty((rows, outs), dtype=torch.float32)
        places = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
        if self.library.drivetrain_linear(*places, rows, outs, size, level, threads):
            raise MemoryError(f"no room for a copy of {rows} rows of {size}")
        return out

    def attend(self, job: AttentionJob, level: int, threads: int) -> None:
        """Fill ``job.out``. All that the job points to must be alive."""
        self.library.drivetrain_attend(ctypes.byref(job), level, threads)

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, level: int, threads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., size], residual of its shape or None, weight [size] or [N, size], all float32 -> (normed,
        total); without a residual total is x."""
        size = x.shape[-1]
        if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == size:
            inner, stride = x.shape[1], x.stride(0)
        else:
            x = x.contiguous()
            inner, stride = 1, size
        weight = weight.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32)
        total, before = x, 0
        if residual is not None:
            residual = residual.contiguous()
            total, before = torch.empty(x.shape, dtype=torch.float32), residual.data_ptr()
        self.library.drivetrain_norm(
            x.data_ptr(),
            before,
            weight.data_ptr(),
            total.data_ptr(),
            out.data_ptr(),
            out.numel() // size if size else 0,
            inner,
            size,
            stride,
            weight.numel() // size if size else 1,
            eps,
            level,
            threads,
        )
        return out, total


class NoKernelsError(RuntimeError):
    """Why there are none."""


def usable_kernels() -> tuple[Kernels | None, str]:
    """Return the library where there is one, else why there is none."""
    try:
        return load_kernels(), ""
    except NoKernelsError as error:
        return None, str(error)


@cache
def load_kernels(path: Path = LIBRARY) -> Kernels:
    """Load the library once. NoKernelsError says why it can't be."""
    if not path.exists():
        raise NoKernelsError(
            "this wheel was built without its kernels (no C++20 compiler, or DRIVETRAIN_CPU_KERNELS=off)"
        )
    try:
        library = ctypes.CDLL(str(path))
        abi = library.drivetrain_abi()
    except (OSError, AttributeError) as error:
        raise NoKernelsError(f"{path.name} does not load: {error}") from error
    if abi != ABI:
        raise NoKernelsError(f"{path.name} is of version {abi}, not {ABI}: install drivetrain-cpu again")
    library.drivetrain_level.restype = ctypes.c_char_p
    library.drivetrain_linear.argtypes = [Pointer, Pointer, Pointer, Count, Count, Count, Number, Number]
    library.drivetrain_attend.argtypes = [Pointer, Number, Number]
    library.drivetrain_norm.argtypes = [Pointer] * 5 + [Count] * 5 + [Real, Number, Number]
    levels = []
    while (name := library.drivetrain_level(len(levels))) is not None:
        levels.append(name.decode())
    return Kernels(library=library, levels=tuple(levels))
