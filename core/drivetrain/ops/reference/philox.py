"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
easy as 1, 2, 3" (SC 2011). Exact in int64 arithmetic, on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Return four 32-bit words for each counter of four words under each key of two; int64 tensors holding
    0 .. 2^32 - 1 that broadcast against each other.

    An int64 product of two 32-bit words wraps modulo 2^64, which keeps all 64 bits of the unsigned product.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & MASK) ^ c1 ^ k0,
            second & MASK,
            ((first >> 32) & MASK) ^ c3 ^ k1,
            first & MASK,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def seed_key(seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split 64-bit seeds, int64 as signed numbers, into (low, high) words."""
    return seed & MASK, (seed >> 32) & MASK


def uniform(words: torch.Tensor) -> torch.Tensor:
    """Map 32-bit words to (x + 1/2) 2^-32 in float64, exactly; never 0 nor 1."""
    return (words.to(torch.float64) + 0.5) * 2.0**-32


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Map 32-bit words to Gumbel noise -log(-log1p(-u)): computed in float64, rounded to float32. In -3.14
    .. 22.88.
    """
    return (-torch.log(-torch.log1p(-uniform(words)))).to(torch.float32)


def philox_words(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """The same for one counter in Python integers: an independent copy for tests and tools."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & MASK, (first >> 32) ^ c3 ^ k1, first & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3
