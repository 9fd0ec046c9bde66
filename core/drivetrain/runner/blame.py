"""Naming the op by which a warm-up failed: the same steps again over watched implementations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from drivetrain.errors import DeviceError, DrivetrainError
from drivetrain.ops.provided import FIX, raised, wheel_of
from drivetrain.runner.runner import Runner
from drivetrain.runner.warmup import WarmUp, warm_up

if TYPE_CHECKING:
    from drivetrain.models.decoder import Decoder
    from drivetrain.ops import Ops
    from drivetrain.runner.batch import StepLimits

NOT_AN_OP = ("(out_of_memory)", "(device_lost)")
PARAMETERS = ("value", "packed")


def warm_up_or_name(runner: Runner, limits: StepLimits, ops: Ops, build: Callable[[Ops], Decoder]) -> WarmUp:
    """Warm up. DeviceError when that fails, of the op and its provider where one of the backend's ops is at fault.

    ``build``: makes a decoder as the runner's is, over other ops. It shares the runner's weights and caches.
    """
    try:
        with _without_traces():
            return warm_up(runner, limits)
    except DrivetrainError as error:
        named = None if any(kind in error.message for kind in NOT_AN_OP) else _named(runner, limits, ops, build)
        if named is None:
            raise
        raise DeviceError(f"warm-up failed: {named.message}", fix=named.fix) from error
    except Exception as error:
        raise DeviceError(f"{wheel_of(runner.backend)}: warm-up raised {raised(error)}", fix=FIX) from error


def _named(runner: Runner, limits: StepLimits, ops: Ops, build: Callable[[Ops], Decoder]) -> DeviceError | None:
    watched = ops.watched()
    try:
        with _without_traces():
            decoder = build(watched)
            for own, theirs in zip(decoder.holders, runner.decoder.holders, strict=True):
                for name in PARAMETERS:
                    if hasattr(theirs, name):
                        setattr(own, name, getattr(theirs, name))
            warm_up(Runner(runner.backend, decoder, runner.caches, runner.config, watched), limits)
    except Exception:
        logging.getLogger(__name__).debug("the watched warm-up failed", exc_info=True)
    return watched.failures[0] if watched.failures else None


@contextmanager
def _without_traces() -> Iterator[None]:
    """The runner logs what it goes on from; here the error says it."""
    logger = logging.getLogger("drivetrain.runner.runner")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
