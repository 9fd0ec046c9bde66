"""The launcher: keys at least as fine as Triton's own, the same kernels launched, compilation without launches."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import triton
from triton import knobs
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from drivetrain_triton import launch, workers
from drivetrain_triton.launch import Kernel, KernelCompiler, compiling, kernel


def _add(x, out, alone, free, count, step, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK) * step + alone
    tl.store(out + place, tl.load(x + place, mask=place < count) * SCALE + free)


def _broken(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), nowhere)  # noqa: F821


FREE = {"do_not_specialize": ["free"], "do_not_specialize_on_alignment": ["out", "alone"]}


class Launches:
    """A driver without a device: compiles for real, notes launches."""

    def __init__(self) -> None:
        self.made: list[tuple] = []
        self.utils = SimpleNamespace(
            load_binary=lambda name, code, shared, device: (None, hash(code), 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232448},
        )

    def launcher_cls(self, source, metadata):
        return lambda *args: self.made.append(args)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device) -> int:
        return 77

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def taken(self) -> list[tuple]:
        """(grid, stream, function, packed metadata) and the kernel's arguments of each launch since the last call."""
        taken, self.made = [(args[:6], args[9:]) for args in self.made], []
        return taken


@pytest.fixture
def device(monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "_active", Launches())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return driver.active


def both() -> tuple[Kernel, JITFunction]:
    made, plain = kernel(triton.jit(**FREE)(_add)), triton.jit(**FREE)(_add)
    assert type(made) is Kernel and type(plain) is JITFunction
    return made, plain


def values() -> list:
    """Tensors at and off 16 bytes, of several dtypes, and all kinds of numbers."""
    room = torch.zeros(64)
    tensors = [room, room[1:], room[4:], room.to(torch.bfloat16), room.to(torch.bfloat16)[1:], room.to(torch.int64)]
    numbers = [0, 1, 2, 15, 16, -1, -16, 2**31 - 1, 2**31, 2**31 - 16, 2**40, 2**63, 1.0, 0.0, 16.0, True, False, None]
    return tensors + numbers


def test_no_key_stands_for_two_specialisations(device):
    made, plain = both()
    binder = plain.device_caches[0][4]
    found: dict[tuple, tuple] = {}
    settings = [{"SCALE": s, "BLOCK": b, **o} for s in (1, 2, 1.5) for b in (16, 32) for o in ({}, {"num_warps": 8})]
    usual = [torch.zeros(64), torch.zeros(64), 3, 4, 64, 1]
    changed = [(i, v) for i in range(len(usual)) for v in values()]
    for (i, one), (j, other) in itertools.product(changed, changed[::7]):
        args = list(usual)
        args[i], args[j] = one, other
        for options in settings[:: 1 + (i + j) % 5]:
            _, specialised, more = binder(*args, **options)
            known = found.setdefault(made.key(device, 0, tuple(args), options), (specialised, more))
            assert known == (specialised, more), f"{args} {options}"
    assert len(found) > 200


def test_later_launches_run_what_triton_would(device, monkeypatch):
    made, plain = both()
    x, far = torch.zeros(64), torch.zeros(64)[1:]
    cases = [(x, x, 3, 4, 64, 1), (x, x, 3, 1, 48, 2), (far, x, 3, 4, 64, 1), (x, far, 16, 4, 64, 16)]
    options = {"BLOCK": 16, "SCALE": 2, "num_warps": 4}
    for args in cases:
        plain[(3, 2)](*args, **options)
        made[(3, 2)](*args, **options)
    expected = device.taken()
    assert [launched[1] for launched in expected[::2]] == [(*args, 2, 16) for args in cases]
    assert expected[::2] == expected[1::2]
    assert len({one.compiled.hash for one in made._made.values()}) >= 3
    with monkeypatch.context() as patched:
        patched.setattr(JITFunction, "run", None)  # Triton's own way is not taken again
        for args in reversed(cases):
            made[(3, 2)](*args, **options)
        made[(5,)](x, x, 3, 999, 64, 1, **options)
    *again, last = device.taken()
    assert again == expected[::-2]
    assert last[0] == (5, 1, 1, *expected[0][0][3:]) and last[1] == (x, x, 3, 999, 64, 1, 2, 16)


