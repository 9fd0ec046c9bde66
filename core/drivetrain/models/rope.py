"""Rotary frequencies of a ``Rope``."""

from __future__ import annotations

import math

import torch

from drivetrain.models.spec import BandScaling, LinearScaling, Rope


def inverse_frequencies(rope: Rope) -> torch.Tensor:
    """Return float32 [rotary_dim / 2] on the host: theta^(-2i / rotary_dim), scaled.

    Float32 throughout on purpose: models are trained with tables made that way, and positions multiply the error.
    """
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponent)
    if rope.scaling is None:
        return plain
    if isinstance(rope.scaling, LinearScaling):
        return plain / rope.scaling.factor
    return _banded(plain, rope.scaling)


def _banded(plain: torch.Tensor, rule: BandScaling) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    longest = rule.original_positions / rule.low_factor
    shortest = rule.original_positions / rule.high_factor
    mix = (rule.original_positions / wavelength - rule.low_factor) / (rule.high_factor - rule.low_factor)
    between = (1 - mix) * plain / rule.factor + mix * plain
    scaled = torch.where(wavelength > longest, plain / rule.factor, between)
    return torch.where(wavelength < shortest, plain, scaled)
