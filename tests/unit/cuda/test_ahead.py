"""What a start compiles ahead, with real compilations: see ``apart_ahead.py``."""

from pathlib import Path

from tests.unit.triton.apart import run_apart


def test_what_a_start_compiles():
    run_apart(Path(__file__).with_name("apart_ahead.py"))
