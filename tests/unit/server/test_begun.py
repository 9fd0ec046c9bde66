"""A loop's process, and torch in this one, that start while the device is still being probed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from drivetrain import ahead
from drivetrain.ahead import LoadAhead, resolve_and_begin, resolve_and_load
from drivetrain.config import EngineConfig
from drivetrain.errors import DeviceError, DrivetrainError
from drivetrain.select.choose import choose
from drivetrain.server import child as children
from drivetrain.server.child import LoopChild, child_environment
from drivetrain_api.v1 import ConfigView

CONFIG = EngineConfig(model="/no/such/model", device="cpu")


@pytest.fixture
def started(monkeypatch):
    """(modules, process) of each loop's process that is started."""
    found = []
    start = children.start_process

    def note(url, values, modules=()):
        found.append((modules, start(url, values, modules)))
        return found[-1][1]

    monkeypatch.setattr(children, "start_process", note)
    yield found
    for _, process in found:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def test_the_process_that_was_begun_becomes_the_loop(started):
    spec = resolve_and_begin(CONFIG)
    assert spec.choice is not None and spec.choice.name == "cpu"
    assert [modules for modules, _ in started] == [ahead.MODULES]
    first, second = LoopChild(spec), LoopChild(spec)
    try:
        assert first.pid == started[0][1].pid and len(started) == 2 and second.pid != first.pid
        spec.drop()
        for one in (first, second):
            with pytest.raises(DrivetrainError, match="/no/such/model"):
                one.wait_ready(60)
    finally:
        first.kill()
        second.kill()


def test_one_that_would_start_otherwise_is_not_taken(started):
    spec = resolve_and_begin(CONFIG)
    assert spec.begun is not None and spec.begun.take(child_environment(spec) | {"OTHER": "1"}) is None
    assert started[0][1].poll() is not None, "ended"
    spec = resolve_and_begin(CONFIG)
    started[1][1].kill()
    started[1][1].wait()
    child = LoopChild(spec)
    assert child.pid == started[2][1].pid
    child.kill()


def test_a_process_nobody_takes_ends(started):
    spec = resolve_and_begin(CONFIG)
    assert started[0][1].poll() is None
    spec.drop()
    assert started[0][1].poll() is not None
    with pytest.raises(DeviceError, match="no device 7"):
        resolve_and_begin(replace(CONFIG, device="cpu:7"))
    assert len(started) == 2 and started[1][1].poll() is not None


def test_a_clash_is_told_once_and_nothing_begins(started, monkeypatch):
    monkeypatch.setattr(ahead, "resolve_device", lambda config, told: told({"HOME": "elsewhere"}))
    assert resolve_and_begin(CONFIG).begun is None and not started


def test_torch_loads_while_the_device_is_probed():
    code = """if True:
        import sys
        from drivetrain import ahead, launch
        from drivetrain.config import EngineConfig
        real, seen = launch.choose, []
        def choose(*given, told, **how):
            def hear(wanted):
                assert "torch" not in sys.modules
                told({**wanted, "EARLY": "1"})
                seen.append([one for one in __import__("threading").enumerate() if one.name == "load ahead"])
            return real(*given, told=hear, **how)
        launch.choose = choose
        choice = ahead.resolve_and_load(EngineConfig(model="none", device="cpu"))
        import os
        assert choice.name == "cpu" and len(seen[0]) == 1 and os.environ["EARLY"] == "1"
        seen[0][0].join()
        assert "torch" in sys.modules and "drivetrain.starting" in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_loads_before_the_variables_are_told_is_there_and_loads_no_torch():
    code = """if True:
        import sys
        from importlib.util import find_spec
        from drivetrain import ahead
        assert all(find_spec(name) for name in ahead.EARLY)
        ahead.load(ahead.EARLY).join()
        assert set(ahead.EARLY) <= set(sys.modules) and "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_parent_of_a_process_does_not_load_torch():
    code = """if True:
        import sys
        from drivetrain.ahead import resolve_and_begin
        from drivetrain.config import EngineConfig
        spec = resolve_and_begin(EngineConfig(model="none", device="cpu"))
        assert spec.begun is not None and "torch" not in sys.modules
        spec.drop()
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_another_device_than_told_for_takes_its_variables_back(monkeypatch):
    choice = choose("cpu", {})
    monkeypatch.setattr(ahead, "load", lambda: ahead.Thread(target=int))
    monkeypatch.setattr(ahead.Thread, "join", lambda thread: None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(ahead, "prepare_environment", lambda choice, view, apply: {"EARLY": str(choice.devices[0])})
    for device, picked, left in (("cpu", 0, "0"), ("cpu", 2, None), ("cpu:2", 2, "0")):
        monkeypatch.delenv("EARLY", raising=False)
        early = LoadAhead(device)
        early.begin({"EARLY": "0"})
        assert os.environ["EARLY"] == "0"
        early.settle(replace(choice, devices=(picked,)), ConfigView())
        assert os.environ.pop("EARLY", None) == left


def test_nothing_is_done_ahead_where_torch_is_loaded():
    assert "torch" in sys.modules or __import__("torch")
    before = dict(os.environ)
    assert resolve_and_load(CONFIG).name == "cpu"
    assert dict(os.environ) == before
