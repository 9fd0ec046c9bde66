"""Rotary frequencies of a ``Rope``."""

from __future__ import annotations

import math

import torch

from drivetrain.models.spec import BandScaling, DynamicScaling, LinearScaling, LongScaling, Rope, YarnScaling


def inverse_frequencies(rope: Rope, reach: int = 0) -> torch.Tensor:
    """Return float32 [rotary_dim / 2] on the host: theta^(-2i / rotary_dim), scaled.

    ``reach``: the longest sequence that is served, in tokens (0: none longer than the model was trained for).
    Float32 throughout on purpose: models are trained with tables made that way, and positions multiply the error.
    """
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    rule = rope.scaling
    if isinstance(rule, DynamicScaling):
        return 1.0 / (_stretched(rope, rule, reach) ** exponent)
    if isinstance(rule, LongScaling):
        divisors = rule.long if reach > rule.original_positions else rule.short
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * rope.theta**exponent)
    plain = 1.0 / (rope.theta**exponent)
    if isinstance(rule, LinearScaling):
        return plain / rule.factor
    if isinstance(rule, BandScaling):
        return _banded(plain, rule)
    return plain if rule is None else _yarn(plain, rope, rule)


def _banded(plain: torch.Tensor, rule: BandScaling) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    longest = rule.original_positions / rule.low_factor
    shortest = rule.original_positions / rule.high_factor
    mix = (rule.original_positions / wavelength - rule.low_factor) / (rule.high_factor - rule.low_factor)
    between = (1 - mix) * plain / rule.factor + mix * plain
    scaled = torch.where(wavelength > longest, plain / rule.factor, between)
    return torch.where(wavelength < shortest, plain, scaled)


def _stretched(rope: Rope, rule: DynamicScaling, reach: int) -> float:
    """The theta of a dynamic rope for sequences of ``reach`` tokens."""
    times = max(reach, rule.original_positions) / rule.original_positions
    return float(rope.theta * (rule.factor * times - (rule.factor - 1)) ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _yarn(plain: torch.Tensor, rope: Rope, rule: YarnScaling) -> torch.Tensor:
    size = rope.rotary_dim

    def index_of(turns: float) -> float:
        """The index, broken, of the frequency that turns so often within the original length."""
        return size * math.log(rule.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = index_of(rule.fast_turns), index_of(rule.slow_turns)
    if rule.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first if last != first else 0.001
    divided = ((torch.arange(size // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain / rule.factor * divided + plain * (1 - divided)
