"""What a vendor's hooks return, looked at before anything relies on it. Each check says what came and what is expected;
the caller names the wheel. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from drivetrain_api.v1.backend import Capabilities, dtype_bytes
from drivetrain_api.v1.device import DeviceRuntime, MemoryInfo, MemoryProfiler
from drivetrain_api.v1.graphs import Graphs
from drivetrain_api.v1.hooks import BackendInfo, DeviceRecord, OptionSpec, Unavailable
from drivetrain_api.v1.shapes import ShapePolicy
from drivetrain_api.v1.storage import Storage

T = TypeVar("T")
CALLS = ("provide", "fuse", "validate", "ready", "close")
PARTS: Mapping[str, type] = {"device": DeviceRuntime, "storage": Storage, "memory": MemoryProfiler}
OPTIONAL = ("graphs", "collectives", "transfer")
OPTION_TYPES: Mapping[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int), "bool": (bool,)}


class BadAnswer(Exception):
    """A hook returned what the contract does not allow; the text says what came and what was expected."""


def shown(value: Any) -> str:
    """Name a value in a message: briefly, and whatever its ``repr`` does."""
    if value is None:
        return "None"
    try:
        text = repr(value)
    except Exception:
        text = "?"
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def check_info(value: Any) -> BackendInfo:
    """Return what ``backend_info`` returned, its fields checked. BadAnswer otherwise."""
    info = _fields(value, BackendInfo, "backend_info returned")
    keys = [option.key for option in info.options]
    for option in info.options:
        _check_option(option)
        if keys.count(option.key) > 1:
            raise BadAnswer(f"backend_info names the option {option.key} twice, expected every key once")
    return info


def _check_option(option: OptionSpec) -> None:
    default, what = option.default, f"backend_info's option {option.key}"
    if default is not None and not isinstance(default, OPTION_TYPES[option.kind]):
        raise BadAnswer(f"{what} has the default {shown(default)}, expected {option.kind}")
    if option.choices and default is not None and default not in option.choices:
        raise BadAnswer(f"{what} has the default {shown(default)}, expected one of {', '.join(option.choices)}")


def check_environment_answer(value: Any) -> dict[str, str]:
    """Return what ``environment`` returned; None is no variable. BadAnswer unless it maps names to text."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadAnswer(f"environment returned {shown(value)}, expected a mapping of names to text")
    for name, text in value.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise BadAnswer(f"environment returned a variable named {shown(name)}, expected a name")
        if not isinstance(text, str) or "\0" in text:
            raise BadAnswer(f"environment returned {name} = {shown(text)}, expected text")
    return dict(value)


def check_devices(value: Any) -> tuple[DeviceRecord, ...] | Unavailable:
    """Return what ``probe`` returned; None is no device. BadAnswer unless it is records of distinct devices."""
    if isinstance(value, Unavailable):
        return _fields(value, Unavailable, "probe returned")
    if value is None:
        return ()
    expected = "a sequence of DeviceRecord, or Unavailable"
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise BadAnswer(f"probe returned {shown(value)}, expected {expected}")
    records = tuple(_fields(item, DeviceRecord, "probe returned a sequence with") for item in value)
    seen = set()
    for record in records:
        if record.index < 0:
            raise BadAnswer(f"probe returned a device of index {record.index}, expected 0 or more")
        if record.index in seen:
            raise BadAnswer(f"probe returned two devices of index {record.index}, expected every index once")
        seen.add(record.index)
    return records


def check_refusal(value: Unavailable) -> Unavailable:
    """Return why a backend can't be opened. BadAnswer unless reason and fix are texts."""
    return _fields(value, Unavailable, "create returned")