def test_what_the_key_cannot_tell_goes_triton_s_own_way(device, monkeypatch):
    made, _ = both()
    x = torch.zeros(64)
    for _ in range(2):
        made[(1,)](x, x, 3, 4, count=64, step=1, SCALE=2, BLOCK=16)
        made[(1,)](x, x, 3, 4, 64, 1, 2, 16)
        made[lambda named: (named["BLOCK"],)](x, x, 3, 4, 64, 1, 2, BLOCK=16)
    assert [launched[0][0] for launched in device.taken()] == [1, 1, 16] * 2
    assert not made._made
    heard = []
    made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=16)
    assert made._made
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [heard.append])
    made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=16)
    assert device.made[-1][7] is knobs.runtime.launch_enter_hook


def test_compiling_launches_nothing_and_leaves_all_compiled(device, monkeypatch):
    made, _ = both()
    x = torch.zeros(64)
    with compiling(2):
        for block in (16, 32, 16):
            made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=block)
        shape = (7, 900)
        new = [torch.empty(shape), x.new_empty(shape), torch.empty_like(x), torch.empty_strided(shape, (900, 1))]
        new += [torch.empty(shape, dtype=torch.int32), x.new_empty_strided(shape, (900, 1))]
        assert not any(one.any() for one in new)
        assert torch.full(shape, 3).all()
    assert not device.made
    with monkeypatch.context() as patched:
        patched.setattr(JITFunction, "_do_compile", None)
        for block in (16, 32):
            made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=block)
    assert len(device.taken()) == 2


def test_many_are_compiled_by_processes_and_found_again(device, monkeypatch):
    made, _ = both()
    x = torch.zeros(64)
    given = []
    run_all = workers.run_all
    monkeypatch.setattr(workers, "run_all", lambda jobs, count: given.append(len(jobs)) or run_all(jobs, count))
    here, parent = [], os.getpid()
    monkeypatch.setattr(knobs.compilation, "listener", lambda cache_hit, **_: here.append(cache_hit))
    blocks = (16, 32, 64, 128, 256, 512)
    with compiling(2) as report:
        for block in blocks:
            made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=block)
    assert (report.built, report.found, report.place) == (6, 0, os.environ["TRITON_CACHE_DIR"])
    assert given == [6] and here == [True] * 6 and os.getpid() == parent, "only looked up here"
    with monkeypatch.context() as patched:
        patched.setattr(JITFunction, "_do_compile", None)
        for block in blocks:
            made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=block)
    assert len(device.taken()) == 6
    made, _ = both()
    with compiling(2) as report:
        for block in (*blocks, 1024):
            made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=block)
    assert (report.built, report.found) == (1, 6) and given == [6]


def test_a_fault_inside_is_told_at_once_and_compiles_nothing(device, monkeypatch):
    made, _ = both()
    x, compiled = torch.zeros(64), []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **_: compiled.append(1))
    with pytest.raises(LookupError, match="no memory"), compiling(2) as report:
        for block in (16, 32, 64):
            made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=block)
        raise LookupError("no memory")
    assert not compiled and (report.built, report.found) == (0, 0)
    made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=16)
    assert len(compiled) == len(device.taken()) == 1, "launches are launches again"


def test_a_compiler_of_threads_alone_forks_nothing(device, monkeypatch):
    made, _ = both()
    x = torch.zeros(64)
    monkeypatch.setattr(workers, "run_all", None)
    compiler = KernelCompiler(2, processes=False)
    for found in (0, 6):
        with compiler.compiling() as report:
            for block in (16, 32, 64, 128, 256, 512):
                made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=block)
        assert (report.built, report.found) == (6 - found, found)
        made, _ = both()


