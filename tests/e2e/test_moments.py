"""Moments of a first token: all of them, in the order in which they pass, and nothing once nobody listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain import moments
from tests.checkpoints import random_ids, tiny_checkpoint
from tests.e2e.harness import Served

INSIDE = ["admitted", "looked up", "planned", "laid out", "uploaded", "changed", "forward queued"]
INSIDE += ["draws queued", "copy queued", "waiting", "copied", "committed"]


@pytest.fixture
def heard():
    seen: list[str] = []
    moments.watch(seen.append)
    yield seen
    moments.watch(None)


def test_a_request_passes_all_moments_in_order(tmp_path: Path, heard: list[str], engine_device: str) -> None:
    served = Served(tiny_checkpoint("llama", tmp_path / "m"), engine_device)
    heard.clear()
    for _ in range(2):  # computed, then found
        served.submit(random_ids(32, 1), 1)
        served.run()
    assert heard == INSIDE * 2
    moments.watch(None)
    served.submit(random_ids(5, 2), 1)
    served.run()
    assert heard == INSIDE * 2
    served.close()
