"""Which ops this backend provides, and by what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain_api.v1 import (
    AttentionSpec,
    Decline,
    Fused,
    GatedActivationSpec,
    LinearSpec,
    OpSpec,
    OpTraits,
    Provided,
)
from drivetrain_triton.attention import provide_attention
from drivetrain_triton.attention_rotate import fuse_rotate
from drivetrain_triton.providers import provide_small
from drivetrain_triton.target import Target

from .linear import DeviceLinear, GatedLinear

DTYPES = ("bfloat16", "float16", "float32")
ANY_GRAPH = OpTraits(graph="any")


@dataclass(frozen=True, slots=True, kw_only=True)
class Providers:
    """Answers ``Backend.provide`` and ``Backend.fuse``."""

    target: Target

    def provide(self, spec: OpSpec) -> Provided | Decline:
        """Return this backend's implementation of a spec, or say why there is none."""
        if isinstance(spec, AttentionSpec):
            return provide_attention(spec, self.target)
        if isinstance(spec, LinearSpec):
            return self._linear(spec)
        return provide_small(spec, self.target)

    def _linear(self, spec: LinearSpec) -> Provided | Decline:
        if problem := _unable(spec):
            return Decline(reason=problem)
        label = "native: small batches by shared Triton, else cuBLAS"
        return Provided(implementation=DeviceLinear(spec, self.target), label=label, traits=ANY_GRAPH)

    def fuse(self, specs: Sequence[OpSpec]) -> Fused | None:
        """Claim the gated product, and all between the q/k/v product and attention."""
        if len(specs) == 2 and isinstance(specs[0], LinearSpec) and isinstance(specs[1], GatedActivationSpec):
            return self._gated(specs[0], specs[1])
        return fuse_rotate(specs, self.target)

    def _gated(self, spec: LinearSpec, gated: GatedActivationSpec) -> Fused | None:
        alone = provide_small(gated, self.target)
        if _unable(spec) or spec.dtype != gated.dtype or isinstance(alone, Decline):
            return None
        implementation: Any = GatedLinear(spec, gated, self.target, alone.implementation)
        label = "native: one kernel for small batches, else cuBLAS and shared Triton"
        return Fused(count=2, provided=Provided(implementation=implementation, label=label, traits=ANY_GRAPH))


def _unable(spec: LinearSpec) -> str:
    if spec.quant is not None:
        return f"no kernel for {spec.quant.scheme} weights"
    if spec.dtype not in DTYPES or spec.activation_dtype != spec.dtype:
        return f"{spec.activation_dtype} rows times {spec.dtype} weights: only equal ones of {', '.join(DTYPES)}"
    return ""
