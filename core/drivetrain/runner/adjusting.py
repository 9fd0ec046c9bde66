"""Slots on the device: what changes the logits of rows that ask for it, beside the tokens that these have drawn.

A slot belongs to one request while it has a row, and is written whole when the row starts. The last slot is spare: rows
without one see it, and it changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from drivetrain.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASES, MAX_HELD
from drivetrain.sched.plan import AdjustStart
from drivetrain_api.v1 import AdjustInputs
from drivetrain_api.v1.sampling import PROMPT_BIT

if TYPE_CHECKING:
    from drivetrain.runner.rows import TableShape
    from drivetrain.runner.staging import Pack
    from drivetrain.sched.plan import StepPlan
    from drivetrain_api.v1 import DeviceRuntime

RING = 16  # draws that a slot remembers
SIZES = (3, 1, MAX_BIASES, MAX_BIASES, MAX_HELD, MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS, RING)
SLOT_WORDS = sum(SIZES)


class AdjustTables:
    """The slots' tables, and on the host the slot of each row. ``rows``: with the padding row."""

    def __init__(self, runtime: DeviceRuntime, rows: int, shape: TableShape) -> None:
        slots = shape.adjusted + 1
        self._spare, self._chunk, self._vocabulary = shape.adjusted, shape.chunk, shape.vocabulary
        self.slot_of = np.full(rows, self._spare, np.int32)
        self.counts = runtime.zeros((slots, shape.vocabulary), torch.int32)
        self._words = runtime.from_host(np.tile(neutral_words(), (slots, 1)))
        reals, stops, values, ids, held, words, self.recent = self._words.split(list(SIZES), dim=1)
        self._repetition, self._presence, self._frequency = reals.view(torch.float32).unbind(1)
        self._stops, self._bias_values = stops.squeeze(1), values.view(torch.float32)
        self._bias_ids, self._held = ids, held
        self._bad_words = words.view(slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
        self._packed: list[tuple[int, int]] = []  # slot, pieces of its counts

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return 4 * (self.counts.numel() + self._words.numel())

    def note(self, row: int, slot: int) -> None:
        """A row that starts has this slot."""
        self.slot_of[row] = slot

    def dummy(self) -> AdjustStart:
        """Return a start that writes the spare slot, which changes nothing as before."""
        return AdjustStart(slot=self._spare, tokens=np.zeros(1, np.int32), prompt=1, prompt_end=1)

    def forget(self, row: int) -> None:
        """A row has none any more."""
        self.slot_of[row] = self._spare

    def pack(self, plan: StepPlan, pack: Pack) -> None:
        """Add what the slots of the plan's starts hold to the upload."""
        self._packed.clear()
        for number, start in enumerate(start.adjust for start in plan.starts if start.adjust is not None):
            pack.add(f"slot{number}", slot_words(start, self._vocabulary))
            pieces = self._pieces(token_words(start, self._vocabulary))
            for piece, pairs in enumerate(pieces):
                pack.add(f"slot{number}.{piece}", pairs)
            self._packed.append((start.slot, len(pieces)))

    def apply(self, views: dict[str, torch.Tensor]) -> None:
        """Queue what ``pack`` added."""
        for number, (slot, pieces) in enumerate(self._packed):
            self._words[slot] = views[f"slot{number}"]
            counts = self.counts[slot]
            counts.zero_()
            for piece in range(pieces):
                ids, values = views[f"slot{number}.{piece}"].unbind(0)
                counts[ids] = values
        self._packed.clear()

    def inputs(self, slots: torch.Tensor, position: torch.Tensor, facts: tuple[bool, bool, bool, bool]) -> AdjustInputs:
        """Return what the op needs for N logits rows. ``facts``: any penalty, bias, held token, bad word."""
        penalty, bias, held, bad_words = facts
        return AdjustInputs(
            slots=slots,
            position=position,
            repetition=self._repetition,
            presence=self._presence,
            frequency=self._frequency,
            first_stop=self._stops,
            counts=self.counts,
            recent=self.recent,
            bias_ids=self._bias_ids,
            bias_values=self._bias_values,
            held_ids=self._held,
            bad_words=self._bad_words,
            any_penalty=penalty,
            any_bias=bias,
            any_held=held,
            any_bad_words=bad_words,
        )

    def _pieces(self, pairs: np.ndarray) -> list[np.ndarray]:
        """Cut [2, n] into pieces of the chunk's size, the last one filled up with its last pair."""
        count, chunk = pairs.shape[1], self._chunk
        if not count or not chunk:
            return [pairs] if count else []
        if count % chunk:
            pairs = np.concatenate((pairs, np.repeat(pairs[:, -1:], chunk - count % chunk, axis=1)), axis=1)
        return [np.ascontiguousarray(pairs[:, a : a + chunk]) for a in range(0, count, chunk)]


def adjust_bytes(shape: TableShape) -> int:
    """Return the device bytes of ``AdjustTables`` of that shape."""
    return 4 * (shape.adjusted + 1) * (shape.vocabulary + SLOT_WORDS) if shape.adjusted else 0


def neutral_words() -> np.ndarray:
    """Return the words [SLOT_WORDS] int32 of a slot that changes nothing."""
    words = np.full(SLOT_WORDS, -1, np.int32)
    words[:4] = 0
    words[:1].view(np.float32)[0] = 1.0
    words[4 : 4 + MAX_BIASES] = 0
    return words


def slot_words(start: AdjustStart, vocabulary: int) -> np.ndarray:
    """Return the words [SLOT_WORDS] int32 that a slot begins with: all but its counts."""
    words = neutral_words()
    reals, stops, values, ids, held, bad, recent = np.split(words, np.cumsum(SIZES)[:-1])
    reals.view(np.float32)[:] = start.repetition, start.presence, start.frequency
    stops[0] = start.first_stop
    for place, (token, value) in enumerate(start.bias):
        ids[place], values.view(np.float32)[place] = token, value
    ends = [token for token in start.held if 0 <= token < vocabulary]  # what no logit stands for can't be drawn
    held[: len(ends)] = ends
    table = bad.reshape(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
    for place, word in enumerate(start.bad_words):
        table[place, -len(word) :] = word
    last = start.first_position
    for place in range(max(start.prompt_end, last - RING), last):
        recent[place % RING] = start.tokens[place - start.prompt_end + start.prompt]
    return words


def token_words(start: AdjustStart, vocabulary: int) -> np.ndarray:
    """Return (token, word) [2, n] int32 of all tokens that a slot begins with: draws, and the bit of the prompt."""
    tokens = np.asarray(start.tokens, np.int64)
    drawn = np.bincount(tokens[start.prompt :][tokens[start.prompt :] < vocabulary], minlength=vocabulary)
    drawn[np.unique(tokens[: start.prompt][tokens[: start.prompt] < vocabulary])] |= PROMPT_BIT
    ids = np.flatnonzero(drawn)
    return np.stack((ids, drawn[ids])).astype(np.int32)
