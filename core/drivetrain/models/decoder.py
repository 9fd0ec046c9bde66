"""The decoder: embed, layers, final norm, logits. One class for every family; a layer range makes a pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.models.layers import CARRY_NAMES, Layer
from drivetrain.models.norms import Join, Sum, bind_entry, bind_norm
from drivetrain.models.parameters import Constant, GreedyHead, Holder, PartContext, Projection, Weight
from drivetrain.models.rope import inverse_frequencies
from drivetrain.models.spec import ModelSpec
from drivetrain.models.step import Angles, Carry, ModelStep, StepView
from drivetrain.ops import Ops
from drivetrain_api.v1 import CacheLayout, CacheSpec, DrawSpec, EmbeddingSpec, LinearSpec, RopeAnglesSpec, SoftCapSpec

__all__ = ["CacheGroup", "Carry", "Decoder", "ModelStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that keep the same kind of state and share block ids.

    ``layers``: indices among the decoder's own layers; ``attention``: what plans the group's steps, a bound
    ``PagedAttention`` for paged kinds. Equal cache specs that are planned by different implementations (another
    number of query heads) are groups of their own.
    """

    spec: CacheSpec
    layout: CacheLayout
    layers: tuple[int, ...]
    attention: Any


def _stream_dtype(spec: ModelSpec) -> str:
    """Scaled embeddings keep their digits: they begin a residual stream that is float32 in models of small dtypes."""
    return "float32" if spec.embed_scale != 1.0 and spec.dtype in ("bfloat16", "float16") else ""


