"""Norms bound to their weights, alone or joined with the addition before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from drivetrain.models.parameters import HeadWeights, PartContext, Weight
from drivetrain.models.spec import AnyNorm, LayerNorm, RmsNorm
from drivetrain_api.v1 import AddLayerNormSpec, AddRmsNormSpec, LayerNormSpec, OpSpec, RmsNormSpec, torch_dtype


class Norm:
    """A norm with its weights: x [..., size] -> [..., size]; with weights of heads, x [..., heads, size].

    ``bias``: of a layer norm, else None.
    """

    __slots__ = ("_run", "bias", "weight")

    def __init__(
        self, run: Callable[..., torch.Tensor], weight: Weight | HeadWeights, bias: Weight | None = None
    ) -> None:
        self._run, self.weight, self.bias = run, weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return self._run(x, self.weight.value)
        return self._run(x, self.weight.value, self.bias.value)


class Join:
    """Adds a branch to the stream and norms the sum, in one op (norm.add_rms, norm.add_layer)."""

    __slots__ = ("_alone", "_run")

    def __init__(self, run: Callable[..., tuple[torch.Tensor, torch.Tensor]], alone: Norm) -> None:
        self._run, self._alone = run, alone

    def __call__(self, branch: torch.Tensor, stream: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normed sum, sum), each [T, hidden]. A stream of None: the branch is the stream's beginning.

        The stream is float32 whatever the model's dtype: rounded at every layer, it would lose most of all.
        """
        alone = self._alone
        if stream is None:
            return alone(branch), branch.float()
        if alone.bias is None:
            return self._run(branch, stream, alone.weight.value)
        return self._run(branch, stream, alone.weight.value, alone.bias.value)


class Sum:
    """Adds a branch to the stream, for a part without a norm before it."""

    __slots__ = ("_dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        """``dtype``: of what the part takes."""
        self._dtype = dtype

    def __call__(self, branch: torch.Tensor, stream: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum in the activations' dtype, sum), each [T, hidden]; see ``Join``."""
        total = branch.float() if stream is None else branch + stream
        return total.to(self._dtype), total


def bind_norm(norm: AnyNorm | None, size: int, context: PartContext, name: str) -> Norm | None:
    """Bind a norm whose parameters' names begin with ``name``; None stays None."""
    if norm is None:
        return None
    weight = context.weight(f"{name}weight")
    bias = context.weight(f"{name}bias") if isinstance(norm, LayerNorm) else None
    return Norm(context.ops.bind(norm_spec(norm, size, context)), weight, bias)


def join_spec(norm: AnyNorm, size: int, context: PartContext) -> AddRmsNormSpec | AddLayerNormSpec:
    """Return the op that addition and norm are."""
    dtype = context.spec.activation_dtype
    if isinstance(norm, LayerNorm):
        return AddLayerNormSpec(dtype=dtype, size=size, eps=norm.eps)
    return AddRmsNormSpec(dtype=dtype, size=size, **_settings(norm))


def bind_entry(norm: AnyNorm | None, size: int, context: PartContext, alone: Norm | None) -> Join | Sum:
    """Bind addition and norm, or the addition where there is no norm. ``alone``: the norm by itself."""
    if norm is None or alone is None:
        return Sum(torch_dtype(context.spec.activation_dtype))
    return Join(context.ops.bind(join_spec(norm, size, context)), alone)


def bind_head_norm(norm: RmsNorm | None, heads: Mapping[str, int], size: int, context: PartContext) -> Norm | None:
    """Bind one norm over heads of several kinds, given as parameter name -> how many heads share that weight [size]."""
    if norm is None:
        return None
    weight = HeadWeights(context.path, heads, size, context.spec.activation_dtype)
    context.holders.append(weight)
    return Norm(context.ops.bind(norm_spec(norm, size, context)), weight)


def norm_spec(norm: AnyNorm, size: int, context: PartContext) -> OpSpec:
    """Return the op that a norm of that size is."""
    dtype = context.spec.activation_dtype
    if isinstance(norm, LayerNorm):
        return LayerNormSpec(dtype=dtype, size=size, eps=norm.eps)
    return RmsNormSpec(dtype=dtype, size=size, **_settings(norm))


def _settings(norm: RmsNorm) -> dict[str, Any]:
    return {"eps": norm.eps, "offset": norm.offset, "round_before_weight": norm.round_before_weight}
