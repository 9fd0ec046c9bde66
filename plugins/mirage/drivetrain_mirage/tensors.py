"""Device tensors: wrappers without values. Every torch op on one arrives in ``dispatch`` and is queued from there.

A tensor's shape, strides and dtype are known at once: they come from running the op on shapes alone (torch's
``meta`` device), once for each signature. Its values are garbage until the queue has come to the op. Views share
their base's storage, so aliasing and writes in place are those of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from .allowed import (
    DECLARED_DTYPES,
    DECLARED_OPS,
    DOUBLE_OPS,
    HOST_READS,
    VALUE_SHAPES,
    VIEWS,
    WHOLE,
    op_name,
)
from .device import MirageDevice
from .ledger import Slab
from .rules import RuleError

Overload = torch._ops.OpOverload
Handler = Callable[[Overload, tuple[Any, ...], dict[str, Any]], Any]
MAX_SIGNATURES = 50_000


class Spec:
    """Shape, strides and dtype of a tensor; equal ones are the same object. ``extent``: elements of storage."""

    __slots__ = ("dtype", "extent", "shape", "stride")

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.stride, self.dtype = shape, stride, dtype
        reach = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        self.extent = 0 if 0 in shape else reach + 1

    def meta(self) -> torch.Tensor:
        """Return a tensor of that shape without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


_SPECS: dict[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], Spec] = {}
_SIGNATURES: dict[tuple[Any, ...], tuple[Spec, ...]] = {}
_HANDLERS: dict[Overload, Handler] = {}
_DEVICE: list[torch.device] = []


def spec_of(raw: torch.Tensor) -> Spec:
    """Return the spec of a buffer or of a shape-only tensor."""
    key = (tuple(raw.shape), raw.stride(), raw.dtype)
    spec = _SPECS.get(key)
    if spec is None:
        spec = _SPECS[key] = Spec(*key)
    return spec


