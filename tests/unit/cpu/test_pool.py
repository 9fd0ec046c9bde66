"""The kernels' threads: callers at once, forked children, threads refused, one busy core; and the sanitizers' view."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from drivetrain.ops.cases.source import Source
from drivetrain_cpu.native import usable_kernels
from tests.unit.cpu.builds import DRIVER, build, needs_sanitizer, python

KERNELS, WHY = usable_kernels()
if KERNELS is None:
    pytest.skip(WHY, allow_module_level=True)

BEGIN = """
import os, resource, sys, torch
from drivetrain_cpu.native import load_kernels
kernels = load_kernels()
torch.manual_seed(3)
x, weight = torch.randn(9, 640), torch.randn(2000, 640).to(torch.bfloat16)
want = kernels.linear(x, weight, 0, 1)
"""
FORK = """
assert torch.equal(kernels.linear(x, weight, 0, 4), want)
child = os.fork()
if not child:
    right = all(torch.equal(kernels.linear(x, weight, 0, 4), want) for _ in range(50))
    os._exit(0 if right and len(os.listdir("/proc/self/task")) == 4 else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(kernels.linear(x, weight, 0, 4), want)
"""
REFUSED = """
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (12 << 20), -1))  # room for a stack or two
assert torch.equal(kernels.linear(x, weight, 0, 60), want)
assert len(os.listdir("/proc/self/task")) < 20
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert torch.equal(kernels.linear(x, weight, 0, 60), want)
assert len(os.listdir("/proc/self/task")) >= 60
"""
ONE_CORE = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
assert all(torch.equal(kernels.linear(x, weight, 0, 8), want) for _ in range(300))
small = torch.randn(4, 64).to(torch.bfloat16)
for rows in range(3000):
    kernels.linear(x[: rows % 9 + 1, :64].contiguous(), small, 0, 8)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("code", [FORK, REFUSED, ONE_CORE], ids=["fork", "threads refused", "one core"])
def test_results_are_right(code):
    done = python(BEGIN + code)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def test_two_callers_at_once():
    source, failures = Source("float32", 2), []
    work = [
        (source.normal(rows, 300), source.normal(outs, 300).to(torch.bfloat16)) for rows, outs in ((3, 900), (8, 70))
    ]

    def call(x, weight, want):
        for turn in range(400):
            if not torch.equal(KERNELS.linear(x, weight, 0, 2 + turn % 4), want):
                failures.append(turn)

    wanted = [KERNELS.linear(x, weight, 0, 1) for x, weight in work]
    callers = [threading.Thread(target=call, args=(*pair, want)) for pair, want in zip(work, wanted, strict=True)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


def drive(program, *modes):
    done = subprocess.run([str(program), *modes], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, (done.returncode, done.stdout + done.stderr)


def test_every_chunk_is_done_once(tmp_path):
    """Thousands of tiny jobs of random lengths, from one caller, from four, and in forked children."""
    drive(build(tmp_path / "driver", "-O1", str(DRIVER)), "jobs", "helped", "callers", "forks", "kernels")


@pytest.mark.slow
def test_threads_never_race(tmp_path):
    needs_sanitizer("thread", tmp_path)
    program = build(tmp_path / "driver", "-O1", "-g", "-fsanitize=thread", str(DRIVER))
    drive(program, "kernels", "jobs", "callers", "helped")


@pytest.mark.slow
def test_no_address_and_no_number_is_out_of_bounds(tmp_path):
    needs_sanitizer("address,undefined", tmp_path)
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    drive(build(tmp_path / "driver", "-O1", "-g", *flags, str(DRIVER)), "kernels", "jobs", "callers", "helped")
