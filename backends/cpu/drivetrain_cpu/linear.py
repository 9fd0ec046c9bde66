"""linear/1 on the host: one wrapper, and a kernel that multiplies packed weights.

Kernels, best first: ``onednn`` (weights reordered once; float32 on x86-64, bfloat16 where the processor has the
instructions), ``half`` (bfloat16 weights kept as float16 and multiplied in float32: x86-64 from AVX2 up), ``plain``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch.nn import functional

from drivetrain_api.v1 import LinearSpec, Packed, dtype_bytes, torch_dtype

from .threads import Threads, work_seconds

PIECE_BYTES = 768 << 20
HALF_ROWS, HALF_COLUMNS = 512, 16


class Kernel(Protocol):
    """Multiplies rows by packed weights. ``multiply`` takes rows of the activations' dtype and gives the same, or
    float32 for logits."""

    @property
    def name(self) -> str:
        """What the label says."""

    @property
    def copies(self) -> bool:
        """Whether packing makes a copy (a tied weight then exists twice)."""

    def nbytes(self, out_features: int, in_features: int, dtype: str) -> int:
        """Say what packing will hold, bias apart."""

    def pack(self, weight: torch.Tensor) -> Any:
        """Pack weight [out, in]."""

    def peak(self, out_features: int, in_features: int, dtype: str) -> int:
        """Say what packing holds at most, beside the source and bias apart."""

    def multiply(self, x: torch.Tensor, data: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in], T > 0 -> [T, out]."""


class Plain:
    """Torch's own linear over the weight as it is."""

    name = "torch linear"
    copies = False

    def nbytes(self, out_features: int, in_features: int, dtype: str) -> int:
        return out_features * in_features * dtype_bytes(dtype)

    def peak(self, out_features: int, in_features: int, dtype: str) -> int:
        return 0

    def pack(self, weight: torch.Tensor) -> Any:
        return weight

    def multiply(self, x: torch.Tensor, data: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x.to(data.dtype), data, bias).to(x.dtype)


class OneDnn:
    """oneDNN over weights reordered for ``rows_hint`` rows."""

    name = "oneDNN, prepacked"
    copies = True

    def __init__(self, rows_hint: int) -> None:
        self._rows_hint = rows_hint

    def nbytes(self, out_features: int, in_features: int, dtype: str) -> int:
        return _reordered_bytes(out_features, in_features, dtype, self._rows_hint)

    def peak(self, out_features: int, in_features: int, dtype: str) -> int:
        return self.nbytes(out_features, in_features, dtype)

    def pack(self, weight: torch.Tensor) -> Any:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self._rows_hint)

    def multiply(self, x: torch.Tensor, data: Any, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.to(data.dtype), data, bias, "none", [], "")
        return out.to(x.dtype)


