"""Where test inputs come from: seeded host values, moved to the device of a case when it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from drivetrain.ops.reference.kinds import Case, Place
from drivetrain_api.v1 import OpSpec, torch_dtype


class Source:
    """Seeded host tensors of one dtype."""

    def __init__(self, dtype: str, seed: int) -> None:
        self.dtype = torch_dtype(dtype)
        self.random = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: str | None = None) -> torch.Tensor:
        """Return normal values of that standard deviation, rounded to the dtype."""
        values = torch.from_numpy(self.random.standard_normal(shape) * scale)
        return values.to(torch_dtype(dtype) if dtype else self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: str = "int64") -> torch.Tensor:
        """Return integers low .. high - 1."""
        return torch.from_numpy(self.random.integers(low, high, shape, np.int64)).to(torch_dtype(dtype))


def on(place: Place, value: Any) -> Any:
    """Return a host tensor on the place's device; anything else as it is."""
    return place.runtime.from_host(value) if isinstance(value, torch.Tensor) else value


def call_case(place: Place, name: str, spec: OpSpec, inputs: Mapping[str, Any]) -> Case:
    """Make the case of a plain callable that takes the inputs in order."""

    def run(function: Any) -> tuple[torch.Tensor, ...]:
        result = function(*(on(place, value) for value in inputs.values()))
        return (result,) if isinstance(result, torch.Tensor) else tuple(result)

    return Case(name=name, spec=spec, inputs=inputs, run=run)


def int_tensor(values: Sequence[int] | np.ndarray, dtype: str) -> torch.Tensor:
    """Return a host tensor of integers."""
    return torch.from_numpy(np.asarray(values, np.int64)).to(torch_dtype(dtype))
