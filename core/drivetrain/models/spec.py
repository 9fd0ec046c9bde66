"""What a decoder is, as frozen values without torch. A family makes a ``ModelSpec``; ``build`` makes it run.

Every spec says which parameters it needs: ``parameters`` maps a path inside its owner to a shape. Linear weights are
[out, in]. Paths name unfused tensors (``mixer.q.weight``); how they are joined in memory is the decoder's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Shape = tuple[int, ...]
Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) in float32; see ``drivetrain_api.v1.RmsNormSpec``."""

    eps: float
    offset: float = 0.0
    round_before_weight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias in float32; see
    ``drivetrain_api.v1.LayerNormSpec``."""

    eps: float


AnyNorm = RmsNorm | LayerNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every frequency is divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BandScaling:
    """Llama 3.1's rule. Wavelengths (in tokens) above original / low_factor: the frequency is divided by ``factor``;
    below original / high_factor: kept; between: mixed linearly in original / wavelength."""

    factor: float
    low_factor: float
    high_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """A larger theta for sequences longer than ``original_positions``: theta times
    (factor * reach / original - (factor - 1)) ^ (d / (d - 2)), where ``reach`` is the longest sequence served and d
    the rotated elements. Up to the original length nothing changes."""

    factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071). A frequency that turns more than ``fast_turns`` times in ``original_positions`` is kept,
    one that turns less than ``slow_turns`` times is divided by ``factor``, and between the frequencies' indices mix
    the two linearly. ``truncate``: the ends of that stretch are whole indices."""

    factor: float
    original_positions: int
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LongScaling:
    """LongRoPE (arXiv 2402.13753): each frequency has a divisor, one set for models served up to ``original_positions``
    (``short``) and one for longer ones (``long``)."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_positions: int


Scaling = LinearScaling | BandScaling | DynamicScaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """One kind of rotary positions. ``rotary_dim``: how many leading elements of a head are rotated (even).

    ``attention_factor`` multiplies cosines and sines. ``sections``: with positions of three rows, how many consecutive
    frequencies each row drives.
    """

    theta: float
    rotary_dim: int
    scaling: Scaling | None = None
    attention_factor: float = 1.0
    style: Literal["halves", "interleaved"] = "halves"
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMixer:
    """Grouped-query attention. ``rope``: index into ``ModelSpec.ropes``, None for no positions.

    ``scale`` multiplies q . k; ``soft_cap`` bounds the product; ``window`` counts the query's own token;
    ``sinks``: one learned logit a head in the softmax's denominator; ``head_norm`` acts on each head
    of q and of k, which have a weight each (``q_norm``, ``k_norm``) that their heads share; ``whole_norm`` acts on
    all heads of q at once, and on all of k, with a weight of that width each. At most one of the two.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    rope: int | None = 0
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    head_norm: RmsNorm | None = None
    whole_norm: RmsNorm | None = None
    qkv_bias: bool = False
    out_bias: bool = False

    def parameters(self, hidden: int) -> Mapping[str, Shape]:
        """Path inside the mixer -> shape."""
        q, k = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        v, out = self.num_kv_heads * self.v_head_dim, self.num_heads * self.v_head_dim
        shapes: dict[str, Shape] = {}
        for name, rows in (("q", q), ("k", k), ("v", v)):
            shapes |= _linear(name, rows, hidden, self.qkv_bias)
        if self.head_norm is not None:
            shapes |= {"q_norm.weight": (self.head_dim,), "k_norm.weight": (self.head_dim,)}
        if self.whole_norm is not None:
            shapes |= {"q_norm.weight": (q,), "k_norm.weight": (k,)}
        if self.sinks:
            shapes["sinks"] = (self.num_heads,)
        return shapes | _linear("out", hidden, out, self.out_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    intermediate: int
    activation: Activation
    bias: bool = False

    def parameters(self, hidden: int) -> Mapping[str, Shape]:
        """Path inside the feed-forward -> shape."""
        inner = self.intermediate
        up = _linear("gate", inner, hidden, self.bias) | _linear("up", inner, hidden, self.bias)
        return up | _linear("down", hidden, inner, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMlp:
    """down(activation(up(x)))."""

    intermediate: int
    activation: Activation
    bias: bool = False

    def parameters(self, hidden: int) -> Mapping[str, Shape]:
        """Path inside the feed-forward -> shape."""
        up = _linear("up", self.intermediate, hidden, self.bias)
        return up | _linear("down", hidden, self.intermediate, self.bias)


class PartSpec(Protocol):
    """What a mixer's or a feed-forward's spec is: frozen, hashable, and able to say which parameters it has."""

    def parameters(self, hidden: int) -> Mapping[str, Shape]:
        """Path inside the part -> shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """How a branch joins the stream: stream + branch (``plain``), or stream + scale * branch (``scaled``)."""

    kind: Literal["plain", "scaled"] = "plain"
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """stream += post(mixer(norm(stream))), then the same with the feed-forward. A norm of None is left out.

    ``mixer`` and ``ffn`` are looked up by their type: see ``mixers.register`` and ``ffn.register``.
    """

    mixer: PartSpec
    ffn: PartSpec
    mixer_norm: AnyNorm | None
    ffn_norm: AnyNorm | None
    post_mixer_norm: AnyNorm | None = None
    post_ffn_norm: AnyNorm | None = None
    residual: Residual = field(default_factory=Residual)

    def parameters(self, hidden: int) -> Mapping[str, Shape]:
        """Path inside the layer -> shape."""
        shapes: dict[str, Shape] = {}
        for name in ("mixer_norm", "post_mixer_norm", "ffn_norm", "post_ffn_norm"):
            shapes |= _norm(name, getattr(self, name), hidden)
        for name, part in (("mixer", self.mixer), ("ffn", self.ffn)):
            shapes |= {f"{name}.{path}": shape for path, shape in part.parameters(hidden).items()}
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole decoder-only model.

    ``dtype`` of weights, ``cache_dtype`` of K and V, ``activations`` of what passes between ops (empty: ``dtype``):
    torch's names. ``embed_scale`` multiplies token embeddings, rounded to ``dtype`` first; ``logit_divisor``
    divides logits, before they are capped. ``tied``: the LM head is
    the embedding. ``max_positions``: the longest sequence the model was made for; ``reach``: the longest that it is to
    serve (0: ``max_positions``), by which some ropes choose their frequencies, for all requests alike. ``eos_ids``:
    tokens that end a sequence by the configuration.
    """

    architecture: str
    dtype: str
    cache_dtype: str
    vocabulary: int
    hidden: int
    max_positions: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[Rope, ...]
    final_norm: AnyNorm
    tied: bool
    embed_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_soft_cap: float | None = None
    activations: str = ""
    reach: int = 0
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def activation_dtype(self) -> str:
        """The dtype of what passes between ops, norms' weights and biases of attention included."""
        return self.activations or self.dtype

    @property
    def stretched_positions(self) -> int:
        """The longest sequence that may be asked for: beyond ``max_positions`` only where a rope says how."""
        rules = [rope.scaling for rope in self.ropes if isinstance(rope.scaling, DynamicScaling | YarnScaling)]
        return max(self.max_positions, *(int(rule.factor * rule.original_positions) for rule in rules), 0)

    def parameters(self) -> Mapping[str, Shape]:
        """Path -> shape of everything that a checkpoint must hold, in the order of the forward pass."""
        return dict(self._parameters())

    def _parameters(self) -> Iterator[tuple[str, Shape]]:
        yield "embedding.weight", (self.vocabulary, self.hidden)
        for index, layer in enumerate(self.layers):
            for path, shape in layer.parameters(self.hidden).items():
                yield f"layers.{index}.{path}", shape
        yield from _norm("final_norm", self.final_norm, self.hidden).items()
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, self.hidden)


def _norm(name: str, norm: AnyNorm | None, size: int) -> dict[str, Shape]:
    if norm is None:
        return {}
    kinds = ("weight", "bias") if isinstance(norm, LayerNorm) else ("weight",)
    return {f"{name}.{kind}": (size,) for kind in kinds}


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if bias else weight
