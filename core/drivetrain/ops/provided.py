"""What a backend provides for an op, looked at when it is bound; and the wheel that it comes from, for messages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from drivetrain.errors import DeviceError, DrivetrainError
from drivetrain_api.v1 import (
    AttentionSpec,
    AttentionTraits,
    Decline,
    DrawSpec,
    Fused,
    LinearSpec,
    OpSpec,
    OpTraits,
    Packed,
    Provided,
)
from drivetrain_api.v1.hooks import ENTRY_POINT_GROUP

ATTENTION = ("plan", "write", "forward")
LINEAR = ("packed_bytes", "pack", "apply")
GREEDY_HEAD = ("takes", "best")
FIX = "report this to the wheel's vendor"


def ask(backend: Any, spec: OpSpec) -> Provided | Decline:
    """Return the backend's answer. DeviceError naming wheel and op when it raises or gives what can't be bound."""
    wheel = wheel_of(backend)
    try:
        answer = backend.provide(spec)
    except DrivetrainError:
        raise
    except Exception as error:
        raise DeviceError(f"{wheel}: provide({spec.op}) raised {raised(error)}; asked for {spec}", fix=FIX) from error
    if isinstance(answer, Decline):
        return answer
    if not isinstance(answer, Provided):
        came = f"provide({spec.op}) returned {brief(answer)}, expected Provided or Decline"
        raise DeviceError(f"{wheel}: {came}; asked for {spec}", fix=FIX)
    if problem := _problem(spec, answer):
        raise DeviceError(f"{wheel}: provide({spec.op}) {problem}; asked for {spec}", fix=FIX)
    return answer


def _problem(spec: OpSpec, answer: Provided, names: Sequence[str] = ()) -> str:
    """What is wrong with an answer. ``names``: of what it must have in place of what the spec's own providers have."""
    if not isinstance(answer.label, str) or not answer.label:
        return f"gave the label {brief(answer.label)}, expected text"
    if not isinstance(answer.traits, OpTraits):
        return f"gave {answer.label!r} the traits {brief(answer.traits)}, expected OpTraits"
    made = answer.implementation
    what = f"gave {answer.label!r} the implementation {brief(made)}"
    for kind, own in ((AttentionSpec, ATTENTION), (LinearSpec, LINEAR)):
        if isinstance(spec, kind):
            names = names or own
            missing = [name for name in names if not callable(getattr(made, name, None))]
            if missing:
                return f"{what}, expected an object with {', '.join(names)}: it has no {', '.join(missing)}"
            if kind is AttentionSpec and not isinstance(getattr(made, "traits", None), AttentionTraits):
                return f"{what}, expected one with AttentionTraits: it has {brief(getattr(made, 'traits', None))}"
            return ""
    return "" if callable(made) else f"{what}, expected a callable"


def ask_fused(backend: Any, specs: Sequence[OpSpec]) -> Provided | None:
    """Return the backend's one implementation of a whole run of specs, or None. DeviceError naming wheel and ops when
    it raises or gives what can't be bound."""
    wheel, ops = wheel_of(backend), " + ".join(spec.op for spec in specs)
    try:
        answer = backend.fuse(specs)
    except DrivetrainError:
        raise
    except Exception as error:
        raise DeviceError(f"{wheel}: fuse({ops}) raised {raised(error)}; asked for {specs}", fix=FIX) from error
    if answer is None:
        return None
    if not isinstance(answer, Fused) or not isinstance(answer.provided, Provided):
        came = f"fuse({ops}) returned {brief(answer)}, expected Fused or None"
        raise DeviceError(f"{wheel}: {came}; asked for {specs}", fix=FIX)
    if answer.count != len(specs):
        return None
    kind = next((spec for spec in specs if isinstance(spec, LinearSpec)), OpSpec(dtype=specs[0].dtype))
    if problem := _problem(kind, answer.provided, GREEDY_HEAD if isinstance(specs[-1], DrawSpec) else ()):
        raise DeviceError(f"{wheel}: fuse({ops}) {problem}; asked for {specs}", fix=FIX)
    return answer.provided


def packed_bytes(linear: Any, spec: LinearSpec) -> int:
    """Ask a linear's provider what a packed weight will take. DeviceError when it can't say."""
    try:
        answer = linear.packed_bytes(spec)
    except Exception as error:
        raise DeviceError(_linear(linear, spec, f"packed_bytes raised {raised(error)}"), fix=FIX) from error
    if type(answer) is not int or answer < 0:
        came = f"packed_bytes returned {brief(answer)}, expected a number of bytes"
        raise DeviceError(_linear(linear, spec, came), fix=FIX)
    return answer


def pack(linear: Any, spec: LinearSpec, weight: Any, bias: Any) -> Packed:
    """Let a linear's provider pack a weight. DeviceError when it raises or returns no ``Packed``."""
    try:
        packed = linear.pack(weight, bias)
    except DrivetrainError:
        raise
    except Exception as error:
        raise DeviceError(_linear(linear, spec, f"pack raised {raised(error)}"), fix=FIX) from error
    if not isinstance(packed, Packed):
        raise DeviceError(_linear(linear, spec, f"pack returned {brief(packed)}, expected Packed"), fix=FIX)
    return packed


def _linear(linear: Any, spec: LinearSpec, what: str) -> str:
    return f"{_wheel(type(linear).__module__)}: {spec.op} by {type(linear).__name__}: {what}; bound for {spec}"


def wheel_of(backend: Any) -> str:
    """Name the wheel whose code answers for a backend: by its ``provide``, which may be wrapped, or its class."""
    provide = getattr(backend, "provide", None)
    provide = getattr(provide, "func", provide)
    owner = getattr(provide, "__self__", provide)
    for thing in (owner, provide, backend):
        module = getattr(thing, "__module__", None) or type(thing).__module__
        if isinstance(module, str) and (found := _installed(module)):
            return found
    return "the backend"


def _wheel(module: str) -> str:
    return _installed(module) or module


def _installed(module: str) -> str:
    package = module.split(".")[0]
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.module.split(".")[0] == package and point.dist is not None:
            return f"{point.dist.metadata['Name']} {point.dist.version}"
    return ""


def brief(value: Any) -> str:
    """Name a value in a message."""
    if value is None:
        return "None"
    if isinstance(value, str | int | float | bool):
        return f"{type(value).__name__} {value!r}"[:60]
    return f"an object of type {type(value).__name__}"


def raised(error: BaseException) -> str:
    """Say what was raised, and on which line."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = f" ({last.tb_frame.f_code.co_filename}:{last.tb_lineno})" if last is not None else ""
    return f"{type(error).__name__}: {error}{where}"
