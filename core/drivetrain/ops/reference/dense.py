"""linear and embedding."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from torch.nn import functional

from drivetrain.errors import DeviceError
from drivetrain.ops.cases.dense import embedding_cases, linear_cases
from drivetrain.ops.reference.kinds import Cost, ReferenceOp, Tolerance, pointwise_tolerance, row_cost
from drivetrain_api.v1 import BatchFacts, EmbeddingSpec, LinearSpec, Packed, dtype_bytes, torch_dtype

TILE_ROWS = 16


class ReferenceLinear:
    """linear/1: y[t, o] = sum_i x[t, i] weight[o, i] + bias[o]; x [T, in], weight [out, in], bias [out], y
    [T, out].

    Sums are kept at least in float32 and rounded to the activations' dtype once. Packing keeps the given tensors
    as they are: a tied weight costs nothing more, as the embedding holds it.
    """

    def __init__(self, spec: LinearSpec) -> None:
        if spec.quant is not None:
            raise DeviceError(
                f"{spec.op} has no reference for quantized weights yet ({spec.quant.scheme})",
                fix="use a checkpoint with dense weights",
            )
        self._spec = spec

    def packed_bytes(self, spec: LinearSpec) -> int:
        """Weight and bias; the bias alone where the embedding holds the weight."""
        size = dtype_bytes(spec.dtype)
        weight = 0 if spec.tied else spec.out_features * spec.in_features * size
        return weight + (spec.out_features * size if spec.bias else 0)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        """Keep both."""
        return Packed(
            data=(weight, bias),
            nbytes=self.packed_bytes(self._spec),
            peak_bytes=0,
            keeps_source=self._spec.tied,
        )

    def apply(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """One product for all rows."""
        return self._product(x, *packed.data)

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Widen what is narrower than the rows: a product has one dtype."""
        if weight.dtype != x.dtype:
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return functional.linear(x, weight, bias)

    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return the dense weight [out, in]."""
        weight: torch.Tensor = packed.data[0]
        return weight


class InvariantLinear(ReferenceLinear):
    """The same, always in products of ``TILE_ROWS`` rows: a row meets one shape, whatever the batch."""

    def apply(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """One product a tile; the last tile is filled up with rows of zeros."""
        weight, bias = packed.data
        rows = x.shape[0]
        tiles = functional.pad(x, (0, 0, 0, -rows % TILE_ROWS)).split(TILE_ROWS)
        return torch.cat([self._product(tile, weight, bias) for tile in tiles])[:rows]


def make_embedding(spec: EmbeddingSpec) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """embedding/1: ``fn(ids [T], weight [vocabulary, size]) -> [T, size]``: row ids[t], times ``scale``.

    Rows are converted to the activations' dtype, then scaled. Ids outside 0 .. vocabulary - 1 are the caller's error.
    """
    dtype = torch_dtype(spec.activation_dtype)

    def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = functional.embedding(ids, weight).to(dtype)
        return rows if spec.scale == 1.0 else rows * spec.scale

    return embedding


def linear_tolerance(dtype: str) -> Tolerance:
    """For products of unit variance over up to 4,096 terms: rounding of the dtype and of float32 sums."""
    rtol = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    return Tolerance(rtol=rtol, atol=rtol * sqrt(16.0))


def linear_cost(spec: LinearSpec, facts: BatchFacts) -> Cost:
    """The weight once, rows in and out."""
    weight = spec.in_features * spec.out_features
    rows = facts.num_tokens * (spec.in_features + spec.out_features)
    return Cost(bytes=(weight + rows) * dtype_bytes(spec.dtype), operations=2 * facts.num_tokens * weight)


def embedding_cost(spec: EmbeddingSpec, facts: BatchFacts) -> Cost:
    """Read a row, write a row."""
    return row_cost(spec, facts, 2 * spec.size, spec.size)


LINEAR = ReferenceOp(
    op=LinearSpec.op,
    make=ReferenceLinear,
    invariant=InvariantLinear,
    cases=linear_cases,
    tolerance=linear_tolerance,
    cost=linear_cost,
)
EMBEDDING = ReferenceOp(
    op=EmbeddingSpec.op,
    make=make_embedding,
    invariant=make_embedding,
    cases=embedding_cases,
    tolerance=pointwise_tolerance,
    cost=embedding_cost,
)
