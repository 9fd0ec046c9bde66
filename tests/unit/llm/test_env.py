"""``engine env``: what a report needs, and nothing secret."""

from types import SimpleNamespace

import pytest

from drivetrain.cli import env

WHEELS = (
    ("Drivetrain_Zork", ["zork-kernels>=2", "torch; extra == 'all'"]),
    ("other", ["unseen"]),
    ("drivetrain", None),
)


@pytest.fixture
def installed(monkeypatch):
    wheels = [SimpleNamespace(name=name, requires=requires) for name, requires in WHEELS]
    monkeypatch.setattr(env, "distributions", lambda: wheels)
    monkeypatch.setattr(env, "list_backends", lambda: [SimpleNamespace(name="zork", title="z 1", requirement=None)])


def test_wheels_of_the_project_and_what_they_ask_for_are_listed(installed):
    found = env.packages_of_note()
    assert found[: len(env.PACKAGES)] == list(env.PACKAGES)
    assert found[len(env.PACKAGES) :] == ["drivetrain-zork", "zork-kernels"]
    versions = env.collect()["versions"]
    assert versions["zork-kernels"] == "not installed" and versions["torch"][0].isdigit()


def test_variables_of_backends_and_packages_are_shown_and_secrets_are_not(installed, monkeypatch):
    shown = {"ZORK_VISIBLE": "1", "ZORK_KERNELS_CACHE": "/x", "PYTORCH_ALLOC_CONF": "a", "DRIVETRAIN_DEVICE": "cpu"}
    hidden = {"ZORK_API_KEY": "s", "HF_TOKEN": "s", "DRIVETRAIN_PASSWORD": "s", "ZORK_SECRET": "s", "OTHER": "1"}
    monkeypatch.setattr(env, "environment", lambda: shown | hidden)
    assert env.collect()["environment"] == shown
