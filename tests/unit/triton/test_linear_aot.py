"""Linears of the table compiled for three generations without a device: no spills, legal shared memory, early loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHARED = {80: 166912, 90: 232448, 100: 232448}


@pytest.mark.parametrize("arch", SHARED)
def test_compiles_within_limits(arch, tmp_path):
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path))
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.unit.triton.compiled_linear", str(arch)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {"row_products", "fragment_products"} | ({"walk_products"} if arch < 100 else set())
    assert {line["kernel"] for line in lines} == kernels
    for line in lines:
        assert line["stack"] == 0 and line["shared"] <= SHARED[arch] and line["wide"], line
        # Weights are asked for before the kernels ahead have ended.
        early = 0 < line["first_weight"] < line["wait"]
        assert early if arch >= 90 else line["wait"] == -1, line
        assert line["wgmma"] == (arch == 90 and line["kernel"] == "walk_products"), line
        assert line["copies"] == (line["kernel"] == "walk_products"), line
