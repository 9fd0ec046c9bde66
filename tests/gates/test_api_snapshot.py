"""Every kind of change of the contract shows in the snapshot."""

import sys
import textwrap
from types import ModuleType

import pytest

from ci.gates import api_snapshot

BEFORE = """
    from __future__ import annotations
    import enum
    from dataclasses import dataclass, field
    from typing import Literal, Protocol

    __all__ = ["Colour", "Point", "Reader", "KIND", "LIMIT", "move"]
    KIND = Literal["a", "b"]
    LIMIT = 3

    class Colour(enum.Enum):
        RED = "red"

    @dataclass(frozen=True, kw_only=True)
    class Point:
        x: int
        tags: tuple[str, ...] = ()
        more: dict[str, int] = field(default_factory=dict)

    class Reader(Protocol):
        size: int
        @property
        def name(self) -> str: ...
        def read(self, count: int, *, wait: bool = True) -> bytes: ...

    def move(point: Point, by: int = 1) -> Point: ...
"""


@pytest.fixture
def text(monkeypatch):
    def take(source: str) -> str:
        module = ModuleType("contract_under_test")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(textwrap.dedent(source), module.__dict__)
        return api_snapshot.snapshot((module.__name__,))

    return take


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x: int", "x: float"),
        ("x: int", "x: int = 0"),
        ("tags: tuple[str, ...] = ()", "tags: tuple[str, ...] = ('a',)"),
        ("default_factory=dict", "default_factory=lambda: {}"),
        ("frozen=True, ", ""),
        (", kw_only=True", ""),
        ('RED = "red"', 'RED = "rot"'),
        ("size: int", "size: float"),
        ("size: int", "size: int\n        other: int"),
        ("count: int, *", "count: int = 1, *"),
        ("wait: bool = True", "wait: bool = False"),
        ("*, wait", "wait"),
        ("-> bytes", "-> str"),
        ("def read(", "def write(self) -> None: ...\n        def read("),
        ("def name(self) -> str", "def name(self) -> int"),
        ("by: int = 1", "by: int = 2"),
        ('Literal["a", "b"]', 'Literal["a", "b", "c"]'),
        ("LIMIT = 3", "LIMIT = 4"),
        ('"LIMIT", ', ""),
    ],
)
def test_planted_change_is_found(text, old, new):
    assert old in BEFORE
    changes = api_snapshot.compare(text(BEFORE), text(BEFORE.replace(old, new, 1)))
    assert any(line.startswith(("+", "-")) for line in changes)


def test_what_is_private_does_not_show(text):
    private = BEFORE + "\n    class _Hidden: ...\n    def helper(): ...\n"
    assert api_snapshot.compare(text(BEFORE), text(private)) == []


def test_a_ghost_in_all_is_an_error(text):
    with pytest.raises(AttributeError, match="Missing"):
        text('__all__ = ["Missing"]')


def test_a_change_fails_with_the_way_out_and_update_accepts_it(tmp_path, capsys):
    file = tmp_path / "snapshot.txt"
    assert api_snapshot.main(["--file", str(file)]) == 1
    assert api_snapshot.main(["--file", str(file), "--update"]) == 0
    assert api_snapshot.main(["--file", str(file)]) == 0
    file.write_text(file.read_text().replace("class ", "class Other", 1))
    assert api_snapshot.main(["--file", str(file)]) == 1
    assert "docs/decisions/" in capsys.readouterr().out


def test_the_committed_snapshot_is_the_contract(capsys):
    assert api_snapshot.main([]) == 0, capsys.readouterr().out
