"""Implementations of a backend behind a watch: what one of them raises or returns wrongly is noted with its op.

Only a warm-up that has failed already is run over these, so that a backend that works pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from drivetrain.errors import DeviceError
from drivetrain.ops.provided import FIX, brief, raised
from drivetrain.ops.reference import REFERENCE
from drivetrain_api.v1 import AttentionSpec, DrawSpec, GatedActivationSpec, LinearSpec, OpSpec, torch_dtype

Note = Callable[[DeviceError], None]
Form = Any  # a text for a tensor, a tuple of forms, or None for what is not looked at


class Watched:
    """A provider object or a callable, seen from outside as it is; calls of it are watched."""

    def __init__(self, implementation: Any, specs: tuple[OpSpec, ...], title: str, note: Note) -> None:
        """``specs``: one, or those of a fused run. ``title``: the provider as messages name it."""
        self._implementation, self._specs, self._title, self._note = implementation, specs, title, note

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._run("", self._implementation, given, named)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._implementation, name)
        if not callable(found):
            return found
        return lambda *given, **named: self._run(name, found, given, named)

    def _run(self, name: str, call: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        expected = _expected(self._specs, name, given, named)
        what = f"{self._title}: {name or 'it'}"
        try:
            result = call(*given, **named)
        except Exception as error:
            raise self._failed(f"{what} raised {raised(error)}") from error
        if expected is not None and (came := form_of(result)) != expected:
            shown = brief(result) if came is None else _text(came)
            raise self._failed(f"{what} returned {shown}, expected {_text(expected)}")
        return result

    def _failed(self, what: str) -> DeviceError:
        bound = ", ".join(str(spec) for spec in self._specs)
        error = DeviceError(f"{what}; bound for {bound}", fix=FIX)
        self._note(error)
        return error


def _expected(specs: tuple[OpSpec, ...], name: str, given: tuple[Any, ...], named: dict[str, Any]) -> Form:
    """The form of the right result; None where any will do. Plain ops are asked of the reference."""
    spec = specs[0]
    linear = next((each for each in specs if isinstance(each, LinearSpec)), None)
    if linear is not None and isinstance(specs[-1], DrawSpec):
        rows = given[0].shape[:1] if name == "best" else ()
        return (_tensor(rows, torch.int32), _tensor(rows, torch.float32)) if rows else None
    if linear is not None:
        return _product(specs, linear, given) if name == "apply" else None
    if len(specs) > 1:
        last = specs[-1]
        if not isinstance(last, AttentionSpec) or not given:
            return None
        return _tensor((given[0].shape[0], last.num_heads, last.v_head_dim), given[0].dtype)
    if isinstance(spec, AttentionSpec):
        if name != "forward":
            return None
        return _tensor((given[0].shape[0], spec.num_heads, spec.v_head_dim), given[0].dtype)
    reference = REFERENCE.get(spec.op)
    if reference is None:
        return None
    try:
        return form_of(reference.make(spec)(*given, **named))
    except Exception:
        return None


def _product(specs: tuple[OpSpec, ...], linear: LinearSpec, given: tuple[Any, ...]) -> Form:
    """What a linear's ``apply`` gives, alone or in a run: behind a norm it gives the sum that was normed too."""
    last, rows = specs[-1], given[0].shape[0]
    size = last.size if isinstance(last, GatedActivationSpec) else linear.out_features
    product = _tensor((rows, size), torch_dtype(linear.activation_dtype))
    if linear is specs[0]:
        return product
    kept = torch.float32 if given[1] is None else torch.result_type(given[0], given[1])
    return (product, _tensor((rows, linear.in_features), kept))


def form_of(value: Any) -> Form:
    """Shapes and dtypes of a result."""
    if isinstance(value, torch.Tensor):
        return _tensor(tuple(value.shape), value.dtype)
    if isinstance(value, tuple | list):
        return tuple(form_of(item) for item in value)
    if is_dataclass(value):
        return tuple(form_of(getattr(value, field.name)) for field in fields(value))
    return None


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _text(form: Form) -> str:
    return form if isinstance(form, str) else "(" + ", ".join("?" if f is None else _text(f) for f in form) + ")"
