"""linear/1: the shared Triton kernels where few rows read a whole weight, cuBLAS for all else."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from drivetrain_api.v1 import GatedActivationSpec, LinearSpec, Packed, dtype_bytes
from drivetrain_triton.linear import small_gated, small_linear
from drivetrain_triton.target import Target

from .table import most_small_rows

WIDE_HEADS = ("bfloat16", "float16")


class DeviceLinear:
    """One spec's ``Linear``. The weight stays as it lies."""

    def __init__(self, spec: LinearSpec, target: Target) -> None:
        self._spec, self._target = spec, target
        self._most = most_small_rows(spec.out_features, spec.in_features)
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
        activated: torch.Tensor = self._activate(functional.linear(x, weight, bias))
        return activated
