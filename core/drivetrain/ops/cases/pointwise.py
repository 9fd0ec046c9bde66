"""Inputs of norms, gated activations and caps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from drivetrain.ops.cases.source import Source, call_case
from drivetrain.ops.reference.kinds import Case, Place
from drivetrain_api.v1 import (
    ActivationSpec,
    AddLayerNormSpec,
    AddRmsNormSpec,
    GatedActivationSpec,
    LayerNormSpec,
    RmsNormSpec,
    SoftCapSpec,
)

ROWS = (("empty", 0), ("one row", 1), ("ragged", 7), ("many rows", 70))
KINDS: tuple[Literal["silu", "gelu_tanh", "gelu"], ...] = ("silu", "gelu_tanh", "gelu")


def rms_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Both kinds of weight, odd sizes, a head axis, a row of zeros."""
    source = Source(dtype, seed)
    for size, eps, offset, early in ((64, 1e-6, 1.0, False), (61, 1e-5, 0.0, True), (8, 1e-6, 0.0, False)):
        spec = RmsNormSpec(dtype=dtype, size=size, eps=eps, offset=offset, round_before_weight=early)
        weight = source.normal(size, scale=0.3) + (1 - offset)
        for name, rows in ROWS:
            x = source.normal(rows, size, scale=3.0)
            if rows > 1:
                x[1] = 0
            yield call_case(place, f"{name} of {size}", spec, {"x": x, "weight": weight})
        heads = {"x": source.normal(5, 3, size), "weight": weight}
        yield call_case(place, f"heads of {size}", spec, heads)
        own = {"x": source.normal(5, 4, size)[:, :3], "weight": source.normal(3, size, scale=0.3) + (1 - offset)}
        yield call_case(place, f"heads of {size} with weights of their own", spec, own)


def add_rms_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """As ``rms_cases``, with a residual."""
    source = Source(dtype, seed)
    for size, eps, offset, early in ((64, 1e-6, 1.0, False), (61, 1e-5, 0.0, True)):
        spec = AddRmsNormSpec(dtype=dtype, size=size, eps=eps, offset=offset, round_before_weight=early)
        for name, rows in ROWS:
            inputs = {
                "x": source.normal(rows, size),
                "residual": source.normal(rows, size, scale=4.0),
                "weight": source.normal(size, scale=0.3) + (1 - offset),
            }
            yield call_case(place, f"{name} of {size}", spec, inputs)


def layer_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Odd sizes, rows far from zero, a row of equal elements."""
    source = Source(dtype, seed)
    for size, eps in ((64, 1e-5), (61, 1e-6), (8, 1e-5)):
        spec = LayerNormSpec(dtype=dtype, size=size, eps=eps)
        weight, bias = source.normal(size, scale=0.3) + 1, source.normal(size, scale=0.5)
        for name, rows in ROWS:
            x = source.normal(rows, size, scale=3.0)
            if rows > 1:
                x[0] += 5.0
                x[1] = 2.0
            yield call_case(place, f"{name} of {size}", spec, {"x": x, "weight": weight, "bias": bias})
        heads = {"x": source.normal(5, 3, size), "weight": weight, "bias": bias}
        yield call_case(place, f"heads of {size}", spec, heads)


def add_layer_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """As ``layer_cases``, with a residual."""
    source = Source(dtype, seed)
    for size, eps in ((64, 1e-5), (61, 1e-6)):
        spec = AddLayerNormSpec(dtype=dtype, size=size, eps=eps)
        for name, rows in ROWS:
            inputs = {
                "x": source.normal(rows, size),
                "residual": source.normal(rows, size, scale=4.0),
                "weight": source.normal(size, scale=0.3) + 1,
                "bias": source.normal(size, scale=0.5),
            }
            yield call_case(place, f"{name} of {size}", spec, inputs)


def plain_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Every activation, odd sizes, large values."""
    source = Source(dtype, seed)
    for kind in KINDS:
        for size in (32, 37):
            spec = ActivationSpec(dtype=dtype, size=size, kind=kind)
            for name, rows in ROWS:
                x = source.normal(rows, size, scale=2.0)
                if rows > 1:
                    x[1, :4] = source.normal(4, scale=30.0)
                yield call_case(place, f"{kind}, {name} of {size}", spec, {"x": x})


def gated_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Every activation, odd sizes, large values."""
    source = Source(dtype, seed)
    for kind in KINDS:
        for size in (32, 37):
            spec = GatedActivationSpec(dtype=dtype, size=size, kind=kind)
            for name, rows in ROWS:
                gate_up = source.normal(rows, 2 * size, scale=2.0)
                if rows > 1:
                    gate_up[1, :4] = source.normal(4, scale=30.0)
                yield call_case(place, f"{kind}, {name} of {size}", spec, {"gate_up": gate_up})


def soft_cap_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Values below and far above the cap."""
    source = Source(dtype, seed)
    spec = SoftCapSpec(dtype=dtype, cap=30.0)
    for name, rows in ROWS:
        yield call_case(place, name, spec, {"x": source.normal(rows, 53, scale=60.0)})
