"""Inputs of penalties, biases, held and bad tokens, and of their counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from drivetrain.ops.cases.source import Source, on
from drivetrain.ops.reference.kinds import Case, Place
from drivetrain_api.v1 import AdjustInputs, AdjustSpec, CountSpec
from drivetrain_api.v1.sampling import PROMPT_BIT

SLOTS, RING, BIASES, HELD, WORDS, LONGEST = 5, 4, 6, 3, 7, 4
FACTS = ("any_penalty", "any_bias", "any_held", "any_bad_words")


def adjust_inputs(source: Source, rows: int, vocabulary: int) -> AdjustInputs:
    """Return host inputs of ``rows`` over five slots, the last neutral; words of one to four tokens, of which some have
    just been drawn."""
    random = source.random
    counts = random.choice([0, 0, 1, 3, PROMPT_BIT, PROMPT_BIT + 2], (SLOTS, vocabulary))
    recent = random.integers(-1, 3, (SLOTS, RING))  # few different ones, so that words are often complete
    words = random.integers(-1, 3, (SLOTS, WORDS, LONGEST))
    words[:, ::3, :-1] = -1
    words[:, ::2, -1] = random.integers(0, vocabulary, words[:, ::2, -1].shape)
    ids = np.stack([random.permutation(vocabulary)[:BIASES] for _ in range(SLOTS)])
    ids[:, ::4] = -1
    held = random.integers(-1, vocabulary, (SLOTS, HELD))
    repetition, presence, frequency = (random.uniform(low, 2.0, SLOTS) for low in (0.5, -2.0, -2.0))
    repetition[-1], presence[-1], frequency[-1] = 1.0, 0.0, 0.0
    ids[-1], held[-1], words[-1] = -1, -1, -1
    whole = {"slots": random.integers(0, SLOTS, rows), "position": random.integers(RING, 90, rows)}
    whole |= {"first_stop": random.integers(RING, 90, SLOTS), "counts": counts, "recent": recent, "bias_ids": ids}
    whole |= {"held_ids": held, "bad_words": words}
    real = {"repetition": repetition, "presence": presence, "frequency": frequency}
    real["bias_values"] = random.uniform(-100, 100, (SLOTS, BIASES))
    return AdjustInputs(
        **{name: torch.from_numpy(values.astype(np.int32)) for name, values in whole.items()},
        **{name: torch.from_numpy(values.astype(np.float32)) for name, values in real.items()},
        any_penalty=True,
        any_bias=True,
        any_held=True,
        any_bad_words=True,
    )


def adjust_on(place: Place, inputs: AdjustInputs) -> AdjustInputs:
    """Return the inputs on the place's device."""
    values: dict[str, Any] = {f.name: on(place, getattr(inputs, f.name)) for f in fields(inputs)}
    return AdjustInputs(**values)


def only(inputs: AdjustInputs, fact: str) -> AdjustInputs:
    """Return the inputs where rows need no other work than ``fact``."""
    facts: dict[str, Any] = {other: other == fact for other in FACTS}
    return replace(inputs, **facts)


def adjust_case(place: Place, name: str, spec: AdjustSpec, logits: torch.Tensor, inputs: AdjustInputs) -> Case:
    """Make one case of sample.adjust; its second result is the logits, which stay as they were."""

    def run(adjust: Any) -> tuple[torch.Tensor, ...]:
        given = on(place, logits)
        return adjust(given, adjust_on(place, inputs)), given

    return Case(name=name, spec=spec, inputs={"logits": logits, "inputs": inputs}, run=run)


def adjust_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """All together and each alone, a prime vocabulary and one of a thousand, masked logits."""
    source = Source(dtype, seed)
    for vocabulary in (101, 1009, 64):
        spec = AdjustSpec(dtype=dtype, vocabulary=vocabulary)
        for name, rows in (("empty", 0), ("one row", 1), ("rows", 12)):
            inputs = adjust_inputs(source, rows, vocabulary)
            logits = source.normal(rows, vocabulary, scale=3.0)
            yield adjust_case(place, f"{name} of {vocabulary}", spec, logits, inputs)
            for fact in FACTS:
                yield adjust_case(place, f"{name} of {vocabulary}, {fact}", spec, logits, only(inputs, fact))
        yield adjust_case(place, f"nothing of {vocabulary}", spec, logits, only(inputs, ""))
        masked = torch.where(source.normal(12, vocabulary) > 0, logits, float("-inf"))
        yield adjust_case(place, f"masked of {vocabulary}", spec, masked, inputs)


def count_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Rows in any order, rings of one and of more, counts of prompts and of none."""
    source = Source("float32", seed)
    for vocabulary, ring in ((101, 1), (64, 4)):
        spec = CountSpec(dtype="int32", vocabulary=vocabulary)
        for name, rows in (("empty", 0), ("one row", 1), ("rows", 9)):
            inputs = {
                "tokens": source.integers(0, vocabulary, rows, dtype="int32"),
                "slots": source.normal(12).argsort()[:rows].to(torch.int32),
                "position": source.integers(0, 1 << 20, rows, dtype="int32"),
                "counts": source.integers(0, 3, 12, vocabulary, dtype="int32") * (PROMPT_BIT // 2),
                "recent": source.integers(-1, vocabulary, 12, ring, dtype="int32"),
            }
            yield _count_case(place, f"{name} of {vocabulary}, ring {ring}", spec, inputs)


def _count_case(place: Place, name: str, spec: CountSpec, inputs: dict[str, torch.Tensor]) -> Case:
    def run(count: Any) -> tuple[torch.Tensor, ...]:
        values = {key: on(place, value) for key, value in inputs.items()}
        count(**values)
        return values["counts"], values["recent"]

    return Case(name=name, spec=spec, inputs=dict(inputs), run=run)
