"""Mixers: the part of a layer that looks at other tokens. Looked up by the type of their spec."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from drivetrain.models.norms import Norm, bind_head_norm, bind_norm, norm_spec
from drivetrain.models.parameters import PartContext
from drivetrain.models.registry import Registry
from drivetrain.models.spec import AttentionMixer
from drivetrain.models.step import StepView
from drivetrain_api.v1 import AttentionSpec, CacheHandle, CachePart, CacheSpec, OpSpec, PagedAttention, RopeSpec


class Mixer(Protocol):
    """One layer's mixer, built.

    ``cache_spec``: what it keeps between steps, None for nothing. ``planner``: the object that plans its group's
    steps (a ``PagedAttention`` for paged kinds). Layers of equal specs and the same planner form one cache group.
    """

    @property
    def cache_spec(self) -> CacheSpec | None: ...

    @property
    def planner(self) -> Any: ...

    def place(self, layer: int, group: int | None) -> None:
        """Told once: its index among ``ModelStep.caches``, and its group's among ``ModelStep.plans``."""

    def forward(self, x: torch.Tensor, step: StepView) -> torch.Tensor:
        """x [T, hidden], normed (or what a ``first_projection`` that is None makes of it) -> the output [T, hidden]."""


_parts = Registry[Mixer]("mixer")
register, make_mixer = _parts.register, _parts.make


class Attention:
    """Grouped-query attention over the paged cache: one fused q/k/v product, norms, rotation, write, attend, out."""

    def __init__(self, spec: AttentionMixer, context: PartContext) -> None:
        model, ops = context.spec, context.ops
        self.cache_spec = attention_cache(spec, model.cache_dtype)
        self._spec = spec
        self._heads = (spec.num_heads, spec.num_kv_heads)
        self._widths = (sum(self._heads) * spec.head_dim, spec.num_kv_heads * spec.v_head_dim)
        self._qkv, _ = context.first_projection(("q", "k", "v"), "qkv")
        heads = {"q_norm.weight": spec.num_heads, "k_norm.weight": spec.num_kv_heads}
        self._head_norm = bind_head_norm(spec.head_norm, heads, spec.head_dim, context)
        self._whole_norms = self._bind_whole_norms(context)
        self._sinks = context.weight("sinks") if spec.sinks else None
        self._out, _ = context.projection(("out",), "attention_out")
        self._rope = -1 if spec.rope is None else spec.rope
        self.planner: PagedAttention = ops.bind(self._attention_spec(context))
        even = spec.rope is not None and spec.v_head_dim == spec.head_dim
        self._whole = ops.fuse(*self._run(context, self._rope)) if even else None
        alone = spec.rope is not None and self._whole is None
        self._rotate = ops.bind(self._rope_spec(context, self._rope)) if alone else None
        self._layer, self._group = 0, 0

    def _bind_whole_norms(self, context: PartContext) -> tuple[tuple[Norm, int], ...]:
        """The norms of all heads at once, of q and of k, each with its width."""
        spec = self._spec
        counts = (("q_norm.", spec.num_heads), ("k_norm.", spec.num_kv_heads))
        widths = ((name, count * spec.head_dim) for name, count in counts)
        bound = ((bind_norm(spec.whole_norm, width, context, name), width) for name, width in widths)
        return tuple((norm, width) for norm, width in bound if norm is not None)

    def _run(self, context: PartContext, rope: int) -> tuple[OpSpec, ...]:
        """The ops between the layer's two products, which a backend may do as one."""
        norm = self._spec.head_norm
        specs = (self._rope_spec(context, rope), self._attention_spec(context))
        return specs if norm is None else (norm_spec(norm, self._spec.head_dim, context), *specs)

    def _rope_spec(self, context: PartContext, rope: int) -> RopeSpec:
        table = context.spec.ropes[rope]
        return RopeSpec(
            dtype=context.spec.activation_dtype,
            head_dim=self._spec.head_dim,
            rotary_dim=table.rotary_dim,
            style=table.style,
        )

    def _attention_spec(self, context: PartContext) -> AttentionSpec:
        spec = self._spec
        return AttentionSpec(
            dtype=context.spec.activation_dtype,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            scale=spec.scale,
            layout=context.ops.layout(self.cache_spec),
            window=spec.window,
            soft_cap=spec.soft_cap,
            sinks=spec.sinks,
        )

    def place(self, layer: int, group: int | None) -> None:
        assert group is not None, "attention keeps a cache, so it is in a group"
        self._layer, self._group = layer, group

    def forward(self, x: torch.Tensor, step: StepView) -> torch.Tensor:
        cache, plan = step.caches[self._layer], step.plans[self._group]
        assert cache is not None
        sinks = None if self._sinks is None else self._sinks.value
        qkv = x if self._qkv is None else self._qkv(x)
        if self._whole_norms:
            self._norm_whole(qkv)
        if self._whole is not None:
            weight = None if self._head_norm is None else self._head_norm.weight.value
            heads = qkv.view(qkv.shape[0], -1, self._spec.head_dim)
            attended = self._whole(heads, weight, *step.angles[self._rope], cache, plan, sinks)
            del heads, qkv
        else:
            q = self._enter_cache(qkv, step, cache, plan)
            del qkv
            attended = self.planner.forward(q, cache, plan, sinks)
        return self._out(attended.flatten(1))

    def _norm_whole(self, qkv: torch.Tensor) -> None:
        """Norm all heads of q at once, and all of k, where the product left them: what follows takes them there."""
        first = 0
        for norm, width in self._whole_norms:
            part = qkv.narrow(1, first, width)
            part.copy_(norm(part))
            first += width

    def _enter_cache(self, qkv: torch.Tensor, step: StepView, cache: CacheHandle, plan: Any) -> torch.Tensor:
        """Norm and rotate the heads and store keys and values; returns q [T, H, D]."""
        qk, v = self._split(qkv)
        if self._head_norm is not None:
            qk = self._head_norm(qk)
        if self._rotate is not None:
            cos, sin = step.angles[self._rope]
            qk = self._rotate(qk, cos, sin)
        q, k = qk.split_with_sizes(self._heads, 1)
        self.planner.write(cache, k, v, plan)
        return q

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, q + k + v] -> views of q and k together [T, H + K, D], and of v [T, K, Dv]."""
        spec, tokens = self._spec, qkv.shape[0]
        qk, v = qkv.split_with_sizes(self._widths, 1)
        return qk.view(tokens, -1, spec.head_dim), v.view(tokens, -1, spec.v_head_dim)


def attention_cache(spec: AttentionMixer, dtype: str) -> CacheSpec:
    """Return what one attention layer keeps: K and V of every token, or of the window's."""
    return CacheSpec(
        kind="full" if spec.window is None else "window",
        parts=(
            CachePart(name="k", shape=(spec.num_kv_heads, spec.head_dim), dtype=dtype),
            CachePart(name="v", shape=(spec.num_kv_heads, spec.v_head_dim), dtype=dtype),
        ),
        window=spec.window,
    )


register(AttentionMixer, Attention)
