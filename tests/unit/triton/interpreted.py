"""Triton kernels run on host tensors by Triton's interpreter, with bfloat16 mended.

The interpreter keeps bfloat16 as raw 16-bit integers and computes with those: products and sums come out wrong without
a word. Here every operation on bfloat16 is done in float32 and rounded to nearest even. Import this module before any
of the kernels; ``interpreted()`` is the context in which modules of kernels are imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import triton
from triton import language as tl
from triton.runtime import interpreter

Builder, Handle, BF16 = interpreter.InterpreterBuilder, interpreter.TensorHandle, tl.bfloat16


def widen(bits: np.ndarray) -> np.ndarray:
    """uint16 bits -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bits, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).reshape(np.shape(values))


def is_bf16(handle) -> bool:
    return handle.dtype.scalar == BF16


def wide(handle) -> np.ndarray:
    return widen(handle.data) if is_bf16(handle) else handle.data


def result(values: np.ndarray):
    return values if values.dtype == bool else narrow(values)


@cache
def interpret(function) -> interpreter.InterpretedFunction:
    return interpreter.InterpretedFunction(function)


@cache
def builtins_of(place) -> tuple[str, ...]:
    """Names of the language's own functions in a module or class, before any was exchanged."""
    return tuple(name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member))


def patch_builtins(place, builder, scope) -> None:
    """As the interpreter's own: exchange what is not exchanged yet. That one reads the whole module at each call of a
    function inside a kernel, which took half of a kernel's time."""
    for name in builtins_of(place):
        member = getattr(place, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(place, name, member, builder, scope)


def mend() -> None:
    """Patch the interpreter, once."""
    if getattr(Builder, "_drivetrain_mended", False):
        return
    # Triton's own library (sum, zeros, cdiv ...) was defined before, for the compiler: it runs interpreted too.
    triton.JITFunction.__call__ = lambda function, *args, **named: interpret(function.fn)(*args, **named)
    interpreter._patch_builtin = patch_builtins
    binary, ternary, unary = Builder.binary_op, Builder.ternary_op, Builder.unary_op
    product, cast = Builder.create_dot, Builder.cast_impl

    def binary_op(self, left, right, op):
        if is_bf16(left) and is_bf16(right):
            return Handle(result(op(wide(left), wide(right))), BF16)
        return binary(self, left, right, op)

    def ternary_op(self, one, two, three, op):
        if op is not np.where and is_bf16(three):
            return Handle(narrow(op(wide(one), wide(two), wide(three))), BF16)
        return ternary(self, one, two, three, op)

    def unary_op(self, value, op):
        return Handle(narrow(op(wide(value))), BF16) if is_bf16(value) else unary(self, value, op)

    def create_dot(self, a, b, d, *rest, **named):
        if is_bf16(a) or is_bf16(b):
            return Handle(np.matmul(wide(a), wide(b), dtype=np.float32).astype(d.data.dtype) + d.data, d.dtype.scalar)
        return product(self, a, b, d, *rest, **named)

    def cast_impl(self, source, wanted):
        own, other = source.dtype.scalar, wanted.scalar
        if own == BF16 and other != BF16:
            return Handle(widen(source.data).astype(interpreter._get_np_dtype(wanted)), other)
        if other == BF16 and own != BF16:
            return Handle(narrow(source.data.astype(np.float32)), other)
        return cast(self, source, wanted)

    Builder.binary_op, Builder.ternary_op, Builder.unary_op = binary_op, ternary_op, unary_op
    Builder.create_dot, Builder.cast_impl = create_dot, cast_impl
    Builder._drivetrain_mended = True


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels defined inside run by the mended interpreter."""
    mend()
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = True
    try:
        yield
    finally:
        triton.knobs.runtime.interpret = before
