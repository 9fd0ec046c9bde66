"""Norms and rotary positions in fewer calls than the reference: at one row a call's own cost is what counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from drivetrain_api.v1 import (
    ActivationSpec,
    AddLayerNormSpec,
    AddRmsNormSpec,
    GatedActivationSpec,
    LayerNormSpec,
    RmsNormSpec,
    RopeSpec,
)

from .native import Kernels

Pair = tuple[torch.Tensor, torch.Tensor]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
LANES = 64  # a multiple of what any vector loop takes at once
UNSPLIT = 32767  # torch gives so many elements to one thread, and more to several
Prepared = tuple["weakref.ref[torch.Tensor]", int, torch.Tensor]


class ScaledWeights:
    """weight + offset in float32, computed once a weight and again when the weight was written to."""

    def __init__(self, offset: float) -> None:
        self._offset = offset
        self._known: dict[int, Prepared] = {}

    def get(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the prepared weight [size]; the weight itself where nothing is to be done."""
        if not self._offset and weight.dtype == torch.float32:
            return weight
        known = self._known.get(id(weight))
        if known is not None and known[0]() is weight and known[1] == weight._version:
            return known[2]
        prepared = weight.to(torch.float32) + self._offset
        self._known[id(weight)] = (weakref.ref(weight), weight._version, prepared)
        return prepared


class RmsNorm:
    """norm.rms/1: x times rsqrt(|x|^2 / size + eps), in four calls and the conversions that the dtypes need."""

    def __init__(self, spec: RmsNormSpec | AddRmsNormSpec) -> None:
        self._inverse_size, self._eps = 1.0 / spec.size, torch.tensor([spec.eps], dtype=torch.float32)
        self._narrow = spec.dtype != "float32"
        self._early, self._offset = spec.round_before_weight and self._narrow, spec.offset
        self._weights = ScaledWeights(spec.offset)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [..., size], weight [size] or [N, size] -> [..., size] of the weight's dtype."""
        if self._narrow:
            x = x.to(torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        normed = x * torch.addcmul(self._eps, length, length, value=self._inverse_size).rsqrt_()
        if self._early:
            return normed.to(weight.dtype) * (weight + self._offset if self._offset else weight)
        normed.mul_(self._weights.get(weight))
        return normed.to(weight.dtype) if self._narrow else normed


class NativeNorm:
    """norm.rms/1 and norm.add_rms/1 in one pass each, by this wheel's own kernel, for float32 rows."""

    def __init__(self, spec: RmsNormSpec | AddRmsNormSpec, kernels: Kernels, threads: int, *, level: int = 0) -> None:
        """``level``: a place in the library's levels."""
        self._norm, self._eps, self._level, self._threads = kernels.norm, spec.eps, level, threads
        self._weights = ScaledWeights(spec.offset)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [..., size], weight [size] or [N, size] -> [..., size]."""
        return self._norm(x, None, self._weights.get(weight), self._eps, self._level, self._threads)[0]

    def add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
        """x and residual [T, size] -> normed, total."""
        return self._norm(x, residual, self._weights.get(weight), self._eps, self._level, self._threads)


def make_add_rms(spec: AddRmsNormSpec) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Pair]:
    """norm.add_rms/1."""
    norm = RmsNorm(spec)

    def add_rms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
        total = x + residual
        return norm(total, weight), total

    return add_rms


class LayerNorm:
    """norm.layer/1 and norm.add_layer/1: torch's own norm over float32 rows, which takes each row by itself."""

    def __init__(self, spec: LayerNormSpec | AddLayerNormSpec) -> None:
        self._shape, self._eps, self._narrow = (spec.size,), spec.eps, spec.dtype != "float32"
        self._weights, self._biases = ScaledWeights(0.0), ScaledWeights(0.0)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """x [..., size], weight and bias [size] -> [..., size] of the weight's dtype."""
        if self._narrow:
            x = x.to(torch.float32)
        normed = functional.layer_norm(x, self._shape, self._weights.get(weight), self._biases.get(bias), self._eps)
        return normed.to(weight.dtype) if self._narrow else normed

    def add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Pair:
        """x and residual [T, size] -> normed, total."""
        total = x + residual
        return self(total, weight, bias), total


class Plain:
    """activation.plain/1 in one call."""

    def __init__(self, spec: ActivationSpec) -> None:
        self._activation = ACTIVATIONS[spec.kind]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> [T, size]."""
        return self._activation(x)


class InvariantPlain:
    """activation.plain/1 that gives a row the same bits in any batch, as ``InvariantGated`` does."""

    def __init__(self, spec: ActivationSpec) -> None:
        self._size, self._missing = spec.size, -spec.size % LANES
        self._activation = ACTIVATIONS[spec.kind]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> [T, size]."""
        return fixed_lanes(self._activation, x, self._missing)[..., : self._size]


class Gated:
    """activation.gated/1 in three calls."""

    def __init__(self, spec: GatedActivationSpec) -> None:
        self._sizes = (spec.size, spec.size)
        self._activation = ACTIVATIONS[spec.kind]

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * size] -> [T, size]."""
        gate, up = gate_up.split_with_sizes(self._sizes, -1)
        return self._activation(gate).mul_(up)


def fixed_lanes(activation: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, missing: int) -> torch.Tensor:
    """The activation of rows that are made longer by ``missing``, a few at a time; see ``InvariantGated``."""
    padded = functional.pad(rows, (0, missing)).contiguous()
    return torch.cat([activation(piece) for piece in padded.split(max(1, UNSPLIT // padded.shape[-1]))])


class InvariantGated:
    """activation.gated/1 that gives a row the same bits in any batch, by any number of threads.

    Torch's elementwise loops end in scalar code whose last bits differ from the vector code's. Here every row begins
    at a multiple of ``LANES`` and its length is one, and no call is large enough to be split among threads within a
    row, so that an element's code depends on its place in the row alone.
    """

    def __init__(self, spec: GatedActivationSpec) -> None:
        self._size, self._missing = spec.size, -spec.size % LANES
        self._activation = ACTIVATIONS[spec.kind]

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * size] -> [T, size]."""
        active = fixed_lanes(self._activation, gate_up[..., : self._size], self._missing)
        return active[..., : self._size] * gate_up[..., self._size :]


class Rope:
    """rope.apply/1 for halves: x cos + (x with its halves exchanged) signed-sin, the tables laid out once a step.

    Layers of a step pass the same cos and sin objects; the last pair's tables are kept.
    """

    def __init__(self, spec: RopeSpec) -> None:
        self._dim, self._head = spec.rotary_dim, spec.head_dim
        self._narrow = spec.dtype != "float32"
        self._last: tuple[torch.Tensor, torch.Tensor, int, Pair] | None = None

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [T, N, D], cos and sin [T, rotary_dim / 2] -> [T, N, D]."""
        wide_cos, signed = self._tables(cos, sin)
        part = x if self._dim == self._head else x[..., : self._dim]
        if self._narrow:
            part = part.to(torch.float32)
        turned = (part * wide_cos).addcmul_(part.roll(self._dim // 2, -1), signed)
        if self._narrow:
            turned = turned.to(x.dtype)
        return turned if self._dim == self._head else torch.cat((turned, x[..., self._dim :]), dim=-1)

    def _tables(self, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        last = self._last
        written = cos._version + sin._version
        if last is not None and last[0] is cos and last[1] is sin and last[2] == written:
            return last[3]
        tables = torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)  # [T, 1, rotary_dim]
        self._last = (cos, sin, written, tables)
        return tables
