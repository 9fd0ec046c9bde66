"""Tests that are run by hand on an accelerator: ``pytest tests/device --device cuda`` (or ``cpu``, to try them out).

After the run the providers of every op are listed, with the number of cases each was checked on.
"""

from __future__ import annotations

import warnings
from collections import Counter

import pytest

from drivetrain.config import EngineConfig
from drivetrain.errors import DeviceError
from drivetrain.launch import view_of
from drivetrain.select.choose import open_backend
from tests.e2e.harness import choice_of

RAN: Counter[tuple[str, str, str]] = Counter()  # (op, dtype, provider) -> cases


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", metavar="NAME", help="what tests/device runs on (default cuda)")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device's name; the test is skipped where its backend can't be opened."""
    name = request.config.getoption("--device", default="cuda")
    try:
        choice_of(name)
    except DeviceError as error:
        pytest.skip(f"{name} can't be opened: {error}")
    return name


@pytest.fixture(scope="session")
def backend(device: str):
    """An open backend of the device."""
    choice = choice_of(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is loaded: what it should find then comes too late
        opened = open_backend(choice, view_of(EngineConfig(model="none", device=device), choice))
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def without_graphs(device: str) -> dict[str, dict[str, str]]:
    """Settings that run every step without graphs; none where the backend has no such option."""
    has = any(option.key == "graphs" for option in choice_of(device).info.options)
    return {"backend_options": {"graphs": "off"}} if has else {}


@pytest.fixture(scope="session")
def ran() -> Counter[tuple[str, str, str]]:
    """Where tests of ops say which provider they ran."""
    return RAN


def pytest_terminal_summary(terminalreporter) -> None:
    if RAN:
        terminalreporter.section("providers")
    for (op, dtype, provider), count in sorted(RAN.items()):
        terminalreporter.write_line(f"{op:20} {dtype:9} {count:4} cases  {provider}")
