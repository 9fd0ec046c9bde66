"""Linear layers, embeddings and the LM head, dense or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from .ops import OpSpec

if TYPE_CHECKING:
    import torch

LinearRole = Literal["qkv", "attention_out", "gate_up", "down", "lm_head", "router", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """How a weight is quantized (provisional until quantized formats are served).

    ``scheme`` is a format's name as checkpoints publish it; ``group`` the elements that share a scale (0: a channel).
    """

    scheme: str
    bits: int
    group: int = 0
    activation_bits: int = 0
    dynamic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec(OpSpec):
    """y = x @ weight.T + bias with weight [out_features, in_features]. The implementation is a ``Linear``.

    ``dtype``: of weight and bias. ``activations``: of x and y; empty where they have the weight's.
    ``tied``: the same storage also serves the embedding, so the source may not be freed by ``pack``.
    ``role``: what the result is for; an ``lm_head`` may give float32, which the core turns its result into anyway.
    """

    op: ClassVar[str] = "linear/1"
    in_features: int
    out_features: int
    bias: bool = False
    role: LinearRole = "other"
    tied: bool = False
    quant: QuantSpec | None = None
    activations: str = ""

    @property
    def activation_dtype(self) -> str:
        """The dtype of x and y."""
        return self.activations or self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A weight in the provider's own form. ``nbytes``: device bytes that it holds beyond the given source where the
    source stays alive, else all of them. ``peak_bytes``: the most that packing held at once beside the source."""

    data: Any
    nbytes: int
    peak_bytes: int
    keeps_source: bool


class Linear(Protocol):
    """One linear's provider."""

    def packed_bytes(self, spec: LinearSpec) -> int:
        """Say, before loading, the ``nbytes`` that ``pack`` will report; exact."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        """Take ownership of a device weight [out, in] and bias [out]."""

    def apply(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """x [T, in] -> [T, out]."""


class Unpackable(Protocol):
    """Optional, beside ``Linear``."""

    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return the dense weight [out, in]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec(OpSpec):
    """Row lookup. Implementation: ``fn(ids [T] int, weight [vocabulary, size]) -> [T, size]`` times ``scale``.

    ``dtype``: of the weight. ``activations``: of the result, converted before it is scaled; empty: the weight's.
    """

    op: ClassVar[str] = "embedding/1"
    vocabulary: int
    size: int
    scale: float = 1.0
    activations: str = ""

    @property
    def activation_dtype(self) -> str:
        """The dtype of the result."""
        return self.activations or self.dtype
