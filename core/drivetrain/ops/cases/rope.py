"""Inputs of rope.angles and rope.apply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch

from drivetrain.ops.cases.source import Source, call_case
from drivetrain.ops.reference.kinds import Case, Place
from drivetrain_api.v1 import RopeAnglesSpec, RopeSpec

STYLES: tuple[Literal["halves", "interleaved"], ...] = ("halves", "interleaved")


def angles_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Positions of one row and of three, far positions, a factor; both slot dtypes."""
    source = Source("float32", seed)
    for dim, factor, sections in ((16, 1.0, ()), (20, 1.25, (2, 3, 5))):
        spec = RopeAnglesSpec(dtype="float32", rotary_dim=dim, attention_factor=factor, sections=sections)
        inv_freq = torch.from_numpy(np.asarray(10000.0 ** -(np.arange(0, dim, 2, dtype=np.float64) / dim), np.float32))
        for slot_dtype in ("int32", "int64"):
            for name, tokens in (("empty", 0), ("one token", 1), ("ragged", 9)):
                positions = source.integers(0, 32768, tokens, dtype=slot_dtype)
                yield call_case(
                    place,
                    f"{name}, {slot_dtype}, {dim}",
                    spec,
                    {"positions": positions, "inv_freq": inv_freq},
                )
        if sections:
            positions = source.integers(0, 4096, 3, 6)
            yield call_case(place, "three rows", spec, {"positions": positions, "inv_freq": inv_freq})


def rope_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Whole and partial rotation, both styles, heads that are a view of a wider row."""
    source = Source(dtype, seed)
    for style in STYLES:
        for head_dim, rotary_dim, heads in ((16, 16, 6), (20, 12, 4)):
            spec = RopeSpec(dtype=dtype, head_dim=head_dim, rotary_dim=rotary_dim, style=style)
            for name, tokens in (("empty", 0), ("one token", 1), ("ragged", 11)):
                angle = source.normal(tokens, rotary_dim // 2, scale=3.0, dtype="float32")
                inputs = {
                    "x": source.normal(tokens, heads + 2, head_dim)[:, :heads],
                    "cos": angle.cos(),
                    "sin": angle.sin(),
                }
                yield call_case(place, f"{style}, {name}, {rotary_dim} of {head_dim}", spec, inputs)
