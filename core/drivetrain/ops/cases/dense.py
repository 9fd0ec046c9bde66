"""Inputs of linear and embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from drivetrain.ops.cases.source import Source, call_case, on
from drivetrain.ops.reference.kinds import Case, Place
from drivetrain_api.v1 import EmbeddingSpec, LinearSpec


def linear_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Odd sizes, bias, tied weights, and row counts around every tile size."""
    source = Source(dtype, seed)
    for size_in, size_out, bias, tied in (
        (64, 96, False, False),
        (61, 47, True, False),
        (40, 131, False, True),
        (1, 3, True, False),
    ):
        spec = LinearSpec(
            dtype=dtype,
            in_features=size_in,
            out_features=size_out,
            bias=bias,
            tied=tied,
            role="lm_head" if tied else "other",
        )
        weight = source.normal(size_out, size_in, scale=size_in**-0.5)
        terms = source.normal(size_out) if bias else None
        for rows in (0, 1, 2, 7, 16, 33, 70):
            inputs = {"x": source.normal(rows, size_in), "weight": weight, "bias": terms}
            yield _linear_case(place, f"{rows} rows, {size_in} to {size_out}", spec, inputs)
            if dtype in ("bfloat16", "float16"):
                wide = replace(spec, activations="float32")
                inputs = inputs | {"x": source.normal(rows, size_in, dtype="float32")}
                yield _linear_case(place, f"{rows} float32 rows, {size_in} to {size_out}", wide, inputs)


def _linear_case(place: Place, name: str, spec: LinearSpec, inputs: dict[str, Any]) -> Case:
    def run(linear: Any) -> tuple[torch.Tensor, ...]:
        packed = linear.pack(on(place, inputs["weight"]), on(place, inputs["bias"]))
        return (linear.apply(on(place, inputs["x"]), packed),)

    return Case(name=name, spec=spec, inputs=inputs, run=run)


def embedding_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """With and without a scale, first and last ids, both id dtypes."""
    source = Source(dtype, seed)
    for scale, activations in ((1.0, ""), (25.3, ""), (25.3, "float32" if dtype != "float64" else "")):
        spec = EmbeddingSpec(dtype=dtype, vocabulary=103, size=24, scale=scale, activations=activations)
        weight = source.normal(103, 24)
        for id_dtype in ("int32", "int64"):
            for name, tokens in (("empty", 0), ("one token", 1), ("ragged", 13)):
                ids = source.integers(0, 103, tokens, dtype=id_dtype)
                if tokens > 2:
                    ids[0], ids[1] = 0, 102
                inputs = {"ids": ids, "weight": weight}
                yield call_case(place, f"{name}, {id_dtype}, scale {scale} {activations}", spec, inputs)
