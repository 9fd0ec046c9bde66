"""Runs a file of tests in a process of its own: in the tests' process kernels are interpreted, and Triton's language is
then another one. Such files are named ``apart_*.py``, so that nobody else collects them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run_apart(path: Path) -> None:
    """Run all tests of ``path``; fails with what they say unless all pass and there are some."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("TRITON_INTERPRET", "PYTEST_"))
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
