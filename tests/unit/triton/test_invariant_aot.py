"""Kernels of ``--deterministic`` compiled for three generations without a device: one matrix instruction for every
number of rows, no TF32, legal shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


def compiled(name, directory, *words):
    environment = dict(os.environ, TRITON_CACHE_DIR=str(directory))
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", f"tests.unit.triton.{name}", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(lines, arch):
    for line in lines:
        assert line["shared"] <= SHARED[arch] and line["waits"] is (arch >= 90) and not line["tf32"], line
        if line["dtype"].endswith("float32"):
            assert not line["instructions"], line


@pytest.mark.parametrize("arch", SHARED)
def test_linear(arch, tmp_path):
    lines = compiled("compiled_invariant", tmp_path, str(arch))
    check(lines, arch)
    assert {line["kernel"] for line in lines} == {"invariant_products", "add_shares"}
    for dtype in ("torch.bfloat16", "torch.float16"):
        products = [one for one in lines if one["dtype"] == dtype and one["kernel"] == "invariant_products"]
        assert len({tuple(one["instructions"]) for one in products}) == 1, products
        (only,) = products[0]["instructions"]
        wanted = {80: "mma.sync.aligned.m16n8k16", 90: "wgmma.mma_async.sync.aligned.m64n128k16", 100: "tcgen05.mma"}
        assert only.startswith(wanted[arch])
        assert all(one["stack"] == 0 and one["copies"] for one in products if one["even"]), products


@pytest.mark.parametrize(("arch", "size"), [(80, 128), (90, 64), (90, 128), (90, 256), (100, 128)])
def test_attention(arch, size, tmp_path):
    lines = compiled("compiled_invariant_attention", tmp_path, str(arch), str(size))
    check(lines, arch)
    assert ("join_kernel" in {line["kernel"] for line in lines}) is (size <= 128)
    products = [one for one in lines if one["dtype"] == "bfloat16" and one["kernel"] == "invariant_kernel"]
    assert len({tuple(one["instructions"]) for one in products}) == 1 and products[0]["instructions"], products
    # A few registers are spilled where sums of a range stand beside those of all.
    assert all(one["stack"] <= (64 if arch < 100 else 320) and one["copies"] for one in products), products
