"""Which ops this backend provides, and by what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain_api.v1 import (
    AddRmsNormSpec,
    AttentionSpec,
    Decline,
    DrawSpec,
    Fused,
    GatedActivationSpec,
    LinearSpec,
    LogprobsSpec,
    OpSpec,
    OpTraits,
    Provided,
    dtype_bytes,
)
from drivetrain_triton.attention import provide_attention
from drivetrain_triton.attention_invariant import provide_invariant
from drivetrain_triton.attention_rotate import fuse_rotate
from drivetrain_triton.linear_tiles import streams
from drivetrain_triton.logprobs import InvariantLogprobs
from drivetrain_triton.providers import provide_small
from drivetrain_triton.target import Target

from . import table
from .linear import DeviceLinear, GatedLinear, GreedyHead, InvariantLinear, NormedLinear

DTYPES = ("bfloat16", "float16", "float32")
ANY_GRAPH = OpTraits(graph="any")
INVARIANT = OpTraits(batch_invariant=True, graph="any")


@dataclass(frozen=True, slots=True, kw_only=True)
class Providers:
    """Answers ``Backend.provide`` and ``Backend.fuse``. ``deterministic``: a row's bits must be its own;
    ``greedy_head``: the head and a greedy draw are one."""

    target: Target
    deterministic: bool = False
    greedy_head: bool = True

    def provide(self, spec: OpSpec) -> Provided | Decline:
        """Return this backend's implementation of a spec, or say why there is none."""
        if isinstance(spec, AttentionSpec):
            return (provide_invariant if self.deterministic else provide_attention)(spec, self.target)
        if isinstance(spec, LinearSpec):
            return self._linear(spec)
        if isinstance(spec, LogprobsSpec) and self.deterministic:
            made = InvariantLogprobs(spec, self.target)
            return Provided(implementation=made, label="shared: Triton sums, torch sorts", traits=INVARIANT)
        return provide_small(spec, self.target)

    def _linear(self, spec: LinearSpec) -> Provided | Decline:
        if problem := _unable(spec):
            return Decline(reason=problem)
        if self.deterministic:
            label = "native: batch-invariant, shared Triton for any rows"
            return Provided(implementation=InvariantLinear(spec, self.target), label=label, traits=INVARIANT)
        label = "native: small batches by shared Triton, else cuBLAS"
        return Provided(implementation=DeviceLinear(spec, self.target), label=label, traits=ANY_GRAPH)

    def fuse(self, specs: Sequence[OpSpec]) -> Fused | None:
        """Claim the gated product, products behind a norm, all between the q/k/v product and attention, and the head
        with a greedy draw.

        Deterministic: only all between product and attention. The others choose their sums by the number of rows.
        """
        if self.deterministic:
            return fuse_rotate(specs, self.target, invariant=True)
        if isinstance(specs[0], AddRmsNormSpec):
            return self._normed(specs[0], specs[1:])
        if len(specs) == 2 and isinstance(specs[0], LinearSpec) and isinstance(specs[1], GatedActivationSpec):
            return self._gated(specs[0], specs[1])
        if len(specs) == 2 and isinstance(specs[0], LinearSpec) and isinstance(specs[1], DrawSpec):
            return self._greedy(specs[0], specs[1])
        return fuse_rotate(specs, self.target)

    def _gated(self, spec: LinearSpec, gated: GatedActivationSpec) -> Fused | None:
        alone = provide_small(gated, self.target)
        if _unable(spec) or spec.dtype != gated.dtype or isinstance(alone, Decline):
            return None
        implementation: Any = GatedLinear(spec, gated, self.target, alone.implementation)
        label = "native: one kernel for small batches, else cuBLAS and shared Triton"
        return Fused(count=2, provided=Provided(implementation=implementation, label=label, traits=ANY_GRAPH))

    def _greedy(self, head: LinearSpec, draw: DrawSpec) -> Fused | None:
        whole = draw.vocabulary == head.out_features and draw.vocabulary_offset == 0 and not head.bias
        able = streams(self.target.arch, dtype_bytes(head.dtype), head.in_features)
        if not self.greedy_head or _unable(head) or not whole or not able:
            return None
        label = "native: the best of each tile by shared Triton, no logits"
        implementation: Any = GreedyHead(head, self.target)
        return Fused(count=2, provided=Provided(implementation=implementation, label=label, traits=ANY_GRAPH))

    def _normed(self, norm: AddRmsNormSpec, rest: Sequence[OpSpec]) -> Fused | None:
        """A norm and what follows it, where its kernel ever does both."""
        linear = rest[0] if rest else None
        if not isinstance(linear, LinearSpec) or linear.dtype != norm.dtype or linear.in_features != norm.size:
            return None
        most = table.most_normed_rows(linear.out_features, linear.in_features)
        after = self._linear(linear) if len(rest) == 1 else self.fuse(rest)
        alone = after.provided if isinstance(after, Fused) else after
        if most == 0 or linear.role == "lm_head" or not isinstance(alone, Provided):
            return None
        last = rest[-1]
        kind = last.kind if isinstance(last, GatedActivationSpec) else ""
        made = NormedLinear(norm, alone.implementation, most, self.target, kind)
        label = "native: one kernel for small batches, else shared Triton and " + alone.label.removeprefix("native: ")
        return Fused(count=1 + len(rest), provided=Provided(implementation=made, label=label, traits=ANY_GRAPH))


def _unable(spec: LinearSpec) -> str:
    if spec.quant is not None:
        return f"no kernel for {spec.quant.scheme} weights"
    if spec.dtype not in DTYPES or spec.activation_dtype != spec.dtype:
        return f"{spec.activation_dtype} rows times {spec.dtype} weights: only equal ones of {', '.join(DTYPES)}"
    return ""
