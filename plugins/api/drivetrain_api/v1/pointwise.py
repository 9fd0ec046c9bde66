"""Pointwise ops: norms, gated activations, rotary positions, caps. Implementations are plain callables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .ops import OpSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNormSpec(OpSpec):
    """``fn(x [..., size], weight [size]) -> [..., size]``: x / sqrt(mean(x^2) + eps) * (weight + offset), in float32.

    With a weight [N, size] and x [..., N, size] each of N heads has a weight of its own.
    ``round_before_weight``: the normalised value is rounded to x's dtype before the weight multiplies it.
    """

    op: ClassVar[str] = "norm.rms/1"
    size: int
    eps: float
    offset: float = 0.0
    round_before_weight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRmsNormSpec(OpSpec):
    """``fn(x, residual, weight) -> (normed, total)``: total = x + residual, normed = norm.rms of total.

    ``residual`` and ``total`` may be float32 beside an x and a weight of a smaller dtype, which normed has.
    """

    op: ClassVar[str] = "norm.add_rms/1"
    size: int
    eps: float
    offset: float = 0.0
    round_before_weight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormSpec(OpSpec):
    """``fn(x [..., size], weight [size], bias [size]) -> [..., size]``, in float32 and rounded once:
    (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias. The result has the weight's dtype."""

    op: ClassVar[str] = "norm.layer/1"
    size: int
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AddLayerNormSpec(OpSpec):
    """``fn(x, residual, weight, bias) -> (normed, total)``: total = x + residual, normed = norm.layer of total.

    ``residual`` and ``total`` may be float32 beside an x and a weight of a smaller dtype, which normed has.
    """

    op: ClassVar[str] = "norm.add_layer/1"
    size: int
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec(OpSpec):
    """``fn(x [T, size]) -> [T, size]``: act(x), computed in float32 and rounded once."""

    op: ClassVar[str] = "activation.plain/1"
    size: int
    kind: Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedActivationSpec(OpSpec):
    """``fn(gate_up [T, 2 * size]) -> [T, size]``: act(first half) * second half."""

    op: ClassVar[str] = "activation.gated/1"
    size: int
    kind: Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeAnglesSpec(OpSpec):
    """``fn(positions [T] or [3, T], inv_freq [rotary_dim / 2] float32) -> (cos, sin)`` [T, rotary_dim / 2] float32,
    both times ``attention_factor``.

    ``sections``: with positions of three rows, how many consecutive frequencies each row drives; sums to
    rotary_dim / 2. With positions of one row it is not used.
    """

    op: ClassVar[str] = "rope.angles/1"
    rotary_dim: int
    attention_factor: float = 1.0
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec(OpSpec):
    """``fn(x [T, N, D], cos, sin) -> [T, N, D]``: rotates the first ``rotary_dim`` of D in each of N heads.

    x holds the query heads and after them the key heads, which are rotated alike.
    ``halves``: pairs are (i, i + rotary_dim / 2); ``interleaved``: (2i, 2i + 1). Computed in float32.
    """

    op: ClassVar[str] = "rope.apply/1"
    head_dim: int
    rotary_dim: int
    style: Literal["halves", "interleaved"] = "halves"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftCapSpec(OpSpec):
    """``fn(x) -> cap * tanh(x / cap)``, computed in float32, of x's dtype."""

    op: ClassVar[str] = "soft_cap/1"
    cap: float
