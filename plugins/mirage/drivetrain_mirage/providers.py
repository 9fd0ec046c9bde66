"""Implementations over the device's own kernels; ``Guard`` lets a static profile look at their shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from drivetrain_api.v1 import (
    AttentionBatch,
    AttentionSpec,
    AttentionTraits,
    CacheHandle,
    Decline,
    LinearSpec,
    OpSpec,
    OpTraits,
    Packed,
    Provided,
    RmsNormSpec,
    dtype_bytes,
)

from .device import MirageDevice
from .kernels import AttentionKernel, linear, rms_norm, tiled_linear
from .rules import RuleError
from .storage import MirageCache
from .tensors import MirageTensor, new_dense, on_device


class Guard(Protocol):
    """Asked before a kernel is queued."""

    def rows(self, spec: LinearSpec, count: int) -> None:
        """Raise RuleError when a linear may not run on that many rows."""

    def step(self, tokens: int, rows: int, blocks: int) -> None:
        """Raise RuleError when attention may not be planned at that shape."""


class Free:
    """Any shape runs."""

    def rows(self, spec: LinearSpec, count: int) -> None:
        """Nothing to check."""

    def step(self, tokens: int, rows: int, blocks: int) -> None:
        """Nothing to check."""


class MirageLinear:
    """linear/1. The weight is kept as it is."""

    def __init__(self, owner: MirageDevice, spec: LinearSpec, guard: Guard, alone: bool) -> None:
        self._owner, self._spec, self._guard = owner, spec, guard
        self._kernel = tiled_linear if alone else linear

    def packed_bytes(self, spec: LinearSpec) -> int:
        size = dtype_bytes(spec.dtype)
        weight = 0 if spec.tied else spec.out_features * spec.in_features * size
        return weight + (spec.out_features * size if spec.bias else 0)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        held = (on_device(weight, "a weight"), None if bias is None else on_device(bias, "a bias"))
        return Packed(data=held, nbytes=self.packed_bytes(self._spec), peak_bytes=0, keeps_source=self._spec.tied)

    def apply(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        rows = on_device(x, "the input of a linear")
        self._guard.rows(self._spec, rows.shape[0])
        weight, bias = packed.data
        out = new_dense(self._owner, (rows.shape[0], self._spec.out_features), rows.dtype)
        args = (rows.raw, weight.raw, None if bias is None else bias.raw)
        self._owner.launch(self._kernel, args, out.raw)
        return out

    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return the dense weight [out, in]."""
        weight: torch.Tensor = packed.data[0]
        return weight


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """What the kernel reads: query_start [B + 1], lengths [B], block table [B, W], positions [T]; slots [T]."""

    step: tuple[MirageTensor, MirageTensor, MirageTensor, MirageTensor]
    slots: MirageTensor


class MirageAttention:
    """attention.paged/1; can be captured, as its kernel takes lengths from the device."""

    traits = AttentionTraits(lengths="device", row_order="any", graph="uniform")

    def __init__(self, owner: MirageDevice, spec: AttentionSpec, guard: Guard, alone: bool) -> None:
        self._owner, self._spec, self._guard = owner, spec, guard
        self._kernel = AttentionKernel(spec, alone)

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        self._guard.step(batch.num_tokens, batch.num_rows, batch.block_table_dev.shape[1])
        tensors = [on_device(t, "a tensor of an attention batch") for t in _inputs(batch)]
        for tensor in tensors:
            if tensor.dtype != torch.int32:
                raise RuleError("int32-slots", f"an attention batch of {tensor.dtype}", "use CacheLayout.slot_dtype")
        query_start, lengths, table, positions, slots = tensors
        return AttentionPlan((query_start, lengths, table, positions), slots)

    def plan_for_capture(self, batch: AttentionBatch) -> AttentionPlan:
        """As ``plan``: the kernel reads everything from the device."""
        return self.plan(batch)

    def write(self, cache: CacheHandle, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> None:
        cache.write(plan.slots, (k, v))

    def forward(
        self, q: torch.Tensor, cache: CacheHandle, plan: AttentionPlan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not isinstance(cache, MirageCache):
            raise RuleError("one-device", f"a cache of type {type(cache).__name__}", "allocate it with this storage")
        queries = on_device(q, "the queries of attention")
        shape = (queries.shape[0], self._spec.num_heads, self._spec.v_head_dim)
        out = new_dense(self._owner, shape, queries.dtype)
        step = tuple(t.raw for t in plan.step)
        sink = None if sinks is None else on_device(sinks, "attention sinks").raw
        self._owner.launch(self._kernel, (queries.raw, cache.arenas, step, sink), out.raw)
        return out


def _inputs(batch: AttentionBatch) -> tuple[torch.Tensor, ...]:
    return (
        batch.query_start_dev,
        batch.lengths_dev,
        batch.block_table_dev,
        batch.positions_dev,
        batch.slots_dev,
    )


def rms(owner: MirageDevice, spec: RmsNormSpec) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """norm.rms/1 as one kernel."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows, scale = on_device(x, "the input of a norm"), on_device(weight, "the weight of a norm")
        out = new_dense(owner, tuple(rows.shape), rows.dtype)
        owner.launch(rms_norm, (rows.raw, scale.raw, spec), out.raw)
        return out

    return norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Providers:
    """What a profile offers. ``linear`` and ``attention``: hot ops; ``norm``: the one pointwise op there is.

    ``alone``: batch-invariant kernels.
    """

    owner: MirageDevice
    guard: Guard
    hot: bool
    norm: bool
    alone: bool

    def provide(self, spec: OpSpec) -> Provided | Decline:
        """Answer for one spec; unknown ones are declined."""
        traits = OpTraits(batch_invariant=self.alone, graph="any")
        if isinstance(spec, LinearSpec) and self.hot and spec.quant is None and not spec.activations:
            return Provided(
                implementation=MirageLinear(self.owner, spec, self.guard, self.alone),
                label="mirage linear",
                traits=traits,
            )
        if isinstance(spec, AttentionSpec) and self.hot and _plain(spec) and (spec.causal or not self.alone):
            return Provided(
                implementation=MirageAttention(self.owner, spec, self.guard, self.alone),
                label="mirage attention",
                traits=traits,
            )
        if isinstance(spec, RmsNormSpec) and self.norm:
            return Provided(
                implementation=rms(self.owner, spec),
                label="mirage rms norm",
                traits=OpTraits(batch_invariant=True, graph="any"),
            )
        return Decline(reason=f"mirage has no kernel for {spec.op}: torch's own ops run it")


def _plain(spec: AttentionSpec) -> bool:
    return not (spec.selected_keys or spec.latent or spec.cross)
