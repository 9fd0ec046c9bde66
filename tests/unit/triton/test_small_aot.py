"""The small kernels compile for each generation and spill nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("small_aot.py")
MOST_REGISTERS = 128


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_and_do_not_spill(arch, tmp_path):
    """In a process of its own: here the kernels may have been imported for the interpreter."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(arch)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) >= 19
    for kernel in kernels:
        assert kernel["STACK"] == kernel["LOCAL"] == 0, kernel
        assert 0 < kernel["REG"] <= MOST_REGISTERS, kernel
