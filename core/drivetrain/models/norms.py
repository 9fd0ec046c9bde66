"""Norms bound to their weight, alone or joined with the addition before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from drivetrain.models.parameters import HeadWeights, PartContext, Weight
from drivetrain.models.spec import RmsNorm
from drivetrain_api.v1 import AddRmsNormSpec, RmsNormSpec


class Norm:
    """norm.rms with its weight: x [..., size] -> [..., size]; with weights of heads, x [..., heads, size]."""

    __slots__ = ("_run", "weight")

    def __init__(self, run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], weight: Weight | HeadWeights) -> None:
        self._run = run
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, self.weight.value)


AddAndNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Join:
    """Adds a branch to the stream and norms the sum, in one op (norm.add_rms)."""

    __slots__ = ("_alone", "_run", "weight")

    def __init__(self, run: AddAndNorm, alone: Norm) -> None:
        self._run = run
        self._alone = alone
        self.weight = alone.weight

    def __call__(self, branch: torch.Tensor, stream: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normed sum, sum), each [T, hidden]. A stream of None: the branch is the stream's beginning.

        The stream is float32 whatever the model's dtype: rounded at every layer, it would lose most of all.
        """
        if stream is None:
            return self._alone(branch), branch.float()
        return self._run(branch, stream, self.weight.value)


def bind_norm(norm: RmsNorm | None, size: int, context: PartContext, name: str) -> Norm | None:
    """Bind a norm of the part's parameter ``name``; None stays None."""
    if norm is None:
        return None
    return Norm(_rms(norm, size, context), context.weight(name))


def join_spec(norm: RmsNorm, size: int, context: PartContext) -> AddRmsNormSpec:
    """Return the op that addition and norm are."""
    return AddRmsNormSpec(
        dtype=context.spec.activation_dtype,
        size=size,
        eps=norm.eps,
        offset=norm.offset,
        round_before_weight=norm.round_before_weight,
    )


def bind_join(norm: RmsNorm, size: int, context: PartContext, weight: Weight) -> Join:
    """Bind addition and norm."""
    run = context.ops.bind(join_spec(norm, size, context))
    return Join(run, Norm(_rms(norm, size, context), weight))


def bind_head_norm(norm: RmsNorm | None, heads: Mapping[str, int], size: int, context: PartContext) -> Norm | None:
    """Bind one norm over heads of several kinds, given as parameter name -> how many heads share that weight [size]."""
    if norm is None:
        return None
    weight = HeadWeights(context.path, heads, size, context.spec.activation_dtype)
    context.holders.append(weight)
    return Norm(_rms(norm, size, context), weight)


def rms_spec(norm: RmsNorm, size: int, context: PartContext) -> RmsNormSpec:
    """Return the op that a norm of that size is."""
    return RmsNormSpec(
        dtype=context.spec.activation_dtype,
        size=size,
        eps=norm.eps,
        offset=norm.offset,
        round_before_weight=norm.round_before_weight,
    )


def _rms(norm: RmsNorm, size: int, context: PartContext) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    spec = rms_spec(norm, size, context)
    bound: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = context.ops.bind(spec)
    return bound
