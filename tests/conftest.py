"""What every test shares: the environment torch must see before it loads, and the devices of the matrix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests.real_model import real_gguf

__all__ = ["real_gguf"]  # a fixture: tests name it

# Before torch loads, here and in every process that a test starts: spinning threads starve the other worker.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test may reach a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[1]


def matrix(root: Path = ROOT) -> list[dict[str, str]]:
    """The rows of ci/matrix.yaml: device, wheel, folder, run."""
    return yaml.safe_load((root / "ci/matrix.yaml").read_text(encoding="utf-8"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine-device",
        action="append",
        default=[],
        metavar="NAME",
        help="run engine tests on this device only; may be given again (default: every row with `run: ci`)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that takes ``engine_device`` once a device of the matrix."""
    if "engine_device" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--engine-device")
        rows = [row["device"] for row in matrix() if row["run"] == "ci"]
        unknown = set(chosen) - {row["device"] for row in matrix()}
        if unknown:
            raise pytest.UsageError(f"--engine-device {sorted(unknown)}: not in ci/matrix.yaml")
        metafunc.parametrize("engine_device", chosen or rows, scope="session")


@pytest.fixture(scope="session")
def root() -> Path:
    """The workspace's top folder."""
    return ROOT
