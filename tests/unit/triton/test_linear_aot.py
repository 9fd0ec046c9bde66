"""Linears of the table compiled for three generations without a device: no spills, legal shared memory, early loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHARED = {80: 166912, 90: 232448, 100: 232448}


def compiled(arch, directory, *more):
    environment = dict(os.environ, TRITON_CACHE_DIR=str(directory))
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.unit.triton.compiled_linear", str(arch), *more]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("arch", SHARED)
def test_norms_inside_products_compile_within_limits(arch, tmp_path):
    lines = compiled(arch, tmp_path, "normed")
    assert {line["kernel"] for line in lines} == {"normed_row_products"}
    for line in lines:
        assert line["stack"] == 0 and line["shared"] <= 32768 and line["wide"], line
        early = 0 < line["first_weight"] < line["wait"]
        assert early if arch >= 90 else line["wait"] == -1, line


@pytest.mark.parametrize("arch", SHARED)
def test_compiles_within_limits(arch, tmp_path):
    lines = compiled(arch, tmp_path)
    kernels = {"row_products", "stream_products" if arch == 90 else "fragment_products"}
    assert {line["kernel"] for line in lines} == kernels
    for line in lines:
        assert line["stack"] == 0 and line["shared"] <= SHARED[arch] and line["wide"], line
        # Weights are asked for before the kernels ahead have ended.
        early = 0 < line["first_weight"] < line["wait"]
        assert early if arch >= 90 else line["wait"] == -1, line
        assert line["wgmma"] == line["copies"] == (line["kernel"] == "stream_products"), line


def test_gated_products_of_many_rows_compile_within_limits(tmp_path):
    lines = compiled(90, tmp_path, "wide")
    assert [line["shape"][2] for line in lines] == ["silu", "gelu", "gelu_tanh"]
    for line in lines:
        assert line["stack"] == 0 and line["shared"] <= SHARED[90] and line["copies"], line
        assert 0 < line["first_weight"] < line["wait"], line
        # A step's products are waited for one step later: four products a step, by two groups of warps.
        assert line["products"] == 8 and line["waits"] == 4, line


def test_products_of_small_weights_compile_within_limits(tmp_path):
    lines = compiled(90, tmp_path, "panel")
    assert {line["kernel"] for line in lines} == {"panel_products"} and len({*map(str, lines)}) >= 16
    for line in lines:
        assert line["stack"] == 0 and line["registers"] <= 128 and line["shared"] <= SHARED[90], line
        assert line["copies"] and line["wgmma"] and 0 < line["first_weight"] < line["wait"], line
        # A step's products are waited for one step later, so that two steps are under way.
        assert line["products"] in (4, 8, 16) and line["waits"] == 2, line