class MirageTensor(torch.Tensor):
    """``raw``: the buffer on the device. ``slab``: its storage's bytes, shared by all views. ``owner``: its device;
    None for a scalar that torch made for an assignment such as ``x[i] = 0``, which any device takes."""

    raw: torch.Tensor
    spec: Spec
    slab: Slab | None
    owner: MirageDevice | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Overload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func) or _handler(func)
        return handler(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and dtype: printing values would read them."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"MirageTensor(shape={tuple(self.shape)}, dtype={dtype}, values on the device)"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def item(self) -> NoReturn:
        _refuse_read("item()")

    def tolist(self) -> NoReturn:
        _refuse_read("tolist()")

    def numpy(self, *, force: bool = False) -> NoReturn:
        _refuse_read("numpy()")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_read("conversion to a numpy array")

    def cpu(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_read("cpu()")

    def __bool__(self) -> NoReturn:
        _refuse_read("bool()")

    def __int__(self) -> NoReturn:
        _refuse_read("int()")

    def __float__(self) -> NoReturn:
        _refuse_read("float()")

    def __index__(self) -> NoReturn:
        _refuse_read("use as a Python index")


def _refuse_read(what: str) -> NoReturn:
    raise RuleError(
        "no-host-reads",
        f"{what} of a device tensor",
        "begin a copy with DeviceRuntime.to_host and read the HostCopy's get(), or keep the decision on the device",
    )


def wrap(owner: MirageDevice | None, raw: torch.Tensor, spec: Spec, slab: Slab | None) -> MirageTensor:
    """Make the tensor of a buffer."""
    if not _DEVICE:
        from .registration import torch_device

        _DEVICE.append(torch_device())
    tensor: MirageTensor = torch.Tensor._make_wrapper_subclass(
        MirageTensor,
        spec.shape,
        strides=spec.stride,
        storage_offset=raw.storage_offset(),
        dtype=spec.dtype,
        device=_DEVICE[0],
    )
    tensor.raw, tensor.spec, tensor.slab, tensor.owner = raw, spec, slab, owner
    return tensor


def new(owner: MirageDevice, spec: Spec) -> MirageTensor:
    """Make an uninitialised tensor: poisoned."""
    raw, slab = owner.allocate(spec.shape, spec.stride, spec.dtype, spec.extent)
    return wrap(owner, raw, spec, slab)


def new_dense(owner: MirageDevice, shape: tuple[int, ...], dtype: torch.dtype) -> MirageTensor:
    """Make an uninitialised contiguous tensor."""
    return new(owner, spec_of(torch.empty(shape, dtype=dtype, device="meta")))


def host_scalar(value: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> MirageTensor:
    """What torch gets when it turns the number in ``x[i] = number`` into a tensor of x's device."""
    raw = torch.scalar_tensor(value, dtype=dtype)
    return wrap(None, raw, spec_of(raw), None)


def on_device(value: Any, what: str) -> MirageTensor:
    """Return the argument when it is a device tensor. RuleError otherwise."""
    if isinstance(value, MirageTensor):
        return value
    raise RuleError("one-device", f"{what} is {_describe(value)}", "bring it here with DeviceRuntime.from_host")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.device} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


# -- arguments -----------------------------------------------------------------------------------------------


class _Call:
    """Unwrapped arguments of one op: ``key``, its signature; ``raws``; ``owner``, the device of its tensors."""

    __slots__ = ("args", "key", "kwargs", "owner")

    def __init__(self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.key: list[Any] = [func]
        self.owner: MirageDevice | None = None
        self.args = tuple([self._take(a) for a in args])
        self.kwargs = self._keywords(func, kwargs) if kwargs else kwargs

    def _take(self, value: Any) -> Any:
        if type(value) is MirageTensor:
            self.key.append(value.spec)
            if value.owner is not self.owner and value.owner is not None:
                self._join(value.owner)
            return value.raw
        if isinstance(value, list | tuple):
            self.key.append(len(value))
            return [self._take(v) for v in value]
        if isinstance(value, torch.Tensor):
            return self._host(value)
        self.key.append(value)
        self.key.append(value.__class__)
        return value

    def _join(self, owner: MirageDevice) -> None:
        if self.owner is None:
            self.owner = owner
        else:
            raise RuleError("one-device", f"{self.key[0]} mixes two devices", "keep the engines' tensors apart")

    def _host(self, value: torch.Tensor) -> torch.Tensor:
        if value.device.type != "cpu" or value.dim():
            raise RuleError(
                "one-device",
                f"{self.key[0]} got {_describe(value)} among device tensors",
                "bring it here with DeviceRuntime.from_host",
            )
        self.key.append(("host scalar", value.dtype))
        return value

    def _keywords(self, func: Overload, kwargs: dict[str, Any]) -> dict[str, Any]:
        out = {}
        for name, value in kwargs.items():
            if name == "device" and value is not None:
                if torch.device(value).type != "mirage":
                    _refuse_read(f"{func} to {value}")
            elif name == "pin_memory":
                continue
            else:
                self.key.append(name)
                out[name] = self._take(value)
        return out


def _infer(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[Any, ...]) -> tuple[Spec, ...]:
    """Run an op on shapes alone. Raises what torch raises for shapes that don't fit, and RuleError for dtypes."""
    name = op_name(func)
    result = func(*_shapes_only(args), **{k: _shapes_only(v) for k, v in kwargs.items()})
    metas = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    specs = tuple(spec_of(meta) for meta in metas)
    for spec in (*specs, *(part for part in key if isinstance(part, Spec))):
        _check_dtype(name, spec.dtype)
    if len(_SIGNATURES) >= MAX_SIGNATURES:
        _SIGNATURES.clear()
    _SIGNATURES[key] = specs
    return specs


def _shapes_only(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return spec_of(value).meta()
    if isinstance(value, list | tuple):
        return [_shapes_only(v) for v in value]
    return value


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype in DECLARED_DTYPES or (dtype == torch.float64 and name in DOUBLE_OPS):
        return
    raise RuleError(
        "declared-dtypes", f"aten::{name} with {dtype}", "use float32 or bfloat16, int32 or int64, uint8 or bool"
    )


# -- kinds of ops --------------------------------------------------------------------------------------------


def _handler(func: Overload) -> Handler:
    handler = _choose(func)
    _HANDLERS[func] = handler
    return handler


def _choose(func: Overload) -> Handler:
    name = op_name(func)
    if name in HOST_READS:
        return _read
    if name in VALUE_SHAPES:
        return _value_shape
    composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    if composite and name not in WHOLE:
        return _decompose
    if name not in DECLARED_OPS:
        return _undeclared
    if name in VIEWS:
        return _view
    written = [i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    if written:
        return _in_place if written == [0] else _undeclared
    return _indexed if name == "index" else _compute


def _compute(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = _Call(func, args, kwargs)
    key = tuple(call.key)
    specs = _SIGNATURES.get(key) or _infer(func, call.args, call.kwargs, key)
    owner = call.owner
    assert owner is not None
    if owner.watch is not None:
        owner.watch(key)
    if len(specs) == 1:
        out = new(owner, specs[0])
        owner.current.put((func, call.args, call.kwargs, out.raw))
        return out
    outs = tuple([new(owner, spec) for spec in specs])
    owner.current.put((func, call.args, call.kwargs, tuple([out.raw for out in outs])))
    return outs


def _indexed(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _check_index(func, args[1])
    return _compute(func, args, kwargs)


def _check_index(func: Overload, indices: Any) -> None:
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            _value_shape(func, (), {})


def _in_place(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if type(args[0]) is not MirageTensor:
        _refuse_read(f"{func} into {_describe(args[0])}")
    if op_name(func) == "index_put":
        _check_index(func, args[1])
    call = _Call(func, args, kwargs)
    key = tuple(call.key)
    if key not in _SIGNATURES:
        _infer(func, call.args, call.kwargs, key)
    owner = call.owner
    assert owner is not None
    if owner.watch is not None:
        owner.watch(key)
    owner.check()
    owner.current.put((func, call.args, call.kwargs, None))
    return args[0]


def _view(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = args[0]
    raw = func(base.raw, *args[1:], **kwargs)
    if isinstance(raw, torch.Tensor):
        if raw.dtype is not base.dtype:
            _check_dtype(op_name(func), raw.dtype)
        return wrap(base.owner, raw, spec_of(raw), base.slab)
    return [wrap(base.owner, r, spec_of(r), base.slab) for r in raw]


def _decompose(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func.decompose(*args, **kwargs)


def _read(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    _refuse_read(str(func))


def _value_shape(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise RuleError(
        "fixed-shapes", f"{func} gives a result whose shape depends on values", "use torch.where over a fixed shape"
    )


def _undeclared(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise RuleError(
        "declared-ops",
        f"{func} is not one of them",
        "write it with ops of drivetrain_mirage.allowed.DECLARED_OPS, or have the backend provide the op whole",
    )
