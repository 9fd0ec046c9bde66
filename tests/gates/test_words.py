"""Refused file and class names, and text that names a place of one machine."""

import subprocess
from pathlib import Path

import pytest

from ci.gates import words


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("core/drivetrain/utils.py", ""),
        ("core/drivetrain/ops/common.py", ""),
        ("backends/x/base.py", ""),
        ("core/drivetrain/scheduler_v2.py", ""),
        ("core/a.py", "class StepEngine: ..."),
        ("core/a.py", "class CacheMixin: ..."),
        ("docs/a.md", "see /wo" + "rk/main"),
        ("docs/a.md", "cd /ro" + "ot/x"),
        ("ci/run.sh", "cp ../sha" + "red/x ."),
        ("a.toml", "index = 'pypi." + "org'"),
    ],
)
def test_planted_fault_is_found(name, text):
    assert list(words.findings(name, text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("core/drivetrain/v1/database.py", "class EngineConfig: ..."),
        ("docs/a.md", "GET /v1/models, drivetrain/root/x, framework/main, a/work/b"),
    ],
)
def test_innocent_text_passes(name, text):
    assert list(words.findings(name, text)) == []


def test_only_what_git_would_carry_is_read(tmp_path: Path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("build/\n")
    for name in ("build/utils.py", "fresh/utils.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    found, _ = words.scan(tmp_path)
    assert len(found) == 1 and found[0].startswith("fresh/utils.py:0")


def test_the_workspace_keeps_its_words(root, capsys):
    assert words.main(["--root", str(root)]) == 0, capsys.readouterr().out
