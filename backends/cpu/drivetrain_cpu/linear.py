"""linear/1 on the host: one wrapper, and a kernel that multiplies packed weights.

Kernels, best first: ``onednn`` (weights reordered once; float32 on x86-64, bfloat16 where the processor has the
instructions), ``native`` (this wheel's own: bfloat16 weights as they are, float32 sums and results), ``half`` (the
same of weights kept as float16: x86-64 from AVX2 up), ``plain`` (torch's).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from drivetrain_api.v1 import LinearSpec, Packed, dtype_bytes, torch_dtype

from .linear_kernels import Half, Kernel, Native, OneDnn, Plain
from .native import load_kernels, usable_kernels
from .threads import Threads, work_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRule:
    """Which row counts a kernel meets, so that a row's bits don't depend on the batch.

    ``multiple``: rows are filled up with zeros to a multiple; ``tile``: and multiplied that many at a time
    (0: all at once).
    """

    multiple: int = 1
    tile: int = 0


class HostLinear:
    """A ``Linear``: a kernel, a spec, and the rows it is given."""

    def __init__(self, spec: LinearSpec, kernel: Kernel, rule: RowRule, threads: Threads) -> None:
        self._spec, self._kernel, self._rule, self._threads = spec, kernel, rule, threads
        self._bytes = float(spec.in_features * spec.out_features * dtype_bytes(spec.dtype))
        self._operations = 2.0 * spec.in_features * spec.out_features
        self._alone = isinstance(kernel, Native)

    def packed_bytes(self, spec: LinearSpec) -> int:
        """Exact, before loading. May reorder a weight of that shape once to know."""
        bias = spec.out_features * dtype_bytes(spec.dtype) if spec.bias else 0
        if spec.tied and not self._kernel.copies:
            return bias
        return self._kernel.nbytes(spec.out_features, spec.in_features, spec.dtype) + bias

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        """Pack; a copy unless the kernel reads the weight as it is. The source is dropped where it isn't tied."""
        spec = self._spec
        return Packed(
            data=(self._kernel.pack(weight), bias),
            nbytes=self.packed_bytes(spec),
            peak_bytes=self._kernel.peak(spec.out_features, spec.in_features, spec.dtype),
            keeps_source=spec.tied,
        )

    def apply(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        data, bias = packed.data
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty((0, self._spec.out_features))
        if self._alone:
            return self._apply(x, rows, data, bias)
        self._threads.take(work_seconds(self._bytes, rows * self._operations))
        try:
            return self._apply(x, rows, data, bias)
        finally:
            self._threads.give_back()

    def _apply(self, x: torch.Tensor, rows: int, data: Any, bias: torch.Tensor | None) -> torch.Tensor:
        missing = -rows % self._rule.multiple
        if missing:
            x = functional.pad(x, (0, 0, 0, missing))
        if not self._rule.tile or x.shape[0] == self._rule.tile:
            out = self._kernel.multiply(x.contiguous(), data, bias)
        else:
            tiles = x.contiguous().split(self._rule.tile)
            out = torch.cat([self._kernel.multiply(tile, data, bias) for tile in tiles])
        return out[:rows] if missing else out


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A kernel, the row rule that makes it batch-invariant, and why a better kernel was not taken."""

    kernel: Kernel
    invariant: RowRule
    why: str = ""


ORDER = ("onednn", "native", "half", "plain")
WIDE_ORDER = ("native", "half", "onednn", "plain")  # of logits, which the first two leave in float32


def choose_kernel(spec: LinearSpec, wanted: str, threads: int) -> Choice:
    """Choose for a spec. ``wanted``: ``auto`` or a kernel's short name; ValueError where that can't run here."""
    wide = spec.role == "lm_head"
    names = (WIDE_ORDER if wide else ORDER) if wanted == "auto" else (wanted,)
    if wanted == "auto" and spec.tied and spec.dtype == "float32":
        return Choice(kernel=Plain(), invariant=RowRule(multiple=8, tile=8), why="the embedding holds the weight")
    reasons: list[str] = []
    for name in names:
        reason = CHECKS[name](spec.dtype)
        if not reason:
            kernel = KERNELS[name](spec.dtype, wide, threads)
            return Choice(kernel=kernel, invariant=invariant_rule(name), why="; ".join(reasons))
        reasons.append(f"{name}: {reason}")
    raise ValueError("; ".join(reasons))


def _onednn(dtype: str, wide: bool, threads: int) -> Kernel:
    """The layout for one row is the fastest at one row only where bfloat16 products are not done in tiles of 16."""
    in_tiles = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    one_row = dtype == "bfloat16" and not in_tiles
    return OneDnn(rows_hint=1 if one_row else 64)


def _native(dtype: str, wide: bool, threads: int) -> Kernel:
    return Native(load_kernels(), threads, wide=wide)


def _half(dtype: str, wide: bool, threads: int) -> Kernel:
    return Half(wide)


def _plain(dtype: str, wide: bool, threads: int) -> Kernel:
    return Plain()


@cache
def onednn_reason(dtype: str) -> str:
    """Say why oneDNN's prepacked linear does not run here; empty where it does."""
    try:
        x = torch.ones((3, 16), dtype=torch_dtype(dtype))
        kernel = OneDnn(rows_hint=1)
        kernel.multiply(x, kernel.pack(x), None)
        kernel.nbytes(3, 16, dtype)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return ""


def native_reason(dtype: str) -> str:
    """Say why this wheel's own kernel does not run here; empty where it does."""
    if dtype != "bfloat16":
        return f"no kernel for {dtype} weights"
    return usable_kernels()[1]


@cache
def half_reason(dtype: str) -> str:
    """Say why FBGEMM's float16 linear does not run here; empty where it does."""
    if dtype not in ("bfloat16", "float16"):
        return f"would round {dtype} weights"
    try:
        x = torch.ones((3, 16), dtype=torch_dtype(dtype))
        kernel = Half()
        kernel.multiply(x, kernel.pack(x), None)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return ""


def no_reason(dtype: str) -> str:
    """Torch's own linear runs everywhere."""
    return ""


CHECKS: dict[str, Callable[[str], str]] = {
    "onednn": onednn_reason,
    "native": native_reason,
    "half": half_reason,
    "plain": no_reason,
}
KERNELS: dict[str, Callable[[str, bool, int], Kernel]] = {
    "onednn": _onednn,
    "native": _native,
    "half": _half,
    "plain": _plain,
}


def invariant_rule(name: str) -> RowRule:
    """Return the row rule under which a kernel gives a row the same bits in any batch.

    This wheel's kernel does so by itself. FBGEMM's AVX2 kernels take up to six rows at a time: a row count that six
    divides meets the six-row kernel only.
    """
    if name == "native":
        return RowRule()
    if name == "half":
        wider = "AVX512" in torch.backends.cpu.get_cpu_capability()
        return RowRule(multiple=6, tile=6 if wider else 0)
    return RowRule(multiple=16, tile=16) if name == "onednn" else RowRule(multiple=8, tile=8)
