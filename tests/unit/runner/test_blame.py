"""A warm-up that an op of the backend fails names that op and its provider; other failures stay what they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivetrain.errors import DeviceError
from drivetrain.ops import Ops
from drivetrain.runner.batch import StepLimits
from drivetrain.runner.blame import warm_up_or_name
from drivetrain_api.v1 import Decline, PrepareSpec, Provided
from tests.unit.runner.devices import host
from tests.unit.runner.test_runner import make

LIMITS = StepLimits(rows=1, tokens=4, blocks_per_row=0)


def started(run, monkeypatch):
    """Warm up a runner whose backend prepares steps by ``run``."""

    def provide(spec):
        if isinstance(spec, PrepareSpec):
            return Provided(implementation=run, label="own prepare")
        return Decline(reason="no")

    bound = []
    real = Ops.__init__
    monkeypatch.setattr(Ops, "__init__", lambda self, *a, **k: (bound.append(self), real(self, *a, **k))[1])
    runner, decoder = make(replace(host(), provide=provide))
    decoder.holders = ()
    warm_up_or_name(runner, LIMITS, bound[-1], lambda ops: decoder)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda inputs, widths: None, "it returned None, expected"),
        (lambda inputs, widths: inputs.nothing, "it raised AttributeError"),
    ],
)
def test_the_op_is_named(run, expected, monkeypatch, caplog) -> None:
    with pytest.raises(DeviceError, match=rf"warm-up failed: .*input\.prepare/1 by 'own prepare': {expected}"):
        started(run, monkeypatch)
    assert not caplog.records


def test_another_failure_stays_what_it_is() -> None:
    runner, decoder = make()
    decoder.holders = ()

    def broken(*given):
        raise RuntimeError("not an op")

    decoder.forward = broken
    ops = Ops(runner.backend, block_tokens=16)
    with pytest.raises(DeviceError, match=r"warm-up with .* failed \(unknown\): RuntimeError: not an op"):
        warm_up_or_name(runner, LIMITS, ops, lambda ops: decoder)


def test_what_measuring_raises_names_the_backend() -> None:
    runner, _ = make()

    class Broken:
        def measure(self, run):
            raise KeyError("bytes")

    runner.backend = replace(runner.backend, memory=Broken())
    ops = Ops(runner.backend, block_tokens=16)
    with pytest.raises(DeviceError, match="the backend: warm-up raised KeyError: 'bytes'"):
        warm_up_or_name(runner, LIMITS, ops, lambda ops: runner.decoder)
