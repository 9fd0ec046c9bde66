"""rope.angles and rope.apply."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drivetrain.ops.cases.rope import angles_cases, rope_cases
from drivetrain.ops.reference.kinds import Cost, ReferenceOp, Tolerance, pointwise_tolerance, row_cost, wide
from drivetrain_api.v1 import BatchFacts, RopeAnglesSpec, RopeSpec

Pair = tuple[torch.Tensor, torch.Tensor]


def make_angles(spec: RopeAnglesSpec) -> Callable[[torch.Tensor, torch.Tensor], Pair]:
    """rope.angles/1: ``fn(positions [T] or [3, T], inv_freq [rotary_dim / 2] float32) -> (cos, sin)``.

    angle[t, i] = positions[t] * inv_freq[i], a float32 product; results [T, rotary_dim / 2] float32, both
    times ``attention_factor``. With positions of three rows, frequency i takes the row whose section holds
    i.
    """

    def angles(positions: torch.Tensor, inv_freq: torch.Tensor) -> Pair:
        if positions.dim() == 2:
            chosen = torch.cat(
                [row.unsqueeze(-1).expand(-1, count) for row, count in zip(positions, spec.sections, strict=True)],
                dim=-1,
            )
        else:
            chosen = positions.unsqueeze(-1)
        phase = chosen.to(inv_freq.dtype) * inv_freq
        return phase.cos() * spec.attention_factor, phase.sin() * spec.attention_factor

    return angles


def make_rope(spec: RopeSpec) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """rope.apply/1: ``fn(x [T, N, D], cos, sin [T, rotary_dim / 2]) -> [T, N, D]``.

    Each pair (a, b) becomes (a cos - b sin, b cos + a sin), in float32; dimensions from ``rotary_dim`` on
    are unchanged.
    """
    pair = _halves if spec.style == "halves" else _interleaved

    def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned = pair(wide(x[..., : spec.rotary_dim]), cos.unsqueeze(1), sin.unsqueeze(1)).to(x.dtype)
        if spec.rotary_dim == spec.head_dim:
            return turned
        return torch.cat((turned, x[..., spec.rotary_dim :]), dim=-1)

    return rope


def _halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def angles_tolerance(dtype: str) -> Tolerance:
    """Against the cosine of the float32 product: what a float32 cosine of a large angle can differ by."""
    return Tolerance(rtol=0.0, atol=2e-6)


def angles_cost(spec: RopeAnglesSpec, facts: BatchFacts) -> Cost:
    """Write two float32 tables; a product, a cosine and a sine an element."""
    half = spec.rotary_dim // 2
    return Cost(bytes=facts.num_tokens * half * 8, operations=facts.num_tokens * half * 40)


def rope_cost(spec: RopeSpec, facts: BatchFacts) -> Cost:
    """For one head: their number is not in the spec."""
    return row_cost(spec, facts, 2 * spec.head_dim, 3 * spec.rotary_dim)


ROPE_ANGLES = ReferenceOp(
    op=RopeAnglesSpec.op,
    make=make_angles,
    invariant=make_angles,
    cases=angles_cases,
    tolerance=angles_tolerance,
    cost=angles_cost,
)
ROPE = ReferenceOp(
    op=RopeSpec.op,
    make=make_rope,
    invariant=make_rope,
    cases=rope_cases,
    tolerance=pointwise_tolerance,
    cost=rope_cost,
)
