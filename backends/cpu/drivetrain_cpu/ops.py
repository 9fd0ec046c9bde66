"""Which ops this backend provides, and by what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drivetrain_api.v1 import (
    ActivationSpec,
    AddLayerNormSpec,
    AddRmsNormSpec,
    AdjustSpec,
    AttentionSpec,
    Decline,
    DrawSpec,
    GatedActivationSpec,
    KeepSpec,
    LayerNormSpec,
    LinearSpec,
    OpSpec,
    OpTraits,
    PrepareSpec,
    Provided,
    RmsNormSpec,
    RopeSpec,
)

from .adjust import Adjust
from .attention import HostAttention
from .draws import Draw
from .linear import HostLinear, RowRule, choose_kernel
from .native import Kernels, usable_kernels
from .pointwise import Gated, InvariantGated, InvariantPlain, LayerNorm, NativeNorm, Plain, RmsNorm, Rope, make_add_rms
from .prepare import NativePrepare, Prepare, keep
from .threads import Threads

DTYPES = ("float32", "bfloat16")
INVARIANT = OpTraits(batch_invariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Providers:
    """Answers ``Backend.provide``. ``linear``: the kernel asked for, or auto. ``threads``: where ops take theirs."""

    deterministic: bool
    linear: str
    threads: Threads

    def provide(self, spec: OpSpec) -> Provided | Decline:
        """Return this backend's implementation of a spec, or say why there is none."""
        make = MAKERS.get(spec.op)
        if make is None:
            return Decline(reason="the reference is as fast here")
        if spec.dtype not in DTYPES and not isinstance(spec, PrepareSpec | KeepSpec):
            return Decline(reason=f"{spec.dtype} is not one of {', '.join(DTYPES)}")
        return make(self, spec)


def _linear(own: Providers, spec: Any) -> Provided | Decline:
    if spec.quant is not None:
        return Decline(reason=f"no kernel for {spec.quant.scheme} weights")
    try:
        choice = choose_kernel(spec, own.linear, own.threads.count)
    except ValueError as error:
        return Decline(reason=str(error))
    rule = choice.invariant if own.deterministic else RowRule()
    label = f"native: {choice.kernel.name}" + (f" ({choice.why})" if choice.why else "")
    return Provided(
        implementation=HostLinear(spec, choice.kernel, rule, own.threads),
        label=label,
        traits=OpTraits(batch_invariant=own.deterministic),
    )


def _attention(own: Providers, spec: Any) -> Provided | Decline:
    if spec.selected_keys or spec.latent or spec.cross:
        return Decline(reason="no selected keys, latent or cross attention")
    if not spec.layout.strided or any(part.dtype not in DTYPES for part in spec.layout.spec.parts):
        return Decline(reason="only strided caches of float32 and bfloat16")
    kernels, why = usable_kernels()
    if len({part.dtype for part in spec.layout.spec.parts}) > 1:
        kernels, why = None, "keys and values of different dtypes"
    ways = f"tiles of keys, heads folded (own kernel: {why})"
    if kernels is not None:
        ways = f"own kernel, {kernels.levels[0]}, and torch for prompts"
    return Provided(
        implementation=HostAttention(spec, own.threads, kernels, invariant=own.deterministic),
        label=f"native: {ways}",
        traits=OpTraits(batch_invariant=own.deterministic),
    )


def _norm_kernels(spec: Any) -> tuple[Kernels | None, str]:
    """Return the kernels that a norm runs on, if any, and its label."""
    kernels, why = usable_kernels() if spec.dtype == "float32" else (None, f"none for {spec.dtype} rows")
    if kernels is None:
        return None, f"native: norm by length (own kernel: {why})"
    return kernels, f"native: own kernel, {kernels.levels[0]}"


def _rms(own: Providers, spec: Any) -> Provided | Decline:
    kernels, label = _norm_kernels(spec)
    norm = RmsNorm(spec) if kernels is None else NativeNorm(spec, kernels, own.threads.count)
    return Provided(implementation=norm, label=label, traits=INVARIANT)


def _add_rms(own: Providers, spec: Any) -> Provided | Decline:
    kernels, label = _norm_kernels(spec)
    norm = make_add_rms(spec) if kernels is None else NativeNorm(spec, kernels, own.threads.count).add
    return Provided(implementation=norm, label=label, traits=INVARIANT)


def _layer(own: Providers, spec: Any) -> Provided | Decline:
    norm = LayerNorm(spec)
    made = norm.add if isinstance(spec, AddLayerNormSpec) else norm
    return Provided(implementation=made, label="native: one call of torch", traits=INVARIANT)


def _plain(own: Providers, spec: Any) -> Provided | Decline:
    if not own.deterministic:
        return Provided(implementation=Plain(spec), label="native: one call of torch", traits=OpTraits())
    return Provided(implementation=InvariantPlain(spec), label="native: rows at fixed lanes", traits=INVARIANT)


def _gated(own: Providers, spec: Any) -> Provided | Decline:
    if not own.deterministic:
        return Provided(implementation=Gated(spec), label="native: multiplied in place", traits=OpTraits())
    return Provided(implementation=InvariantGated(spec), label="native: rows at fixed lanes", traits=INVARIANT)


def _rope(own: Providers, spec: Any) -> Provided | Decline:
    if spec.style != "halves":
        return Decline(reason="only pairs in halves are faster than the reference")
    return Provided(implementation=Rope(spec), label="native: tables kept for a step", traits=INVARIANT)


def _draw(own: Providers, spec: Any) -> Provided | Decline:
    return Provided(implementation=Draw(spec, own.threads), label="native: noise for candidates only", traits=INVARIANT)


def _adjust(own: Providers, spec: Any) -> Provided | Decline:
    return Provided(implementation=Adjust(spec), label="native: tokens that a row names only", traits=INVARIANT)


def _prepare(own: Providers, spec: Any) -> Provided | Decline:
    kernels, why = usable_kernels()
    if kernels is None:
        label = f"native: host arrays (own kernel: {why})"
        return Provided(implementation=Prepare(spec, own.threads), label=label, traits=INVARIANT)
    return Provided(
        implementation=NativePrepare(spec, own.threads, kernels), label="native: own kernel", traits=INVARIANT
    )


def _keep(own: Providers, spec: Any) -> Provided | Decline:
    kernels, why = usable_kernels()
    if kernels is None:
        return Provided(implementation=keep, label=f"native: host arrays (own kernel: {why})", traits=INVARIANT)
    return Provided(implementation=kernels.keep, label="native: own kernel", traits=INVARIANT)


MAKERS: dict[str, Callable[[Providers, Any], Provided | Decline]] = {
    LinearSpec.op: _linear,
    AttentionSpec.op: _attention,
    RmsNormSpec.op: _rms,
    AddRmsNormSpec.op: _add_rms,
    LayerNormSpec.op: _layer,
    AddLayerNormSpec.op: _layer,
    ActivationSpec.op: _plain,
    GatedActivationSpec.op: _gated,
    RopeSpec.op: _rope,
    DrawSpec.op: _draw,
    AdjustSpec.op: _adjust,
    PrepareSpec.op: _prepare,
    KeepSpec.op: _keep,
}
