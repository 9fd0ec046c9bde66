"""What multiplies rows by packed weights on the host: torch's kernels and this wheel's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Protocol

import torch
from torch.nn import functional

from drivetrain_api.v1 import dtype_bytes, torch_dtype

from .native import Kernels

PIECE_BYTES = 384 << 20
PACKERS = 2
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


class Native:
    """This wheel's compiled kernel: the weight stays as it is, and so serves a tied embedding too.

    It shares its work out itself; a row's bits depend neither on the batch nor on the number of threads.
    """

    copies = False

    def __init__(self, kernels: Kernels, threads: int, *, level: int = 0, wide: bool = False) -> None:
        """``wide``: results stay float32, for logits. ``level``: a place in the library's levels."""
        self.name = f"own kernel, {kernels.levels[level]}"
        self._linear, self._level, self._threads, self._wide = kernels.linear, level, threads, wide

    def nbytes(self, out_features: int, in_features: int, dtype: str) -> int:
        return out_features * in_features * dtype_bytes(dtype)

    def peak(self, out_features: int, in_features: int, dtype: str) -> int:
        return 0

    def pack(self, weight: torch.Tensor) -> Any:
        return weight.contiguous()

    def multiply(self, x: torch.Tensor, data: Any, bias: torch.Tensor | None) -> torch.Tensor:
        narrow = x.dtype != torch.float32
        out = self._linear(x.to(torch.float32) if narrow else x, data, self._level, self._threads)
        if bias is not None:
            out += bias
        return out.to(x.dtype) if narrow and not self._wide else out


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
        pieces = sorted(_pieces(out_features, in_features))
        return self.nbytes(out_features, in_features, dtype) + sum(pieces[-PACKERS:]) * in_features * 4

    def pack(self, weight: torch.Tensor) -> Any:
        largest = max((abs(float(end)) for end in weight.aminmax()), default=0.0)
        if not largest < 65504.0:
            raise ValueError(
                f"a weight of {tuple(weight.shape)} holds {largest}, which float16 can't: "
                "set --backend-option linear=plain"
            )
        pieces = weight.split(_pieces(*weight.shape))
        if len(pieces) == 1:
            return [_packed_half(weight)]
        with ThreadPoolExecutor(PACKERS) as packers:
            return list(packers.map(_packed_half, pieces))

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


def _packed_half(piece: torch.Tensor) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(piece.to(torch.float32).contiguous(), None)


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
