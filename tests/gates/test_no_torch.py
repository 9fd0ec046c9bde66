"""The no-torch gate sees an import however it is hidden, and covers modules nobody told it about."""

from pathlib import Path

import pytest

from ci.gates import no_torch


def package(root: Path, files: dict[str, str]) -> no_torch.Report:
    for name, text in {"__init__.py": "", **files}.items():
        path = root / "src" / "thing" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return no_torch.check(root, {"thing": "src"})


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "from torch import nn",
        "import torch.nn as nn",
        "try:\n    import torch\nexcept ImportError:\n    torch = None",
        "import importlib\nimportlib.import_module('torch')",
    ],
)
def test_planted_fault_is_found(tmp_path, text):
    report = package(tmp_path, {"late.py": text})
    (failure,) = report.failures.values()
    assert "late.py" in failure and "imports torch" in failure


def test_an_import_through_another_module_is_found(tmp_path):
    report = package(tmp_path, {"a.py": "import thing.b", "b.py": "import thing.c", "c.py": "import torch"})
    assert {"thing.a", "thing.c"} <= set(report.failures)


def test_a_function_may_import_it(tmp_path):
    assert package(tmp_path, {"a.py": "def f():\n    import torch"}).failures == {}


def test_a_module_that_breaks_is_a_failure(tmp_path):
    assert "ZeroDivisionError" in package(tmp_path, {"a.py": "1 / 0"}).failures["thing.a"]


def test_new_modules_are_covered_and_tensor_modules_are_left_out(tmp_path):
    for name in ("sched/__init__.py", "sched/fresh.py", "runner/rows.py", "loop.py", "runners.py"):
        path = tmp_path / "core/drivetrain" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    names = no_torch.modules(tmp_path)
    assert names == ["drivetrain.loop", "drivetrain.runners", "drivetrain.sched", "drivetrain.sched.fresh"]


def test_help_is_run(tmp_path):
    text = "def main(argv):\n    import torch"
    for name, content in {"__init__.py": "", "cli/__init__.py": "", "cli/main.py": text}.items():
        path = tmp_path / "core/drivetrain" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    report = no_torch.check(tmp_path, {"drivetrain": "core"})
    assert list(report.failures) == ["drivetrain.cli.main --help"]


def test_the_workspace_loads_without_torch(root):
    report = no_torch.check(root)
    assert report.failures == {}
    for name in ("sched.plan", "params", "errors", "config", "loop", "cli.main"):
        assert f"drivetrain.{name}" in report.checked
