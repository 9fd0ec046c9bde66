"""All from the qkv product to attention's result: one kernel for decode rows, else one that writes the cache first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drivetrain_api.v1 import AttentionSpec, CacheHandle, Fused, OpSpec, OpTraits, Provided, RmsNormSpec, RopeSpec

from .attention import Plan, TritonAttention, cache_strides
from .attention_choice import power_of_two, refusal
from .attention_invariant import InvariantAttention
from .attention_write import rotate_kernel
from .target import Target

FEW_TOKENS = 64  # up to here one warp takes few heads, so that a decode step spreads over the device


class RotateAndWrite:
    """``fn(x [T, H + 2 KV, D], weight [H + KV, D] or None, cos, sin, cache, plan) -> q [T, H, D]``.

    norm.rms of each query and key head (where there is a norm), rope.apply to them, k and v to the plan's slots: each
    rounded to x's dtype as if it ran alone. cos, sin [T, rotary_dim / 2] float32.
    """

    late = True  # decode kernels read lengths and tables before they wait; False only to measure

    def __init__(
        self,
        norm: RmsNormSpec | None,
        rope: RopeSpec,
        attention: AttentionSpec,
        target: Target,
        *,
        invariant: bool = False,
    ) -> None:
        """``invariant``: heads are shared out alike for any T, as what a norm's sum is made of hangs on it."""
        self._target, self._attention, self._invariant = target, attention, invariant
        half = rope.rotary_dim // 2
        rest = rope.head_dim - 2 * half
        halves = rope.style == "halves"
        self._eps = norm.eps if norm else 0.0
        self._fixed: dict[str, Any] = {
            "HEADS": attention.num_heads,
            "KV_HEADS": attention.num_kv_heads,
            "D": rope.head_dim,
            "HALF": half,
            "HALF_PAD": power_of_two(half),
            "REST_PAD": power_of_two(rest) if rest else 0,
            "PAIR_STEP": 1 if halves else 2,
            "PAIR_GAP": half if halves else 1,
            "NORM": norm is not None,
            "OFFSET": norm.offset if norm else 0.0,
            "EARLY": norm.round_before_weight if norm else False,
            "BLOCK_TOKENS": attention.layout.block_tokens,
            "OVERLAPS": target.overlaps,
        }

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: CacheHandle,
        plan: Plan,
    ) -> torch.Tensor:
        """One launch, whatever T."""
        spec = self._attention
        tokens, heads = x.shape[0], spec.num_heads + 2 * spec.num_kv_heads
        if x.stride(2) != 1 or x.stride(1) != spec.head_dim:
            x = x.contiguous()
        q = x.new_empty((tokens, spec.num_heads, spec.head_dim))
        if not tokens:
            return q
        keys, values = cache.parts  # type: ignore[attr-defined]
        # All of 32 heads by one program: 41 us for 8,192 tokens of 32 heads on an H200, halves 45.
        block_h, warps = (4, 1) if tokens <= FEW_TOKENS or self._invariant else (32 if heads == 32 else 16, 4)
        rotate_kernel[(-(-heads // block_h) * tokens,)](
            q, x, q if weight is None else weight, cos, sin, keys, values, plan.slots, x.stride(0), keys.stride(0),
            values.stride(0), self._eps, **cache_strides(keys, values), **self._fixed, BLOCK_H=block_h,
            LATE=self.late, num_warps=warps, **self._target.options,
        )  # fmt: skip
        return q


class RotateAndAttend:
    """``fn(x [T, H + 2 KV, D], weight [H + KV, D] or None, cos, sin, cache, plan, sinks) -> out [T, H, D]``.

    As ``RotateAndWrite``, then attention.paged's forward of its q. Decode rows take one kernel, where no others are in
    the step and a row's bits may hang on that; ``plan`` is that of an attention of the same spec and class.
    """

    whole = True  # False only to measure

    def __init__(
        self,
        norm: RmsNormSpec | None,
        rope: RopeSpec,
        attention: AttentionSpec,
        target: Target,
        *,
        invariant: bool = False,
    ) -> None:
        self.write = RotateAndWrite(norm, rope, attention, target, invariant=invariant)
        self.attention = (InvariantAttention if invariant else TritonAttention)(attention, target)
        constants: dict[str, Any] = {
            "HALF": rope.rotary_dim // 2,
            "HALVES": rope.style == "halves",
            "NORM": norm is not None,
            "OFFSET": norm.offset if norm else 0.0,
            "ROUND": norm.round_before_weight if norm else False,
        }
        self._turn = (norm.eps if norm else 0.0, constants)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: CacheHandle,
        plan: Plan,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One launch for decode rows alone."""
        if plan.prefill is None and plan.decode is not None and self.whole:
            if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
                x = x.contiguous()
            return self.attention.decode_whole(x, weight, cos, sin, cache, plan, sinks, self._turn)
        return self.attention.forward(self.write(x, weight, cos, sin, cache, plan), cache, plan, sinks)


def fuse_rotate(specs: Sequence[OpSpec], target: Target, *, invariant: bool = False) -> Fused | None:
    """Claim [norm.rms, rope.apply, attention.paged] or [rope.apply, attention.paged] where kernels here do all.

    ``invariant``: a row's bits must not depend on the batch.
    """
    norm = specs[0] if specs and isinstance(specs[0], RmsNormSpec) else None
    rest = list(specs[1 if norm else 0 :][:2])
    if len(rest) < 2 or not isinstance(rest[0], RopeSpec) or not isinstance(rest[1], AttentionSpec):
        return None
    rope, attention = rest
    if attention.v_head_dim != attention.head_dim or rope.head_dim != attention.head_dim:
        return None
    if norm and (norm.size != attention.head_dim or norm.dtype != attention.dtype):
        return None
    if rope.dtype != attention.dtype or rope.rotary_dim % 2 or refusal(attention, target):
        return None
    made = RotateAndAttend(norm, rope, attention, target, invariant=invariant)
    ways = "batch-invariant, a kernel before attention's" if invariant else "one kernel for decode rows, else two"
    traits = OpTraits(batch_invariant=invariant, graph="any")
    provided = Provided(implementation=made, label=f"shared: Triton, {ways}", traits=traits)
    return Fused(count=3 if norm else 2, provided=provided)