class Half:
    """Weights as float16 in FBGEMM's layout, rows and sums in float32, the result rounded once.

    A bfloat16 weight from 2^-14 to 65,504 in size is the same number in float16; smaller ones differ by at most
    2^-25. A larger one can't be packed: ``pack`` then says so. Wide weights are packed in pieces, since each is
    needed in float32 for a moment.
    """

    name = "FBGEMM, float16 weights"
    copies = True

    def __init__(self, wide: bool = False) -> None:
        """``wide``: results stay float32, for logits, which a rounding to bfloat16 would move by up to 2^-9."""
        self._wide = wide
        self._product = torch.ops.quantized.linear_dynamic_fp16.default

    def nbytes(self, out_features: int, in_features: int, dtype: str) -> int:
        inner = -(-in_features // HALF_ROWS) * HALF_ROWS
        pieces = _pieces(out_features, in_features)
        return sum(-(-count // HALF_COLUMNS) * HALF_COLUMNS * inner * 2 for count in pieces)

    def peak(self, out_features: int, in_features: int, dtype: str) -> int:
        widest = max(_pieces(out_features, in_features))
        return self.nbytes(out_features, in_features, dtype) + widest * in_features * 4

    def pack(self, weight: torch.Tensor) -> Any:
        largest = max((abs(float(end)) for end in weight.aminmax()), default=0.0)
        if not largest < 65504.0:
            raise ValueError(
                f"a weight of {tuple(weight.shape)} holds {largest}, which float16 can't: "
                "set --backend-option linear=plain"
            )
        pieces = weight.split(_pieces(*weight.shape))
        return [torch.ops.quantized.linear_prepack_fp16(p.to(torch.float32).contiguous(), None) for p in pieces]

    def multiply(self, x: torch.Tensor, data: Any, bias: torch.Tensor | None) -> torch.Tensor:
        narrow = x.dtype != torch.float32
        x32 = x.to(torch.float32) if narrow else x
        out: torch.Tensor
        if len(data) == 1:
            out = self._product(x32, data[0])
        else:
            out = torch.cat([self._product(x32, piece) for piece in data], -1)
        if bias is not None:
            out += bias
        return out.to(x.dtype) if narrow and not self._wide else out


def _pieces(out_features: int, in_features: int) -> list[int]:
    """Cut the outputs so that each piece's float32 weight stays below ``PIECE_BYTES``."""
    most = max(HALF_COLUMNS, PIECE_BYTES // (4 * in_features) // HALF_COLUMNS * HALF_COLUMNS)
    whole, rest = divmod(out_features, most)
    return [most] * whole + ([rest] if rest else [])


@cache
def _reordered_bytes(out_features: int, in_features: int, dtype: str, rows_hint: int) -> int:
    """Reorder a weight of that shape and ask how large it became: the layout is the library's choice."""
    empty = torch.empty((out_features, in_features), dtype=torch_dtype(dtype))
    return int(torch.ops.mkldnn._nbytes(torch.ops.mkldnn._reorder_linear_weight(empty, rows_hint)))


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


def choose_kernel(spec: LinearSpec, wanted: str) -> Choice:
    """Choose for a spec. ``wanted``: ``auto`` or a kernel's short name; ValueError where that can't run here."""
    names = ["onednn", "half", "plain"] if wanted == "auto" else [wanted]
    if wanted == "auto" and spec.role == "lm_head" and not half_reason(spec.dtype):
        return Choice(kernel=Half(wide=True), invariant=invariant_rule("half"))
    if wanted == "auto" and spec.tied and spec.dtype == "float32":
        return Choice(kernel=Plain(), invariant=RowRule(multiple=8, tile=8), why="the embedding holds the weight")
    reasons: list[str] = []
    for name in names:
        reason = CHECKS[name](spec.dtype)
        if not reason:
            return Choice(kernel=KERNELS[name](spec.dtype), invariant=invariant_rule(name), why="; ".join(reasons))
        reasons.append(f"{name}: {reason}")
    raise ValueError("; ".join(reasons))


def _onednn(dtype: str) -> Kernel:
    """The layout for one row is the fastest at one row only where bfloat16 products are not done in tiles of 16."""
    in_tiles = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    one_row = dtype == "bfloat16" and not in_tiles
    return OneDnn(rows_hint=1 if one_row else 64)


def _half(dtype: str) -> Kernel:
    return Half()


def _plain(dtype: str) -> Kernel:
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
    "half": half_reason,
    "plain": no_reason,
}
KERNELS: dict[str, Callable[[str], Kernel]] = {"onednn": _onednn, "half": _half, "plain": _plain}


def invariant_rule(name: str) -> RowRule:
    """Return the row rule under which a kernel gives a row the same bits in any batch.

    FBGEMM's AVX2 kernels take up to six rows at a time: a row count that six divides meets the six-row kernel only.
    """
    if name == "half":
        wider = "AVX512" in torch.backends.cpu.get_cpu_capability()
        return RowRule(multiple=6, tile=6 if wider else 0)
    return RowRule(multiple=16, tile=16) if name == "onednn" else RowRule(multiple=8, tile=8)
