"""The launcher, with real compilations: see ``apart_launch.py``."""

from pathlib import Path

from tests.unit.triton.apart import run_apart


def test_launches_and_compilations():
    run_apart(Path(__file__).with_name("apart_launch.py"))