class Decoder:
    """A model, or the layers ``layers`` of it. Parameters are empty until ``build.load``.

    The first stage embeds; the last one norms and makes logits. Between stages goes the carry, nothing else.
    """

    def __init__(self, spec: ModelSpec, ops: Ops, layers: range) -> None:
        self.spec = spec
        self.layer_range = layers
        self.first, self.last = layers.start == 0, layers.stop == len(spec.layers)
        self._embedding = self._bind_embedding(ops) if self.first else None
        self.layers = tuple(Layer(spec.layers[i], spec, ops, i) for i in layers)
        self._ropes = self._bind_ropes(ops)
        self._finish = self._bind_finish(ops) if self.last else None
        self._head = self._bind_head(ops) if self.last else None
        cap = spec.logit_soft_cap
        self._cap = None if cap is None else ops.bind(SoftCapSpec(dtype="float32", cap=cap))
        self.greedy = self._bind_greedy(ops)
        self.cache_specs: tuple[CacheSpec | None, ...] = tuple(layer.mixer.cache_spec for layer in self.layers)
        self.groups = self._group(ops)

    @property
    def carry_names(self) -> tuple[str, ...]:
        """Names of the carry that ``forward`` returns, which the next stage takes: tensors [T, hidden]."""
        return CARRY_NAMES

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Everything that is loaded, in the order of loading; a tied head comes after its embedding."""
        inner = (holder for layer in self.layers for holder in layer.holders)
        ropes = (frequencies for _, _, frequencies in self._ropes)
        first = () if self._embedding is None else (self._embedding[1],)
        last: list[Holder] = []
        if self._finish is not None:
            last += self._finish[1]
        if self._head is not None:
            last.append(self._head)
        return (*first, *inner, *last, *ropes)

    def embed(self, ids: torch.Tensor) -> Carry:
        """ids [T] -> the first layer's carry, ``hidden`` [T, hidden]. Only a first stage embeds."""
        if self._embedding is None:
            raise RuntimeError(f"layers {self.layer_range} are not the first stage; it takes a carry")
        look_up, weight = self._embedding
        return {"hidden": look_up(ids, weight.value)}

    def forward(self, carry: Carry, step: ModelStep) -> Carry:
        """Run the layers on the carry that ``embed`` or the stage before returned."""
        view = StepView(step, self._angles(step.positions))
        for layer in self.layers:
            carry = layer.forward(carry, view)
        return carry

    def finish(self, carry: Carry) -> torch.Tensor:
        """The last layer's carry (of all tokens or of some) -> hidden states [T, hidden] after the final norm."""
        if self._finish is None:
            raise RuntimeError(f"layers {self.layer_range} are not the last stage; send the carry on")
        return self._finish[0](carry["hidden"], carry.get("residual"))[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] from ``finish`` -> float32 [N, vocabulary], divided and capped where the model says so."""
        if self._head is None:
            raise RuntimeError(f"layers {self.layer_range} are not the last stage, which has the head")
        logits = self._head(hidden).float()
        if self.spec.logit_divisor != 1.0:
            logits.div_(self.spec.logit_divisor)  # in the head's own result: nothing more is held
        if self._cap is not None:
            logits = self._cap(logits)
        return logits

    def _angles(self, positions: torch.Tensor) -> dict[int, Angles]:
        return {index: run(positions, frequencies.value) for index, run, frequencies in self._ropes}

    def _bind_embedding(self, ops: Ops) -> tuple[Any, Weight]:
        spec = self.spec
        look_up = ops.bind(
            EmbeddingSpec(
                dtype=spec.dtype,
                vocabulary=spec.vocabulary,
                size=spec.hidden,
                scale=spec.embed_scale,
                activations=spec.activations or _stream_dtype(spec),
            )
        )
        return look_up, Weight("embedding.weight", (spec.vocabulary, spec.hidden), spec.dtype)

    def _bind_ropes(self, ops: Ops) -> tuple[tuple[int, Any, Constant], ...]:
        """(index, rope.angles, frequencies) of each rope that these layers use."""
        used = {getattr(self.spec.layers[i].mixer, "rope", None) for i in self.layer_range}
        reach = self.spec.reach or self.spec.max_positions
        bound: list[tuple[int, Any, Constant]] = []
        for index, rope in enumerate(self.spec.ropes):
            if index in used:
                angles = RopeAnglesSpec(
                    dtype="float32",
                    rotary_dim=rope.rotary_dim,
                    attention_factor=rope.attention_factor,
                    sections=rope.sections,
                )
                bound.append((index, ops.bind(angles), Constant(inverse_frequencies(rope, reach))))
        return tuple(bound)

    def _bind_finish(self, ops: Ops) -> tuple[Join | Sum, list[Holder]]:
        spec = self.spec
        context = PartContext(spec, ops, "final_norm", {"weight": (spec.hidden,), "bias": (spec.hidden,)})
        norm = bind_norm(spec.final_norm, spec.hidden, context, "")
        return bind_entry(spec.final_norm, spec.hidden, context, norm), context.holders

    def _bind_head(self, ops: Ops) -> Projection:
        """The head. Tied, it packs the embedding's own tensor; a last stage without one reads a copy of it."""
        spec = self.spec
        tied = self._embedding[1] if spec.tied and self._embedding is not None else None
        linear = LinearSpec(
            dtype=spec.dtype,
            in_features=spec.hidden,
            out_features=spec.vocabulary,
            role="lm_head",
            tied=tied is not None,
            activations=spec.activations,
        )
        path = "embedding.weight" if spec.tied else "lm_head.weight"
        return Projection(linear, ops.bind(linear), () if tied is not None else ((path,),), tied)

    def _bind_greedy(self, ops: Ops) -> GreedyHead | None:
        """What gives greedy tokens without logits. None: nothing does, or the model caps them. (A divisor of the logits
        changes no order.)"""
        if self._head is None or self._cap is not None:
            return None
        draw = DrawSpec(dtype="float32", vocabulary=self.spec.vocabulary)
        run = ops.fuse(self._head.spec, draw)
        return None if run is None else GreedyHead(run, self._head)

    def _group(self, ops: Ops) -> tuple[CacheGroup, ...]:
        """Group the layers by what they keep and by what plans them, in order of first appearance."""
        members: dict[tuple[CacheSpec, int], list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.mixer.cache_spec is None:
                layer.mixer.place(index, None)
                continue
            found = members.setdefault((layer.mixer.cache_spec, id(layer.mixer.planner)), [])
            layer.mixer.place(index, list(members.values()).index(found))
            found.append(index)
        return tuple(
            CacheGroup(
                spec=cache,
                layout=ops.layout(cache),
                layers=tuple(layers),
                attention=self.layers[layers[0]].mixer.planner,
            )
            for (cache, _), layers in members.items()
        )
