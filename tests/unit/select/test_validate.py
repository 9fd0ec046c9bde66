"""What a backend's ``validate`` answers is checked before it is believed."""

from types import SimpleNamespace

import pytest

from drivetrain.errors import DeviceError
from drivetrain.launch import _problems
from drivetrain_api.v1 import Problem

CHOICE = SimpleNamespace(wheel="drivetrain-acme", name="acme")


def ask(answer):
    def validate(plan):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return _problems(CHOICE, SimpleNamespace(validate=validate), None)


def test_problems_come_through():
    problem = Problem(setting="dtype", reason="none", proposed="float32")
    assert ask([problem]) == (problem,) and ask(()) == ()


@pytest.mark.parametrize("answer", [None, ["dtype"], 5, RuntimeError("planted")])
def test_anything_else_names_the_wheel(answer):
    with pytest.raises(DeviceError, match="drivetrain-acme: validate"):
        ask(answer)