def test_what_takes_longest_is_begun_first(device, monkeypatch):
    monkeypatch.setattr(launch, "SLOW", ("_slow", "_add"))
    made = [kernel(triton.jit(**FREE)(one)) for one in (_add, _add)]
    made[1].__name__ = "_slow"
    order = []
    monkeypatch.setattr(workers, "run_all", lambda jobs, count: order.extend(job.__self__.name for job in jobs) or ())
    x = torch.zeros(64)
    with compiling(2):
        for place, block in enumerate((16, 32, 64, 128, 256, 512)):
            made[place % 2][(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=block)
    assert order == ["_slow"] * 3 + ["_add"] * 3


def test_what_a_process_can_not_compile_is_named(device):
    made, broken = both()[0], kernel(triton.jit(_broken))
    x = torch.zeros(64)
    with pytest.raises(RuntimeError, match=r"(?s)kernel _broken: .*nowhere"), compiling(2) as report:
        broken[(1,)](x, BLOCK=16)
        for block in (16, 32, 64, 128, 256):
            made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=block)
    assert report.built == 6


def test_jobs_that_fail_and_processes_that_end_or_hang_are_told_as_not_done(tmp_path):
    def job(place: int) -> None:
        if place == 1:
            raise ValueError("own")
        if place == 2:
            os._exit(3)
        if place == 3:
            time.sleep(60)
        (tmp_path / str(place)).touch()

    jobs = [partial(job, place) for place in range(8)]
    begin = time.monotonic()
    assert set(workers.run_all(jobs, 3, patience=2.0)) == {0, 4, 5, 6, 7}
    assert time.monotonic() - begin < 20
    assert {int(one.name) for one in tmp_path.iterdir()} == {0, 4, 5, 6, 7}
    assert not list(workers.run_all([partial(os._exit, 1)] * 3, 8))
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize("able", [0, 1])
def test_where_the_system_allows_few_processes_there_are_fewer(able, monkeypatch):
    plain, begun = os.fork, []

    def fork() -> int:
        if len(begun) >= able:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        pid = plain()
        begun.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", fork)
    assert list(workers.run_all([int] * 4, 3)) == ([0, 1, 2, 3] if able else [])


def test_compiling_imports_no_more_of_torch() -> None:
    """Torch's dispatch modes load its compiler at their first call: seconds of a start."""
    code = """if True:
        import sys, torch
        from drivetrain_triton.launch import Zeros
        with Zeros():
            assert not torch.empty(9).any()
        assert "torch._dynamo" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_kernel_that_does_not_compile_is_named(device):
    made, broken = both()[0], kernel(triton.jit(_broken))
    x = torch.zeros(64)
    with pytest.raises(RuntimeError, match=r"(?s)kernel _broken: .*nowhere"), compiling(1):
        broken[(1,)](x, BLOCK=16)
        made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=16)
    made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=16)
    assert len(device.taken()) == 1
    with pytest.raises(ValueError, match="own"), compiling(1):
        made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=32)
        raise ValueError("own")
    made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=32)
    assert len(device.taken()) == 1


def test_code_that_does_not_load_is_named(device):
    made, _ = both()
    device.utils.get_device_properties = lambda device: {"max_shared_mem": -1}
    shared_limit = triton.compiler.compiler.max_shared_mem
    shared_limit.cache_clear()
    x = torch.zeros(64)
    with pytest.raises(RuntimeError, match="kernel _add: OutOfResources"), compiling(1):
        made[(1,)](x, x, 3, 4, 64, 1, SCALE=2, BLOCK=16)
    shared_limit.cache_clear()


def test_a_kernel_of_another_language_keeps_its_compiler(device):
    plain = gluon.jit(_add)
    made = kernel(plain)
    assert isinstance(made, Kernel) and isinstance(made, type(plain)) and kernel(made) is made
    assert type(made) is type(kernel(gluon.jit(_broken)))
    _ = made.device_caches[0], plain.device_caches[0]
    assert made.ASTSource is plain.ASTSource and made.is_gluon()


def test_interpreted_functions_stay_what_they_are(monkeypatch):
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        plain = triton.jit(_add)
        assert kernel(plain) is plain
        with compiling():
            assert launch.COLLECTING.get() is None


def test_another_triton_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(launch, "ABLE", False)
    plain = triton.jit(_add)
    assert kernel(plain) is plain
    assert "_add" in caplog.text
    with compiling():
        assert launch.COLLECTING.get() is None
