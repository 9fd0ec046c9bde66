"""The wheel with its kernels, and without them: how it is built, what it says, and that it serves all the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from drivetrain_cpu.native import load_kernels, usable_kernels
from tests.checkpoints import random_ids, tiny_checkpoint
from tests.e2e.harness import Served
from tests.unit.cpu.builds import FOLDER, ROOT, compiler

LIBRARY = "drivetrain_cpu/_kernels.so"
PROMPTS = [random_ids(40, 1), random_ids(5, 2), random_ids(71, 3)]
DTYPES = ("float32", "bfloat16")
# A compiler that writes an empty file, unless asked for what it has not.
FAKE = """#!/bin/sh
echo "$@" >> "$0.log"
case "$*" in *{lacks}*) echo "cannot find {lacks}" >&2; exit 1;; esac
for last; do :; done
: > "$last"
"""
SERVE = f"""
import json, sys, drivetrain_cpu
from tests.e2e.harness import Served
out = [drivetrain_cpu.__file__]
for dtype in {DTYPES}:
    served = Served(sys.argv[1], "cpu", dtype=dtype)
    out.append(served.greedy(json.loads(sys.argv[2]), 48))
    served.close()
print(json.dumps(out))
"""


@pytest.fixture
def project(tmp_path):
    """A copy of the wheel's folder: nothing is built in the checkout."""
    return copied(tmp_path)


def copied(folder):
    ignored = shutil.ignore_patterns("_kernels.*", "__pycache__", "dist")
    return Path(shutil.copytree(FOLDER, folder / "cpu", ignore=ignored))


def build(project, kind="wheel", **environment):
    """Run the build backend; returns what ran and the one file that it made, if any."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("CXX", "DRIVETRAIN_CPU_KERNELS")}
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(project / "dist")],
        cwd=project,
        capture_output=True,
        text=True,
        env=inherited | environment,
    )
    made = list((project / "dist").glob("*"))
    return done, made[0] if made else None


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def fake_compiler(folder, lacks):
    path = folder / "c++-of-a-test"
    path.write_text(FAKE.format(lacks=lacks))
    path.chmod(0o755)
    return path


def check_pure(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "drivetrain_cpu/native.py" in names(wheel) and not [
        n for n in names(wheel) if n.endswith(("/_kernels.so", ".new"))
    ]


def test_off_makes_a_pure_wheel_and_leaves_no_older_library_in_it(project):
    (project / LIBRARY).write_bytes(b"of an earlier build")
    done, wheel = build(project, DRIVETRAIN_CPU_KERNELS="off")
    assert done.returncode == 0 and "without its own kernels: off, as asked" in done.stdout + done.stderr
    check_pure(wheel)


def test_without_a_compiler_the_wheel_is_pure_and_says_so(project):
    done, wheel = build(project, CXX="/nonexistent")
    assert done.returncode == 0 and "/nonexistent" in done.stdout + done.stderr
    check_pure(wheel)
    empty = project / "empty"
    empty.mkdir()
    done, _ = build(project, PATH=str(empty))
    assert done.returncode == 0 and "no C++ compiler was found (g++," in done.stdout + done.stderr


def test_a_required_library_that_can_not_be_built_is_an_error_that_names_the_compiler(project, tmp_path):
    done, wheel = build(project, CXX="/nonexistent", DRIVETRAIN_CPU_KERNELS="require")
    assert done.returncode != 0 and wheel is None
    assert "the kernels were not built: /nonexistent" in done.stdout + done.stderr
    poor = fake_compiler(tmp_path, "-std=gnu++20")
    done, wheel = build(project, CXX=str(poor), DRIVETRAIN_CPU_KERNELS="require")
    assert done.returncode != 0 and wheel is None
    assert str(poor) in done.stdout + done.stderr and "cannot find -std=gnu++20" in done.stdout + done.stderr


def test_a_compiler_without_a_static_runtime_serves(project, tmp_path):
    path = fake_compiler(tmp_path, "-static-libstdc++")
    done, wheel = build(project, CXX=f"{path} --first=option", DRIVETRAIN_CPU_KERNELS="require")
    assert done.returncode == 0, done.stdout + done.stderr
    assert LIBRARY in names(wheel)
    calls = path.with_name(path.name + ".log").read_text().splitlines()
    assert all(call.startswith("--first=option ") for call in calls)
    assert "-static-libstdc++" in calls[-2] and "-static-libstdc++" not in calls[-1]


def test_a_wheel_built_from_the_source_distribution_holds_a_library_that_works(project, tmp_path):
    compiler()
    done, source = build(project, "sdist")
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (unpacked,) = (tmp_path / "source").iterdir()
    done, wheel = build(unpacked, DRIVETRAIN_CPU_KERNELS="require", CXX=" ".join(compiler()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert LIBRARY in names(wheel) and "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        kernels = load_kernels(Path(archive.extract(LIBRARY, tmp_path)))
    assert kernels.levels[-1] == "plain"
    x, weight = torch.ones(3, 70), torch.ones(9, 70, dtype=torch.bfloat16)
    assert torch.equal(kernels.linear(x, weight, 0, 2), torch.full((3, 9), 70.0))
    assert sys.platform != "linux" or not hasattr(kernels.library, "_ZSt9terminatev"), "the C++ runtime is exported"


# Serving without the library.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("gemma3_text", tmp_path_factory.mktemp("tiny") / "gemma3")


@pytest.fixture(scope="module")
def pure(tmp_path_factory):
    """A folder with the pure wheel, installed; before the checkout on the path of what runs with it."""
    folder = tmp_path_factory.mktemp("pure")
    done, wheel = build(copied(folder), DRIVETRAIN_CPU_KERNELS="off")
    assert done.returncode == 0, done.stdout + done.stderr
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(folder / "site")]
    subprocess.run([*pip, str(wheel)], check=True)
    return folder / "site"


def run(site, *words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pure_wheel_serves_the_same_tokens(pure, checkpoint):
    origin, *got = json.loads(run(pure, "-c", SERVE, str(checkpoint), json.dumps(PROMPTS)).splitlines()[-1])
    assert origin.startswith(str(pure))
    for dtype, tokens in zip(DTYPES, got, strict=True):
        served = Served(checkpoint, "cpu", dtype=dtype)
        assert served.greedy(PROMPTS, 48) == tokens, dtype
        served.close()


def labels(site, checkpoint):
    words = ("-m", "drivetrain.cli.main", "explain", str(checkpoint), "--device", "cpu", "--dtype", "bfloat16")
    lines = [line.split(maxsplit=2) for line in run(site, *words).splitlines()]
    return {line[0]: line[2] for line in lines if len(line) == 3}


def test_explain_says_which_kernels_run_or_why_there_are_none(pure, checkpoint):
    kernels, _ = usable_kernels()
    ops = ("attention.paged/1", "norm.rms/1", "norm.add_rms/1")
    without, here = labels(pure, checkpoint), labels(ROOT, checkpoint)
    for op in ops:
        assert "own kernel: this wheel was built without its kernels (no C++20 compiler" in without[op], without[op]
        assert kernels is None or f"own kernel, {kernels.levels[0]}" in here[op], here[op]
    assert "own kernel" not in without["linear/1"]
    assert "oneDNN" in without["linear/1"] or "native: this wheel was built without its kernels" in without["linear/1"]
