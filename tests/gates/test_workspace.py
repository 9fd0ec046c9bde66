"""The workspace's own promises: tool limits, import contracts, make targets, the matrix."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml


@pytest.fixture(scope="session")
def project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())


def ruff(root: Path, name: str, text: str) -> str:
    """The rules that ruff finds broken in ``text``, were it the file ``name``."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", f"--stdin-filename={name}"]
    done = subprocess.run([*command, "-"], cwd=root, input=text, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


BRANCHES = "".join(f"    if x == {n}:\n        return {n}\n" for n in range(13))
FAULTS = {
    "C901": f"def f(x: int) -> int:\n{BRANCHES}    return x\n",
    "PLR0912": f"def f(x: int) -> int:\n{BRANCHES}    return x\n",
    "PLR0915": "def f(x: int) -> None:\n" + "    print(x)\n" * 51,
    "PLR0913": "def f(a: int, b: int, c: int, d: int, e: int, g: int, h: int) -> None: ...\n",
    "ANN001": "def f(x) -> None: ...\n",
    "ANN201": "def f(x: int): ...\n",
    "E501": "x = '" + "a" * 120 + "'\n",
    "F401": "import json\n",
}


@pytest.mark.parametrize("rule", FAULTS)
@pytest.mark.parametrize("package", ["core/drivetrain", "plugins/api/drivetrain_api", "backends/cpu/drivetrain_cpu"])
def test_ruff_finds_the_planted_fault(root, rule, package):
    assert rule in ruff(root, f"{package}/planted.py", FAULTS[rule])


def test_ruff_lets_limits_be_reached(root):
    text = "def f(a: int, b: int, c: int, d: int, e: int, g: int) -> None:\n" + "    print(a)\n" * 49
    assert "All checks passed" in ruff(root, "core/drivetrain/planted.py", text)


CHAINS = {
    "core to backend": ("drivetrain/launch.py", "import drivetrain_cpu"),
    "core to backend when called": ("drivetrain/launch.py", "def f():\n    import drivetrain_mirage"),
    "backend to core": ("drivetrain_cpu/planted.py", "import drivetrain.ops"),
    "backend to backend": ("drivetrain_cpu/planted.py", "import drivetrain_mirage"),
    "contract to core": ("drivetrain_api/planted.py", "import drivetrain.errors"),
    "scheduler to torch": ("drivetrain/sched/planted.py", "def f():\n    import torch"),
    "cache to runner": ("drivetrain/cache/planted.py", "import drivetrain.runner"),
    "model to scheduler": ("drivetrain/models/planted.py", "import drivetrain.sched"),
    "runner to command line": ("drivetrain/runner/planted.py", "import drivetrain.cli"),
    "core to kernel language": ("drivetrain/ops/planted.py", "import triton"),
}
EMPTY = (
    *(f"drivetrain{n}/__init__" for n in ("", "_api", "_cpu", "_mirage")),
    *(f"drivetrain/{n}/__init__" for n in "sched cache runner models ops dist server cli".split()),
    *(f"drivetrain/{n}" for n in "loop params errors config launch".split()),
)


def lint_imports(root: Path, tree: Path, planted: tuple[str, str] | None) -> subprocess.CompletedProcess[str]:
    """Run the workspace's import contracts over an empty copy of its packages with one planted import."""
    for name in EMPTY:
        path = tree / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    if planted:
        (tree / planted[0]).write_text(planted[1] + "\n")
    linter = Path(sys.executable).with_name("lint-imports")
    command = [str(linter), "--no-cache", str(root / "pyproject.toml")]
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def test_the_import_contracts_pass_without_a_fault(root, tmp_path):
    done = lint_imports(root, tmp_path, None)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("planted", CHAINS.values(), ids=CHAINS.keys())
def test_the_import_contracts_find_the_planted_fault(root, tmp_path, planted):
    done = lint_imports(root, tmp_path, planted)
    assert done.returncode == 1 and "BROKEN" in done.stdout, done.stdout + done.stderr


def test_mypy_reads_the_contract_and_the_core(project):
    assert {"plugins/api/drivetrain_api", "core/drivetrain"} <= set(project["tool"]["mypy"]["files"])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("def f(x): ...\n", "no-untyped-def"),
        ("x: list = []\n", "type-arg"),
        ("def f(x: int | None) -> int:\n    return x + 1\n", "operator"),
        ("x: int = 1  # type: ignore\n", "unused-ignore"),
    ],
)
def test_mypy_finds_the_planted_fault(root, tmp_path, text, rule):
    (tmp_path / "planted.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), "planted.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and f"[{rule}]" in done.stdout, done.stdout + done.stderr


def make(root: Path, *words: str, tmp: Path) -> str:
    """What make would do, as text, with a venv that does not exist yet."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    command = ["make", "--no-print-directory", "-n", f"VENV={tmp / 'venv'}", *words]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_comes_first_and_the_members_in_one_command(root, tmp_path):
    lines = make(root, "venv", tmp=tmp_path).splitlines()
    (torch,) = (n for n, line in enumerate(lines) if "install" in line and "torch==2.13.0" in line)
    (members,) = (n for n, line in enumerate(lines) if "-e " in line)
    assert torch < members
    plugins = ("./plugins/api", "./plugins/mirage", "./plugins/triton")
    for member in ("./core[gguf]", "./backends/cpu", "./backends/cuda", *plugins):
        assert f"-e '{member}'" in lines[members]


def test_the_torch_requirement_can_be_overridden(root, tmp_path):
    words = ("TORCH=torch==2.10.0", "PIP_ARGS=--index-url https://wheels.example")
    text = make(root, "demo", *words, tmp=tmp_path)
    (line,) = (line for line in text.splitlines() if "torch==2.10.0'" in line and "install" in line)
    assert "--index-url https://wheels.example" in line
    assert "torch==2.13.0" not in text and text.rstrip().endswith("ci/demo.py")


def test_a_repeat_installs_nothing_and_remembers_the_torch_requirement(root, tmp_path):
    stamps = tmp_path / "venv/.make"
    stamps.mkdir(parents=True)
    for name in ("python", "torch", "runtime", "demo", "dev"):
        (stamps / name).write_text("torch==2.10.0\n" if name == "torch" else "")
    sources = [*root.glob("**/pyproject.toml"), *root.glob("backends/cpu/src/*"), root / "backends/cpu/hatch_build.py"]
    newest = max(path.stat().st_mtime for path in sources if ".venv" not in path.parts)
    for number, name in enumerate(("python", "torch", "runtime", "demo", "dev"), 1):
        os.utime(stamps / name, (newest + number, newest + number))
    done = subprocess.run(
        ["make", "--no-print-directory", "venv", f"VENV={tmp_path / 'venv'}"],
        cwd=root, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "install" not in done.stdout, done.stdout
    assert (stamps / "torch").read_text() == "torch==2.10.0\n"


def test_the_ci_tier_leaves_out_slow_and_device_tests(root, tmp_path):
    assert '-m "not slow and not device"' in make(root, "test", tmp=tmp_path)
    assert '-m "not device"' in make(root, "test-all", tmp=tmp_path)


def test_ci_stops_at_the_first_stage_that_fails(root, tmp_path):
    """The script with a failing tool in place of the venv's: named, timed, non-zero, and nothing after it."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_text((root / ".ci/run").read_text())
    (tmp_path / "Makefile").write_text("venv:\n\t@echo made\ntest:\n\t@echo tested\n")
    ruff = tmp_path / "tools/bin/ruff"
    ruff.parent.mkdir(parents=True)
    ruff.write_text("#!/bin/sh\necho broken; exit 3\n")
    ruff.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "VENV": "tools", "CI": "true"}
    command = ["bash", ".ci/run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, input="", capture_output=True, text=True)
    assert done.returncode == 3
    assert "made" in done.stdout and "broken" in done.stdout and "--- ruff FAILED" in done.stderr
    assert "import contracts" not in done.stdout and "tested" not in done.stdout


def test_every_gate_runs_in_ci_and_by_make(root, tmp_path):
    script = (root / ".ci/run").read_text()
    target = make(root, "gates", tmp=tmp_path)
    gates = sorted(path.name for path in (root / "ci/gates").glob("*.py"))
    assert len(gates) >= 6
    for gate in gates:
        assert f"ci/gates/{gate}" in script and f"ci/gates/{gate}" in target, gate
    assert all(tool in script for tool in ("ruff", "mypy", "lint-imports", "make --no-print-directory test"))


def test_the_matrix_has_a_row_for_every_backend_that_the_wheels_register(root):
    rows = yaml.safe_load((root / "ci/matrix.yaml").read_text())
    registered = set()
    for path in [*root.glob("backends/*/pyproject.toml"), *root.glob("plugins/*/pyproject.toml")]:
        project = tomllib.loads(path.read_text())["project"]
        for device in project.get("entry-points", {}).get("drivetrain.backends", {}):
            registered.add((device, project["name"], path.parent.relative_to(root).as_posix()))
    template = {entry for entry in registered if entry[2] == "plugins/template"}
    assert {(r["device"], r["wheel"], r["folder"]) for r in rows} == registered - template
    assert {r["run"] for r in rows} <= {"ci", "hand"}


def test_no_package_lies_directly_in_a_folder_that_holds_wheels(root):
    assert [p for f in ("core", "backends", "plugins") if (p := root / f / "__init__.py").exists()] == []
