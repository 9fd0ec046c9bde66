"""A start leaves cyclic garbage alone, and collection as it found it."""

from __future__ import annotations

import gc

import pytest

from drivetrain import launch


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_collection_is_off_during_a_start_alone(monkeypatch, before: bool, fails: bool) -> None:
    seen = []

    def describe(config, choice):
        seen.append(gc.isenabled())
        raise ValueError("described")

    monkeypatch.setattr(launch, "describe", describe)
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        if fails:
            with pytest.raises(ValueError, match="described"):
                launch.open_loop(None, object())
        else:
            with launch.nothing_collected():
                seen.append(gc.isenabled())
        assert seen == [False] and gc.isenabled() == before
    finally:
        (gc.enable if was else gc.disable)()
