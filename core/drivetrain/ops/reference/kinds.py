"""The parts of a reference op, and two helpers that its bodies share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain_api.v1 import BatchFacts, DeviceRuntime, OpSpec, Storage, dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a provider may be from the op computed in float64: ``|got - want| <= atol + rtol * |want|``.

    Both zero: equal values (integers).
    """

    rtol: float
    atol: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an op must move and compute at least: bytes read and written, multiplications and additions."""

    bytes: int
    operations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a case runs: the runtime that makes its tensors and the storage that makes its caches."""

    runtime: DeviceRuntime
    storage: Storage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One set of inputs. ``inputs``: host tensors and values by name, for another judge to compute from.

    ``run``: gives an implementation the inputs on the case's device and returns its results, device tensors.
    """

    name: str
    spec: OpSpec
    inputs: Mapping[str, Any]
    run: Callable[[Any], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceOp:
    """One op's meaning. ``make``: spec -> implementation. ``invariant``: spec -> an implementation that
    gives a row the same bits whatever else is in the batch, or None where there is none.

    ``cases(place, dtype, seed)``: test inputs. ``tolerance(dtype)``: against float64. ``cost(spec,
    facts)``: floor.
    """

    op: str
    make: Callable[[Any], Any]
    invariant: Callable[[Any], Any] | None
    cases: Callable[[Place, str, int], Iterator[Case]]
    tolerance: Callable[[str], Tolerance]
    cost: Callable[[Any, BatchFacts], Cost]


def count_up(like: torch.Tensor, count: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return 0 .. count - 1 on the device of ``like``, of its dtype unless another is given."""
    ones = like.new_ones(count, dtype=dtype or like.dtype)
    return ones.cumsum(0).to(ones.dtype) - 1


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype that sums are kept in: float64 for float64, else float32."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def row_cost(spec: OpSpec, facts: BatchFacts, elements: int, operations: int) -> Cost:
    """Cost of a pointwise op that moves ``elements`` and computes ``operations`` a token."""
    return Cost(bytes=facts.num_tokens * elements * dtype_bytes(spec.dtype), operations=facts.num_tokens * operations)


def pointwise_tolerance(dtype: str) -> Tolerance:
    """A few roundings of the result's dtype."""
    rtol = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    return Tolerance(rtol=rtol, atol=rtol * 0.5)


def equal(dtype: str) -> Tolerance:
    """Integers: no difference."""
    return Tolerance(rtol=0.0, atol=0.0)
