"""``Ops``: one place where a spec becomes an implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from drivetrain.errors import DeviceError, DrivetrainError
from drivetrain.ops.provided import FIX, ask, ask_fused, brief, raised, wheel_of
from drivetrain.ops.reference import REFERENCE, ReferenceOp
from drivetrain.ops.report import OpChoice, Provider, provider_of
from drivetrain.ops.watch import Watched
from drivetrain_api.v1 import Backend, CacheLayout, CacheSpec, Decline, GatedActivationSpec, OpSpec, OpTraits

HOT_GROUPS = ("attention", "linear")


@dataclass(slots=True)
class _Bound:
    implementation: Any
    provider: Provider
    label: str
    reason: str
    traits: OpTraits
    count: int = 0


class Ops:
    """Binds specs for one backend. The same spec always gives the same implementation object."""

    def __init__(
        self, backend: Backend, *, block_tokens: int, strict: bool = False, deterministic: bool = False
    ) -> None:
        """``strict``: attention and linears may not run on the reference.

        ``deterministic``: every op must give a row the same bits whatever else is in the batch.
        """
        self.backend = backend
        self.block_tokens = block_tokens
        self._strict = strict
        self._deterministic = deterministic
        self._bound: dict[OpSpec, _Bound] = {}
        self._fused: dict[tuple[OpSpec, ...], _Bound | None] = {}
        self.failures: list[DeviceError] = []

    def bind(self, spec: OpSpec) -> Any:
        """Return the implementation of a spec: the backend's, or the reference where the backend declines.

        Raises DeviceError for an op without any implementation, for a hot op on the reference under
        ``strict``, and under ``deterministic`` for an op of which no batch-invariant implementation exists.
        """
        bound = self._bound.get(spec)
        if bound is None:
            bound = self._choose(spec)
            self._bound[spec] = bound
        bound.count += 1
        return bound.implementation

    def fuse(self, *specs: OpSpec) -> Any | None:
        """Return one implementation of a run of specs, None where the backend has none: bind each by itself then.

        DeviceError as ``bind`` says. Under ``deterministic`` only a batch-invariant one is taken.
        """
        bound = self._fused.get(specs)
        if specs not in self._fused:
            answer = ask_fused(self.backend, specs)
            if answer is not None and not (self._deterministic and not answer.traits.batch_invariant):
                bound = _Bound(answer.implementation, provider_of(answer), answer.label, "", answer.traits)
            self._fused[specs] = bound
        if bound is None:
            return None
        bound.count += 1
        return bound.implementation

    def gated_apart(self, tokens: int) -> int:
        """Of steps of up to ``tokens`` tokens, return the most tokens for which any run with a gated activation holds
        gate and up products in memory, as its implementation says; all where one does not say, or there is none."""
        runs = [bound for specs, bound in self._fused.items() if isinstance(specs[-1], GatedActivationSpec)]
        taken = [bound for bound in runs if bound is not None]
        # A run that was claimed with a norm before it, or was declined so and claimed without, is asked for twice.
        if not taken or self._any_apart():
            return tokens
        return max(self._apart(bound, tokens) for bound in taken)

    def _any_apart(self) -> bool:
        """Whether any gated activation is bound by itself: its product lies in memory for every count of tokens."""
        return any(isinstance(spec, GatedActivationSpec) for spec in self._bound)

    def _apart(self, bound: _Bound, tokens: int) -> int:
        method = getattr(bound.implementation, "apart_tokens", None)
        if method is None:
            return tokens
        wheel = wheel_of(self.backend)
        try:
            said = method(tokens)
        except Exception as error:
            raise DeviceError(f"{wheel}: apart_tokens of {bound.label!r} raised {raised(error)}", fix=FIX) from error
        if not isinstance(said, int) or not 0 <= said <= tokens:
            came = f"returned {brief(said)}, expected 0 to {tokens}"
            raise DeviceError(f"{wheel}: apart_tokens of {bound.label!r} {came}", fix=FIX)
        return said

    def layout(self, spec: CacheSpec) -> CacheLayout:
        """Say how the backend would store a layer with that cache, at this engine's block size.

        DeviceError when its storage can't say; ValueError for a cache that it refuses.
        """
        try:
            layout = self.backend.storage.layout(spec, self.block_tokens)
        except (DrivetrainError, ValueError):
            raise
        except Exception as error:
            what = f"{wheel_of(self.backend)}: storage.layout raised {raised(error)}; asked for {spec}"
            raise DeviceError(what, fix=FIX) from error
        if not isinstance(layout, CacheLayout):
            came = f"storage.layout returned {brief(layout)}, expected CacheLayout"
            raise DeviceError(f"{wheel_of(self.backend)}: {came}; asked for {spec}", fix=FIX)
        return layout

    def watched(self) -> Ops:
        """Return ops that bind the same implementations, the backend's own behind a watch: its ``failures`` say which
        op raised or returned a wrong shape or dtype. Slow; for a warm-up that has failed."""
        other = Ops(
            self.backend, block_tokens=self.block_tokens, strict=self._strict, deterministic=self._deterministic
        )
        wheel = wheel_of(self.backend)

        def behind(bound: _Bound, *specs: OpSpec) -> _Bound:
            title = f"{wheel}: {' + '.join(spec.op for spec in specs)} by {bound.label!r}"
            return replace(bound, implementation=Watched(bound.implementation, specs, title, other.failures.append))

        for spec, bound in self._bound.items():
            other._bound[spec] = behind(bound, spec) if bound.provider != "reference" else replace(bound)
        for specs, fused in self._fused.items():
            other._fused[specs] = None if fused is None else behind(fused, *specs)
        return other

    @property
    def report(self) -> tuple[OpChoice, ...]:
        """One entry a bound spec, in order of first binding; then one a fused run, under its last spec."""
        fused = [(" + ".join(s.op for s in specs), specs[-1], b) for specs, b in self._fused.items() if b is not None]
        return tuple(
            OpChoice(
                op=op,
                spec=spec,
                provider=b.provider,
                label=b.label,
                reason=b.reason,
                traits=b.traits,
                count=b.count,
            )
            for op, spec, b in [*((spec.op, spec, b) for spec, b in self._bound.items()), *fused]
        )

    def _choose(self, spec: OpSpec) -> _Bound:
        answer = ask(self.backend, spec)
        if isinstance(answer, Decline):
            return self._reference(spec, answer.reason)
        if self._deterministic and not answer.traits.batch_invariant:
            return self._reference(spec, f"{answer.label} is not batch-invariant")
        return _Bound(answer.implementation, provider_of(answer), answer.label, "", answer.traits)

    def _reference(self, spec: OpSpec, reason: str) -> _Bound:
        reference = REFERENCE.get(spec.op)
        if reference is None:
            raise DeviceError(
                f"no implementation of {spec.op}: the backend says {reason!r} and there is no reference",
                fix=f"ops with a reference: {', '.join(sorted(REFERENCE))}",
            )
        if self._strict and spec.op.split(".")[0].split("/")[0] in HOT_GROUPS:
            raise DeviceError(
                f"{spec.op} would run on the reference ({reason}), which --strict refuses: {spec}",
                fix="use a backend or a dtype that has this op, or drop --strict",
            )
        make = self._make(reference, reason)
        traits = OpTraits(batch_invariant=reference.invariant is not None and make is reference.invariant)
        return _Bound(make(spec), "reference", "reference", reason, traits)

    def _make(self, reference: ReferenceOp, reason: str) -> Any:
        if not self._deterministic:
            return reference.make
        if reference.invariant is None:
            raise DeviceError(
                f"{reference.op} has no batch-invariant implementation ({reason}): --deterministic needs one",
                fix="drop --deterministic or use a backend that has one",
            )
        return reference.invariant
