"""linear/1: the shared Triton kernels where few rows read a whole weight, cuBLAS for all else; or, where a row's bits
must not depend on the batch, one shared kernel for any rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from drivetrain_api.v1 import AddRmsNormSpec, GatedActivationSpec, LinearSpec, Packed, dtype_bytes
from drivetrain_triton.linear import small_gated, small_linear
from drivetrain_triton.linear_invariant import invariant_linear
from drivetrain_triton.linear_normed import normed_linear
from drivetrain_triton.linear_tiles import STREAM_ROWS, is_best_kept, is_wide
from drivetrain_triton.norms import Norm
from drivetrain_triton.target import Target

from .table import most_small_rows

WIDE_HEADS = ("bfloat16", "float16")


class DeviceLinear:
    """One spec's ``Linear``. The weight stays as it lies."""

    def __init__(self, spec: LinearSpec, target: Target) -> None:
        self._spec, self._target = spec, target
        self._most = most_small_rows(spec.out_features, spec.in_features, target.arch, dtype_bytes(spec.dtype))
        self._wide = spec.role == "lm_head" and spec.dtype in WIDE_HEADS
        self._dtype = torch.float32 if self._wide else getattr(torch, spec.dtype)

    def packed_bytes(self, spec: LinearSpec) -> int:
        """The weight, and the bias."""
        size = dtype_bytes(spec.dtype)
        weight = 0 if spec.tied else spec.out_features * spec.in_features * size
        return weight + (spec.out_features * size if spec.bias else 0)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        """Keep both."""
        held = (weight.contiguous(), bias)
        return Packed(data=held, nbytes=self.packed_bytes(self._spec), peak_bytes=0, keeps_source=self._spec.tied)

    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return the weight [out, in]."""
        weight: torch.Tensor = packed.data[0]
        return weight

    def apply(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        weight, bias = packed.data
        if 0 < x.shape[0] <= self._most:
            return small_linear(x, weight, bias, self._dtype, self._target)
        if self._wide:
            wide = torch.mm(x, weight.t(), out_dtype=torch.float32)
            return wide if bias is None else wide + bias
        return functional.linear(x, weight, bias)


class GreedyHead:
    """The head and the draw of greedy rows, whose logits never lie in memory."""

    def __init__(self, spec: LinearSpec, target: Target) -> None:
        self._spec, self._target = spec, target
        self._few = most_small_rows(spec.out_features, spec.in_features, target.arch, dtype_bytes(spec.dtype))

    def takes(self, rows: int) -> bool:
        """Return whether so many rows are drawn sooner without logits."""
        spec, target = self._spec, self._target
        outs, inputs, size = spec.out_features, spec.in_features, dtype_bytes(spec.dtype)
        served = rows <= self._few or rows > STREAM_ROWS
        return served and is_best_kept(rows, outs, inputs, target.arch, size, target.multiprocessors)

    def best(self, hidden: torch.Tensor, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [N, in] -> (tokens [N] int32, their logits [N] float32)."""
        from drivetrain_triton.linear_head import best_tokens  # not everywhere: it needs Triton's Gluon

        weight = packed.data[0]
        if weight.data_ptr() % 16:  # no allocation begins so: only a view can
            weight = weight.clone()
        return best_tokens(hidden, weight, self._target)


class InvariantLinear(DeviceLinear):
    """The same, by one arithmetic for every number of rows: a row's bits are its own."""

    def apply(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        weight, bias = packed.data
        return invariant_linear(x, weight, bias, self._dtype, self._target)


class GatedLinear(DeviceLinear):
    """A gate/up product and the gated activation that follows it."""

    def __init__(self, spec: LinearSpec, gated: GatedActivationSpec, target: Target, activate: Any) -> None:
        """``activate``: the activation alone."""
        super().__init__(spec, target)
        self._kind, self._activate = gated.kind, activate

    def apply(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """x [T, in] -> [T, size]."""
        weight, bias = packed.data
        if 0 < x.shape[0] <= self._most and bias is None:
            return small_gated(x, weight, self._kind, self._target)
        if bias is None and self._wide_takes(x.shape[0], weight):
            from drivetrain_triton.linear_wide import wide_gated  # not everywhere: it needs Triton's Gluon

            return wide_gated(x, weight, self._kind, self._target)
        activated: torch.Tensor = self._activate(functional.linear(x, weight, bias))
        return activated

    def apart_tokens(self, most: int) -> int:
        """Return the most tokens up to ``most`` for which gate and up products lie in memory: neither few nor wide."""
        spec, target = self._spec, self._target
        if spec.bias:
            return most
        outs, inputs, size = spec.out_features // 2, spec.in_features, dtype_bytes(spec.dtype)
        for tokens in range(most, self._most, -1):
            if not is_wide(tokens, outs, inputs, target.arch, size, target.multiprocessors):
                return tokens
        return 0

    def _wide_takes(self, rows: int, weight: torch.Tensor) -> bool:
        outs, inputs = weight.shape[0] // 2, weight.shape[1]
        target = self._target
        aligned = weight.data_ptr() % 16 == 0
        return aligned and is_wide(rows, outs, inputs, target.arch, weight.element_size(), target.multiprocessors)


class NormedLinear:
    """The addition and norm before a product, the product, and its gated activation if it has one.

    Few rows are normed inside the product; more by the norm's own kernel, and multiplied as without a norm.
    """

    def __init__(self, norm: AddRmsNormSpec, product: DeviceLinear, most: int, target: Target, kind: str = "") -> None:
        """``product``: what comes after the norm, of the gated activation ``kind``. ``most``: rows normed inside it."""
        self._spec, self._norm, self._product, self._target = norm, Norm(norm, target), product, target
        self._most, self._kind = most, kind
        self.packed_bytes, self.pack, self.unpack = product.packed_bytes, product.pack, product.unpack
        if isinstance(product, GatedLinear):
            self.apart_tokens = product.apart_tokens

    def apply(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, packed: Packed
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, in], residual [T, in] or None, the norm's weight [in] -> (product [T, out], sum [T, in])."""
        matrix, bias = packed.data
        if 0 < x.shape[0] <= self._most and not (self._kind and bias is not None):
            return normed_linear(x, residual, weight, self._spec, matrix, bias, self._target, self._kind)
        if residual is None:
            normed, total = self._norm.rms(x, weight), x.float()
        else:
            normed, total = self._norm.add_rms(x, residual, weight)
        return self._product.apply(normed, packed), total
