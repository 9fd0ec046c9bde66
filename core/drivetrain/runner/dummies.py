"""Dummy plans: steps of the padding row, whose tokens go to the null block, for warming up and capture."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from drivetrain.sched.plan import StepPlan

if TYPE_CHECKING:
    from drivetrain.models.decoder import Decoder
    from drivetrain.models.spec import LayerSpec
    from drivetrain.runner.batch import BatchShape
    from drivetrain.runner.runner import Runner

logger = logging.getLogger(__name__)


def capture_plan(runner: Runner, shape: BatchShape) -> StepPlan:
    """Return the dummy plan by which a bucket is captured: its bounds are the most that can come, and one row of a
    small step has all query tokens."""
    longest = runner.config.max_model_len
    if shape.rows == shape.tokens:
        return decode_plan(runner, shape.rows, longest)
    return prefill_plan(runner, 1, shape.tokens, longest)


def capture_missing(runner: Runner) -> bool:
    """Capture one bucket that is still missing, or give memory of the cache back for it. Returns whether there was any.
    Waits for the device only where memory ran out. When a capture fails, or would not fit whatever the cache can give
    back, its steps stay eager, and no other is tried."""
    shape, reserve = runner.graphs.missing(), runner.reserve
    if shape is None:
        if not runner.graphs.given_up:
            reserve.tell(runner.graphs.count)
        return False
    if (reserve.giving is not None and not reserve.giving.settled()) or reserve.given_back(shape.tokens):
        return True
    if not reserve.fits(shape.tokens):
        runner.graphs.give_up()
        return True
    ran_out = again = False
    try:
        runner.capture(capture_plan(runner, shape), shape)
    except Exception as error:
        ran_out = reserve.ran_out(error)
        again = ran_out and reserve.giving is not None and reserve.giving.possible
        if again:
            logger.warning("memory: capturing steps of %d tokens ran out of it: %s", shape.tokens, error)
        else:
            logger.error("steps of %d tokens could not be captured; they run eagerly", shape.tokens, exc_info=error)
            runner.graphs.give_up()
    if ran_out:
        reserve.renew()  # what the failed capture held went with its error
    if again:
        reserve.fell_short()
    return True


@contextmanager
def few_layers(decoder: Decoder) -> Iterator[None]:
    """In this context the decoder has only the first two layers of each kind: enough to call whatever any calls."""
    counts: Counter[LayerSpec] = Counter()
    whole = decoder.layers
    kinds = [decoder.spec.layers[index] for index in decoder.layer_range]
    kept = []
    for kind, layer in zip(kinds, whole, strict=True):
        counts[kind] += 1
        if counts[kind] <= 2:
            kept.append(layer)
    decoder.layers = tuple(kept)
    try:
        yield
    finally:
        decoder.layers = whole


def prefill_plan(runner: Runner, rows: int, tokens: int, longest: int) -> StepPlan:
    """Return a dummy plan of ``rows`` prompts that share ``tokens`` query tokens; bounds are ``longest`` or
    more."""
    rows = min(rows, tokens)
    counts = np.full(rows, tokens // rows, np.int32)
    counts[: tokens % rows] += 1
    return dummy_plan(runner, counts, np.maximum(counts, longest), 0)


def decode_plan(runner: Runner, rows: int, longest: int) -> StepPlan:
    """Return a dummy plan of ``rows`` decode rows whose bound is ``longest`` tokens."""
    return dummy_plan(runner, np.ones(rows, np.int32), np.full(rows, longest, np.int32), rows)


def dummy_plan(runner: Runner, counts: np.ndarray, bounds: np.ndarray, num_decode: int) -> StepPlan:
    """Return a dummy plan of rows with ``counts`` query tokens and ``bounds`` on their lengths; the first
    ``num_decode`` decode."""
    rows = len(counts)
    return StepPlan(
        plan_id=-1,
        rows=np.full(rows, runner.tables.padding_row, np.int32),
        epochs=np.zeros(rows, np.int32),
        num_new=counts,
        start=np.zeros(rows, np.int32),
        bounds=bounds.astype(np.int32),
        sample=np.ones(rows, bool),
        num_decode=num_decode,
        prompt_ids=np.zeros(int(counts.sum()), np.int32),
        dummy=True,
    )