def check_backend(backend: Any) -> None:
    """BadAnswer unless all parts of a ``Backend`` are there and its capabilities and shapes make sense."""
    names = ("capabilities", "shapes", *PARTS, *OPTIONAL, *CALLS)
    missing = [name for name in names if not _has(backend, name)]
    if missing:
        raise BadAnswer(f"create returned {shown(backend)}, expected a Backend: it has no {', '.join(missing)}")
    for name in CALLS:
        if not callable(getattr(backend, name)):
            raise BadAnswer(f"create: the backend's {name} is {shown(getattr(backend, name))}, expected a callable")
    parts = dict(PARTS)
    if backend.graphs is not None:
        parts["graphs"] = Graphs
    for name, protocol in parts.items():
        part = getattr(backend, name)
        lacking = [member for member in vars(protocol) if not member.startswith("_") and not _has(part, member)]
        if lacking:
            what = f"expected a {protocol.__name__}: it has no {', '.join(lacking)}"
            raise BadAnswer(f"create: the backend's {name} is {shown(part)}, {what}")
    _check_device(backend.device)
    _check_sizes("storage.block_tokens", backend.storage.block_tokens, least=1, empty=False)
    _check_shapes(backend.shapes)
    _check_capabilities(backend.capabilities)


def _check_device(device: Any) -> None:
    """The device must answer: a runtime may be made for one that is absent."""
    try:
        memory = device.memory()
        device.synchronize()
    except Exception as error:
        raise BadAnswer(f"create: the device does not answer: {type(error).__name__}: {error}") from error
    if not isinstance(memory, MemoryInfo):
        raise BadAnswer(f"create: device.memory returned {shown(memory)}, expected MemoryInfo")


def _check_shapes(shapes: Any) -> None:
    if not isinstance(shapes, ShapePolicy):
        raise BadAnswer(f"create: the backend's shapes is {shown(shapes)}, expected ShapePolicy")
    for name in ("tokens", "rows", "blocks_per_row"):
        buckets = getattr(shapes, name)
        _check_sizes(f"shapes.{name}", buckets, least=1, empty=True)
        if list(buckets) != sorted(set(buckets)):
            raise BadAnswer(f"create: shapes.{name} is {shown(buckets)}, expected ascending sizes")


def _check_sizes(name: str, value: Any, *, least: int, empty: bool) -> None:
    good = isinstance(value, tuple | list) and all(type(size) is int and size >= least for size in value)
    if not good or not (value or empty):
        raise BadAnswer(f"create: {name} is {shown(value)}, expected a tuple of whole numbers, each {least} or more")


def _check_capabilities(value: Any) -> None:
    if not isinstance(value, Capabilities):
        raise BadAnswer(f"create: the backend's capabilities is {shown(value)}, expected Capabilities")
    for name in ("model_dtypes", "cache_dtypes"):
        names = getattr(value, name)
        if not isinstance(names, tuple | list) or not names:
            raise BadAnswer(f"create: capabilities.{name} is {shown(names)}, expected a tuple of dtype names")
        for dtype in names:
            _check_dtype(name, dtype)
    if not isinstance(value.activation_dtypes, Mapping):
        came = shown(value.activation_dtypes)
        raise BadAnswer(f"create: capabilities.activation_dtypes is {came}, expected a mapping of dtype names")
    for pair in value.activation_dtypes.items():
        for dtype in pair:
            _check_dtype("activation_dtypes", dtype)
    for name, least in (("default_depth", 1), ("max_batch_tokens", 0)):
        number = getattr(value, name)
        if type(number) is not int or number < least:
            raise BadAnswer(f"create: capabilities.{name} is {shown(number)}, expected a number of {least} or more")


def _check_dtype(name: str, dtype: Any) -> None:
    try:
        dtype_bytes(dtype)
    except (ValueError, TypeError):
        raise BadAnswer(f"create: capabilities.{name} has {shown(dtype)}, expected a dtype such as float32") from None


def _fields(value: Any, kind: type[T], what: str) -> T:
    """The value, every field of the declared type."""
    if not isinstance(value, kind):
        raise BadAnswer(f"{what} {shown(value)}, expected {kind.__name__}")
    try:
        return msgspec.convert(msgspec.to_builtins(value), kind)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise BadAnswer(f"{what} a {kind.__name__} with a field of the wrong type: {error}") from None


def _has(value: Any, name: str) -> bool:
    try:
        return hasattr(value, name)
    except Exception:
        return False
