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

ABI = 3
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
        ("window", Count),
    )


class PrepareGroup(ctypes.Structure):
    """The C struct ``Group`` of ``src/prepare.h``."""

    _fields_ = (
        *((name, Pointer) for name in ("table", "blocks", "slots")),
        *((name, Count) for name in ("stride", "width", "block_tokens")),
    )


class PrepareJob(ctypes.Structure):
    """The C struct ``Preparation`` of ``src/prepare.h``."""

    _fields_ = (
        *((name, Pointer) for name in ("rows", "start", "num_new", "token_row", "token_offset", "host_ids")),
        *((name, Pointer) for name in ("last_tokens", "computed", "ids", "positions", "base", "lengths")),
        ("groups", ctypes.POINTER(PrepareGroup)),
        *((name, Count) for name in ("num_rows", "num_tokens", "num_groups", "table_rows", "places", "wide")),
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

    def prepare(self, job: PrepareJob) -> None:
        """Fill what the job points to. IndexError where a row or a token is out of range."""
        if self.library.drivetrain_prepare(ctypes.byref(job)):
            raise IndexError("a step names a row of the tables, or a row of the batch, that is not there")

    def keep(
        self, tokens: torch.Tensor, witness: torch.Tensor, rows: torch.Tensor, last_tokens: torch.Tensor
    ) -> torch.Tensor:
        """sample.keep/1: tokens [N], witness [N] float32, rows [N], table [R, places], else int32 -> packed [2 N].
        IndexError where a row is out of range."""
        check(torch.int32, tokens, rows, last_tokens)
        check(torch.float32, witness)
        count = tokens.shape[0]
        packed = torch.empty(2 * count, dtype=torch.int32)
        places = (tokens.data_ptr(), witness.data_ptr(), rows.data_ptr(), last_tokens.data_ptr(), packed.data_ptr())
        if self.library.drivetrain_keep(*places, count, *last_tokens.shape):
            raise IndexError(f"rows {rows.tolist()} are not all in a table of {last_tokens.shape[0]}")
        return packed

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


def check(dtype: torch.dtype, *tensors: torch.Tensor) -> None:
    """TypeError unless all are contiguous and of that dtype."""
    for tensor in tensors:
        if tensor.dtype != dtype or not tensor.is_contiguous():
            strides = tensor.stride()
            raise TypeError(f"the kernel needs contiguous {dtype}, got {tensor.dtype} with strides {strides}")


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
    library.drivetrain_prepare.argtypes = [Pointer]
    library.drivetrain_keep.argtypes = [Pointer] * 5 + [Count] * 3
    library.drivetrain_attend.argtypes = [Pointer, Number, Number]
    library.drivetrain_norm.argtypes = [Pointer] * 5 + [Count] * 5 + [Real, Number, Number]
    levels = []
    while (name := library.drivetrain_level(len(levels))) is not None:
        levels.append(name.decode())
    return Kernels(library=library, levels=tuple(levels))
