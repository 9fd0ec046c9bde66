"""Builds of the compiled kernels that no wheel holds: all levels on any processor, and under sanitizers."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from drivetrain_cpu.native import usable_kernels

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "backends/cpu"
SOURCE = FOLDER / "src"
DRIVER = Path(__file__).with_name("driver.cpp")


def hook() -> ModuleType:
    """The wheel's build hook, imported from its file."""
    spec = importlib.util.spec_from_file_location("hatch_build", FOLDER / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiler() -> list[str]:
    """The compiler that the hook would take; skips where there is none."""
    found = shlex.split(os.environ.get("CXX", "")) or [c for c in hook().COMPILERS if shutil.which(c)][:1]
    if not found or not shutil.which(found[0]):
        pytest.skip("no C++ compiler")
    return found


def build(target: Path, *flags: str) -> Path:
    """Compile all sources at once, every level for the same instructions: the library lists all levels, whatever the
    processor, and a vector that it has not becomes several."""
    command = [*compiler(), "-std=gnu++20", "-fPIC", "-pthread", "-w", "-D__builtin_cpu_supports(x)=1", f"-I{SOURCE}"]
    done = subprocess.run(
        [*command, *flags, *map(str, sorted(SOURCE.glob("*.cpp"))), "-o", str(target)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target


def every_level(target: Path) -> Path:
    """The library with all levels, on the widest instructions that this processor surely has."""
    kernels, _ = usable_kernels()
    wide = kernels is not None and "avx2" in kernels.levels
    return build(target, "-O2", "-shared", *(hook().X86_LEVELS["level_avx2.cpp"] if wide else ()))


def needs_sanitizer(name: str, folder: Path) -> None:
    """Skip where the compiler has no runtime for the sanitizer, or programs built with it do not start here."""
    program = folder / "probe"
    (folder / "probe.cpp").write_text("int main() { return 0; }\n")
    flags = [f"-fsanitize={name}", str(folder / "probe.cpp"), "-o", str(program)]
    built = subprocess.run([*compiler(), *flags], capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"the compiler has no {name} sanitizer: {built.stderr.strip().splitlines()[-1]}")
    ran = subprocess.run([str(program)], capture_output=True, text=True)
    if ran.returncode:
        pytest.skip(f"a program with the {name} sanitizer does not start: {ran.stderr.strip()[:200]}")


def python(code: str, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT)
