"""Inputs of draws, log-probabilities and verification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from drivetrain.ops.cases.source import Source, call_case, int_tensor, on
from drivetrain.ops.reference.kinds import Case, Place
from drivetrain_api.v1 import DrawSpec, KeepSpec, LogprobsSpec, SamplingInputs, VerifySpec


def sampling_inputs(source: Source, rows: int, vocabulary: int, *, filters: bool = True) -> SamplingInputs:
    """Return host inputs of a mixed batch: every third row greedy; with ``filters`` each filter in some
    rows.
    """
    random = source.random
    temperature = random.uniform(0.3, 2.0, rows).astype(np.float32)
    temperature[::3] = 0.0
    top_k = random.choice([0, 1, 3, vocabulary + 5], rows) if filters else np.zeros(rows)
    top_p = random.choice([1.0, 0.2, 0.9, 1e-6], rows) if filters else np.ones(rows)
    min_p = random.choice([0.0, 0.05, 1.0], rows) if filters else np.zeros(rows)
    return SamplingInputs(
        temperature=torch.from_numpy(temperature),
        top_k=int_tensor(top_k, "int32"),
        top_p=torch.from_numpy(top_p.astype(np.float32)),
        min_p=torch.from_numpy(min_p.astype(np.float32)),
        seed=source.integers(-(2**63), 2**63 - 1, rows),
        position=source.integers(0, 1 << 20, rows, dtype="int32"),
        sample=source.integers(0, 4, rows, dtype="int32"),
        mask=None,
        all_greedy=rows == 0,
        any_top_k=filters,
        any_top_p=filters,
        any_min_p=filters,
    )


def random_mask(source: Source, rows: int, vocabulary: int) -> torch.Tensor:
    """Return a mask that allows half of the tokens and always one."""
    words = source.integers(-(2**31), 2**31, rows, -(-vocabulary // 32), dtype="int32")
    words[:, 0] |= 1
    return words


def inputs_on(place: Place, inputs: SamplingInputs) -> SamplingInputs:
    """Return the inputs on the place's device."""
    values: dict[str, Any] = {f.name: on(place, getattr(inputs, f.name)) for f in fields(inputs)}
    return SamplingInputs(**values)


def draw_case(
    place: Place, name: str, spec: DrawSpec, logits: torch.Tensor, inputs: SamplingInputs, stream: int = 0
) -> Case:
    """Make one case of sample.draw."""

    def run(draw: Any) -> tuple[torch.Tensor, ...]:
        return (draw(on(place, logits), inputs_on(place, inputs), stream),)

    return Case(name=name, spec=spec, inputs={"logits": logits, "inputs": inputs, "stream": stream}, run=run)


def draw_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Filters, masks, ties, offsets, streams, a prime vocabulary and one of a thousand."""
    source = Source(dtype, seed)
    for vocabulary, offset, stream in ((101, 0, 0), (64, 7, 1), (1009, 0, 0), (33, 32, 3)):
        spec = DrawSpec(dtype=dtype, vocabulary=vocabulary, vocabulary_offset=offset)
        for name, rows in (("empty", 0), ("one row", 1), ("rows", 12)):
            logits = source.normal(rows, vocabulary, scale=3.0)
            for filters in (False, True):
                inputs = sampling_inputs(source, rows, vocabulary, filters=filters)
                label = f"{name} of {vocabulary}, filters {filters}"
                yield draw_case(place, label, spec, logits, inputs, stream)
        masked = replace(sampling_inputs(source, 6, vocabulary), mask=random_mask(source, 6, vocabulary))
        yield draw_case(place, f"mask of {vocabulary}", spec, source.normal(6, vocabulary), masked, stream)
        ties = source.integers(0, 3, 9, vocabulary).to(source.dtype)
        tied = sampling_inputs(source, 9, vocabulary)
        yield draw_case(place, f"ties of {vocabulary}", spec, ties, tied, stream)
        greedy = replace(tied, temperature=torch.zeros(9), all_greedy=True)
        yield draw_case(place, f"all greedy of {vocabulary}", spec, ties, greedy, stream)


def logprobs_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """With and without alternatives, ties."""
    source = Source(dtype, seed)
    spec = LogprobsSpec(dtype=dtype, vocabulary=211)
    for name, rows in (("empty", 0), ("one row", 1), ("rows", 9)):
        for k in (0, 1, 20):
            inputs = {
                "logits": source.normal(rows, 211, scale=4.0),
                "tokens": source.integers(0, 211, rows, dtype="int32"),
                "k": k,
            }
            yield call_case(place, f"{name}, k {k}", spec, inputs)
    ties = {
        "logits": source.integers(0, 4, 5, 211).to(source.dtype),
        "tokens": source.integers(0, 211, 5, dtype="int32"),
        "k": 30,
    }
    yield call_case(place, "ties", spec, ties)


def verify_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Nothing, something and everything accepted; rows with fewer drafts than places."""
    source = Source("float32", seed)
    for places in (1, 3, 5):
        spec = VerifySpec(dtype="int32", max_drafts=places)
        for name, rows in (("empty", 0), ("one row", 1), ("rows", 40)):
            inputs = {
                "draws": source.integers(0, 2, rows, places + 1, dtype="int32"),
                "drafts": source.integers(0, 2, rows, places, dtype="int32"),
                "num_drafts": source.integers(0, places + 1, rows, dtype="int32"),
            }
            yield call_case(place, f"{name}, {places} drafts", spec, inputs)


def keep_cases(place: Place, dtype: str, seed: int) -> Iterator[Case]:
    """Tables with and without drafts, rows in any order, witnesses that are no numbers."""
    source = Source("float32", seed)
    spec = KeepSpec(dtype="int32")
    for name, rows, places in (
        (name, rows, 1 + drafts) for drafts in (0, 3) for name, rows in (("empty", 0), ("one row", 1), ("rows", 9))
    ):
        witness = source.normal(rows)
        witness[1::3] = float("nan")
        witness[2::3] = float("inf")
        inputs = {
            "tokens": source.integers(0, 1000, rows, dtype="int32"),
            "witness": witness,
            "rows": source.normal(12).argsort()[:rows].to(torch.int32),
            "last_tokens": source.integers(0, 1000, 12, places, dtype="int32"),
        }
        yield _keep_case(place, f"{name}, {places - 1} drafts", spec, inputs)


def _keep_case(place: Place, name: str, spec: KeepSpec, inputs: dict[str, torch.Tensor]) -> Case:
    def run(keep: Any) -> tuple[torch.Tensor, ...]:
        values = {key: on(place, value) for key, value in inputs.items()}
        return keep(**values), values["last_tokens"]

    return Case(name=name, spec=spec, inputs=dict(inputs), run=run)
