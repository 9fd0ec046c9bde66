"""sample.adjust on the host: only tokens that a row's prompt, draws or wishes name are computed."""

from __future__ import annotations

import numpy as np
import torch

from drivetrain_api.v1 import AdjustInputs, AdjustSpec
from drivetrain_api.v1.sampling import PROMPT_BIT

OFF = (1.0, 0.0, 0.0)


class Adjust:
    """``fn(logits [N, vocabulary], inputs) -> [N, vocabulary] float32``; see ``AdjustSpec``."""

    def __init__(self, spec: AdjustSpec) -> None:
        self._spec = spec

    def __call__(self, logits: torch.Tensor, inputs: AdjustInputs) -> torch.Tensor:
        """Copy the logits, then change few of each row."""
        out = logits.to(torch.float32, copy=True).contiguous()
        slots, positions = inputs.slots.tolist(), inputs.position.tolist()
        for row, slot, position in zip(out.numpy(), slots, positions, strict=True):
            if inputs.any_bias:
                ids = inputs.bias_ids[slot].numpy()
                known = ids >= 0
                row[ids[known]] += inputs.bias_values[slot].numpy()[known]
            if inputs.any_penalty:
                _penalize(row, inputs, slot)
            if inputs.any_held and position < int(inputs.first_stop[slot]):
                _ban(row, inputs.held_ids[slot].numpy())
            if inputs.any_bad_words:
                _ban(row, _completed(inputs, slot, position))
        return out


def _penalize(row: np.ndarray, inputs: AdjustInputs, slot: int) -> None:
    tables = inputs.repetition, inputs.presence, inputs.frequency
    repetition, presence, frequency = (table[slot].numpy() for table in tables)
    if (float(repetition), float(presence), float(frequency)) == OFF:
        return
    words = inputs.counts[slot].numpy()
    seen = np.flatnonzero(words)
    drawn = words[seen] & (PROMPT_BIT - 1)
    x = row[seen]
    x = np.where(x > 0, x / repetition, x * repetition)
    row[seen] = x - frequency * drawn.astype(np.float32) - presence * (drawn > 0).astype(np.float32)


def _completed(inputs: AdjustInputs, slot: int, position: int) -> np.ndarray:
    """Return the last ids of bad words whose ids before it have just been drawn."""
    words = inputs.bad_words[slot].numpy()
    length, ring = words.shape[1], inputs.recent.shape[1]
    past = inputs.recent[slot].numpy()[np.arange(position - length + 1, position) % ring]
    before = words[:, :-1]
    completed: np.ndarray = words[((before < 0) | (before == past)).all(axis=1), -1]
    return completed


def _ban(row: np.ndarray, ids: np.ndarray) -> None:
    row[ids[ids >= 0]] = -np.inf
