"""What a checkpoint is to the loader, and random weights for ``--load-format dummy``."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from drivetrain.errors import WeightsError

if TYPE_CHECKING:
    import torch

MAX_NAMED = 12
DRAWN = 65_521  # a prime: rows of a matrix differ; drawn in a third of a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor as stored: ``dtype`` is torch's name or the storage format's, ``nbytes`` what the file holds."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where a tensor's values lie one after another, little-endian: from byte ``offset`` of a file on, of torch's
    ``dtype``."""

    path: Path
    offset: int
    dtype: str


class Checkpoint(Protocol):
    """Named tensors, read one at a time."""

    def infos(self) -> Mapping[str, TensorInfo]:
        """Return every tensor of the checkpoint, by its Hugging Face name."""

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one tensor on the host in that dtype. WeightsError naming the file when it can't be read."""

    def close(self) -> None:
        """Release the files."""


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, TensorInfo],
    ignored: frozenset[str] = frozenset(),
) -> None:
    """Raise one WeightsError that names all missing, misshapen and extra tensors; extra ones may be ``ignored``."""
    missing = sorted(set(expected) - set(found))
    extra = sorted(set(found) - set(expected) - ignored)
    wrong = [
        f"{name} has shape {list(found[name].shape)}, the model needs {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in found and tuple(found[name].shape) != tuple(shape)
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {_names([_with_nearest(name, extra) for name in missing])}")
    if wrong:
        problems.append(f"{len(wrong)} misshapen: {_names(wrong)}")
    if extra:
        problems.append(f"{len(extra)} that the model does not have: {_names(extra)}")
    if problems:
        raise WeightsError(
            "the checkpoint does not fit the model; " + "; ".join(problems),
            fix="check that config.json belongs to these weights",
        )


def _names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _with_nearest(name: str, others: list[str]) -> str:
    near = difflib.get_close_matches(name, others, 1, cutoff=0.9)
    return f"{name} (there is {near[0]})" if near else name


class PatternCheckpoint(Protocol):
    """Optional, beside ``Checkpoint``: tensors that repeat a few values can be made on the device."""

    def pattern(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the values [n] that the tensor, flattened, repeats; on the host."""


class StoredCheckpoint(Protocol):
    """Optional, beside ``Checkpoint``: tensors that lie in files as plain values can be read by several threads."""

    def stored(self, name: str) -> Stored:
        """Return where a tensor lies. WeightsError when its dtype is none of a weight."""


def repeat(pattern: torch.Tensor, target: torch.Tensor) -> None:
    """Fill a contiguous tensor with a pattern [n], again and again."""
    flat, size = target.view(-1), pattern.shape[0]
    whole = flat.shape[0] // size if size else 0
    if whole:
        flat[: whole * size].view(whole, size).copy_(pattern.expand(whole, size))
    if whole * size < flat.shape[0]:
        flat[whole * size :].copy_(pattern[: flat.shape[0] - whole * size])


class DummyCheckpoint:
    """Random weights of the expected shapes, a function of each tensor's name alone: equal on every machine.

    Uniform with standard deviation 0.02, around 1 for vectors whose name speaks of a norm, else around 0. A large
    tensor repeats its first ``DRAWN`` values, so that it can be made where it is needed.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        size = 4 if dtype == "float32" else 2
        self._infos = {
            name: TensorInfo(shape=tuple(shape), dtype=dtype, nbytes=int(np.prod(shape, dtype=np.int64)) * size)
            for name, shape in expected.items()
        }

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        import torch

        values = torch.empty(self._infos[name].shape, dtype=dtype)
        repeat(self.pattern(name, dtype), values)
        return values

    def pattern(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the values that a tensor repeats, at most ``DRAWN`` of them, on the host."""
        import torch

        shape = self._infos[name].shape
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        count = min(DRAWN, int(np.prod(shape, dtype=np.int64)))
        draws = np.random.Generator(np.random.Philox(key=key)).random(count, np.float32)
        values = torch.from_numpy(draws).sub_(0.5).mul_(0.02 * 12**0.5)
        if len(shape) == 1 and "norm" in name:
            values += 1.0
        return values.to(dtype)

    def close(self) -> None:
        """Nothing is held."""
