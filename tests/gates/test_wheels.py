"""The four wheels, really built and really installed, work by what they declare and nothing else.

A clean environment holds the wheels under test, installed by pip without an index, and links to the installed
distributions that their metadata asks for, followed to the end. What a wheel imports without declaring it is
not there; neither are the workspace's editable installs.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
WHEELS = {
    "drivetrain": ("core", "drivetrain"),
    "drivetrain-api": ("plugins/api", "drivetrain_api"),
    "drivetrain-cpu": ("backends/cpu", "drivetrain_cpu"),
    "drivetrain-cuda": ("backends/cuda", "drivetrain_cuda"),
    "drivetrain-mirage": ("plugins/mirage", "drivetrain_mirage"),
    "drivetrain-triton": ("plugins/triton", "drivetrain_triton"),
}
IMPORT_ALL = """
import importlib, json, sys
failures = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except BaseException as error:
        failures[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failures))
"""


class Built:
    """One built wheel."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            self.names = archive.namelist()
            info = next(n.split("/")[0] for n in self.names if ".dist-info/" in n)
            self.metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())

    @property
    def requires(self) -> list[Requirement]:
        """What it needs without an extra."""
        all_of_them = map(Requirement, self.metadata.get_all("Requires-Dist", []))
        return [r for r in all_of_them if r.marker is None or r.marker.evaluate({"extra": ""})]

    @property
    def modules(self) -> list[str]:
        paths = [n for n in self.names if n.endswith(".py") and not n.endswith("__main__.py")]
        return [n.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for n in paths]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Built]:
    target = tmp_path_factory.mktemp("wheels")
    for folder, _ in WHEELS.values():
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
        done = subprocess.run(command, cwd=ROOT / folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    found = {Built(path).metadata["Name"]: Built(path) for path in target.glob("*.whl")}
    assert set(found) == set(WHEELS)
    return found


def closure(requirements: Iterable[Requirement]) -> set[str]:
    """The installed distributions that the requirements need, ours left out."""
    todo, seen = list(requirements), set()
    while todo:
        requirement = todo.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen or key[0] in WHEELS:
            continue
        seen.add(key)
        distribution = importlib.metadata.distribution(requirement.name)
        assert requirement.specifier.contains(distribution.version, prereleases=True), requirement
        for text in distribution.requires or ():
            needed = Requirement(text)
            extras = [{"extra": extra} for extra in ("", *requirement.extras)]
            if needed.marker is None or any(needed.marker.evaluate(extra) for extra in extras):
                todo.append(needed)
    return {name for name, _ in seen}


def top_entries(name: str) -> Iterator[Path]:
    distribution = importlib.metadata.distribution(name)
    site = Path(distribution.locate_file(""))
    tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
    yield from (site / top for top in tops)


class Clean:
    """A virtual environment with some built wheels and exactly what they declare."""

    def __init__(self, path: Path, wheels: list[Built]) -> None:
        venv.create(path, with_pip=False, symlinks=True)
        self.python = path / "bin/python"
        site = next((path / "lib").glob("python*/site-packages"))
        for name in closure([r for wheel in wheels for r in wheel.requires]):
            for entry in top_entries(name):
                if not (site / entry.name).exists():
                    (site / entry.name).symlink_to(entry)
        pip = (sys.executable, "-m", "pip", "--python", str(self.python))
        files = [str(wheel.path) for wheel in wheels]
        self.call(*pip, "install", "-q", "--no-index", "--no-deps", *files)

    def call(self, *command: str, status: int = 0) -> str:
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.python.parents[1]), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=environment, cwd=self.python.parents[1]
        )
        assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def imports(self, modules: list[str]) -> dict[str, str]:
        return json.loads(self.call(str(self.python), "-c", IMPORT_ALL, json.dumps(modules)).splitlines()[-1])


@pytest.fixture(scope="module")
def complete(built, tmp_path_factory) -> Clean:
    return Clean(tmp_path_factory.mktemp("complete") / "venv", list(built.values()))


@pytest.mark.parametrize("name", WHEELS)
def test_a_wheel_holds_its_package_typed_and_licensed_and_nothing_else(built, name):
    folder, package = WHEELS[name]
    wheel = built[name]
    assert f"{package}/py.typed" in wheel.names
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in wheel.names)
    tops = {n.split("/")[0] for n in wheel.names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {package}
    assert not [n for n in wheel.names if re.search(r"(^|/)(tests?|__pycache__)(/|$)|(^|/)test_|\.pyc$", n)]
    sources = {p.relative_to(ROOT / folder).as_posix() for p in (ROOT / folder / package).rglob("*.py")}
    assert sources == {n for n in wheel.names if n.endswith(".py")}


@pytest.mark.parametrize("name", WHEELS)
def test_the_version_is_stated_once(built, name):
    folder, package = WHEELS[name]
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    (stated,) = re.findall(r'__version__ = "(.+)"', (ROOT / folder / package / "__init__.py").read_text())
    assert built[name].metadata["Version"] == stated
    assert built[name].metadata["Requires-Python"] == ">=3.11"
    assert built[name].metadata["License-Expression"] == "Apache-2.0"


def test_dependencies_point_one_way(built):
    needs = {name: {r.name for r in wheel.requires} for name, wheel in built.items()}
    assert needs["drivetrain-api"] == {"pluggy"}
    assert needs["drivetrain-cuda"] == {"drivetrain-api", "drivetrain-triton", "torch", "numpy"}
    assert needs["drivetrain-triton"] == {"drivetrain-api", "torch"}
    assert needs["drivetrain-cpu"] == needs["drivetrain-mirage"] == {"drivetrain-api", "torch", "numpy"}
    assert needs["drivetrain"] & set(WHEELS) == {"drivetrain-api"}
    for name in ("drivetrain", "drivetrain-cpu", "drivetrain-mirage"):
        (contract,) = (r for r in built[name].requires if r.name == "drivetrain-api")
        assert contract.specifier.contains("0.1.0") and not contract.specifier.contains("0.2.0")


def test_every_module_imports_by_what_its_wheel_declares(built, complete):
    modules = [module for wheel in built.values() for module in wheel.modules]
    failures = complete.imports(modules)
    # The optional reader may ask for its extra; kernels for the compiler that torch's builds for a device bring.
    missing = {"gguf": "gguf", "drivetrain_triton": "triton", "drivetrain_cuda": "triton"}
    unexpected = {
        n: w for n, w in failures.items() if not any(p in n and f"named '{m}'" in w for p, m in missing.items())
    }
    assert unexpected == {}


def test_what_no_wheel_declares_is_not_there(complete):
    failures = complete.imports(["torch", "transformers", "pytest", "gguf"])
    assert sorted(failures) == ["gguf", "pytest", "transformers"]


def test_the_command_runs_and_finds_the_built_backends(complete):
    engine = str(complete.python.with_name("engine"))
    assert "usage" in complete.call(engine, "--help").lower()
    listing = complete.call(engine, "devices")
    for device in ("cpu", "cuda", "mirage", "mirage-static"):
        assert f"--device {device} " in listing, listing
    assert listing.count("not usable") == listing.count("no CUDA driver"), listing
    for _, package in WHEELS.values():
        origin = complete.call(str(complete.python), "-c", f"import {package}; print({package}.__file__)")
        assert origin.startswith(str(complete.python.parents[1])), origin


def test_the_contract_stands_alone(built, tmp_path):
    alone = Clean(tmp_path / "venv", [built["drivetrain-api"]])
    assert alone.imports(built["drivetrain-api"].modules) == {}
    assert "ModuleNotFoundError" in alone.imports(["torch"])["torch"]


@pytest.mark.parametrize("name", ["drivetrain-cpu", "drivetrain-mirage"])
def test_a_backend_needs_no_core(built, tmp_path, name):
    alone = Clean(tmp_path / "venv", [built["drivetrain-api"], built[name]])
    assert f"{WHEELS[name][1]}.plugin" in built[name].modules
    assert alone.imports(built[name].modules) == {}
    assert "ModuleNotFoundError" in alone.imports(["drivetrain"])["drivetrain"]


def test_the_core_without_a_backend_says_what_to_install(built, tmp_path):
    alone = Clean(tmp_path / "venv", [built["drivetrain-api"], built["drivetrain"]])
    assert "No backend wheel" in alone.call(str(alone.python.with_name("engine")), "devices", status=1)
