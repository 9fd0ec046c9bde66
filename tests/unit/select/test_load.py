"""Whatever a vendor's hooks return or raise becomes one DeviceError that names the wheel, the hook and what came."""

import sys
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from drivetrain.errors import DeviceError
from drivetrain.select import choose as choosing
from drivetrain.select import probe as probing
from drivetrain.select.choose import Survey, choose
from drivetrain.select.entrypoints import BackendEntry, find_backend
from drivetrain.select.load import LoadedBackend
from drivetrain.select.probe import Ask, Probe, probe
from drivetrain_api.v1 import (
    BackendInfo,
    Capabilities,
    ComposedBackend,
    ConfigView,
    DeviceRecord,
    OptionSpec,
    ShapePolicy,
    Unavailable,
    generic_profiler,
    hookimpl,
    torch_runtime,
    torch_storage,
)

INFO = BackendInfo(name="zork", vendor="Zork", wheel="drivetrain-zork", api=">=0.1,<0.2", torch_device_type="cpu")
ONE = DeviceRecord(index=0, name="Zork One")
VIEW = ConfigView()


def good(**parts):
    runtime = torch_runtime("cpu")
    made = {"device": runtime, "storage": torch_storage(runtime), "memory": generic_profiler(runtime)}
    return ComposedBackend(**{"capabilities": Capabilities(), **made, **parts})


class Vendor:
    def __init__(self, **answers):
        self.answers = {"backend_info": INFO, "environment": {}, "probe": [ONE], "create": None, **answers}

    def answer(self, name):
        value = self.answers[name]
        if isinstance(value, BaseException):
            raise value
        return value() if callable(value) else value

    @hookimpl
    def backend_info(self):
        return self.answer("backend_info")

    @hookimpl
    def environment(self, devices, view):
        return self.answer("environment")

    @hookimpl
    def probe(self):
        return self.answer("probe")

    @hookimpl
    def create(self, devices, view):
        return self.answer("create")


def entry(vendor=None, **parts):
    point = SimpleNamespace(load=lambda: vendor)
    made = {"name": "zork", "wheel": "drivetrain-zork", "version": "1.2.3", "target": "drivetrain_zork:plugin"}
    return BackendEntry(**{**made, "requirement": "drivetrain-api<0.2,>=0.1", "point": point, **parts})


def load(**answers):
    return LoadedBackend(entry(Vendor(**answers)))


def refused(call):
    with pytest.raises(DeviceError) as caught:
        call()
    message = caught.value.message
    assert message.startswith("--device zork (drivetrain-zork 1.2.3): ") and message.count("--device") == 1
    return message


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (None, "backend_info returned None, expected BackendInfo"),
        ("x", "backend_info returned str 'x', expected BackendInfo"),
        (RuntimeError("boom"), "backend_info raised RuntimeError: boom"),
        (SystemExit(3), "backend_info raised SystemExit: 3"),
        (replace(INFO, vendor=5), "with a field of the wrong type"),
        (replace(INFO, name="other"), "its name is str 'other', expected the entry point's zork"),
        (replace(INFO, wheel="drivetrain-other"), "its wheel is str 'drivetrain-other', expected drivetrain-zork"),
        (replace(INFO, api=">=7"), "drivetrain-api str '>=7', expected <0.2,>=0.1"),
        (replace(INFO, api="yes"), "drivetrain-api str 'yes', expected"),
        (replace(INFO, options=(OptionSpec(key="a", kind="int", help="", default="x"),)), "the default str 'x'"),
        (replace(INFO, options=2 * (OptionSpec(key="a", kind="int", help=""),)), "the option a twice"),
    ],
)
def test_backend_info(info, expected):
    assert expected in refused(lambda: load(backend_info=info))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (5, "environment returned int 5, expected a mapping"),
        ({"A": 5}, "environment returned A = int 5, expected text"),
        ({5: "a"}, "a variable named int 5"),
        ({"A=B": "a"}, "a variable named str 'A=B'"),
        (RuntimeError("boom"), "environment raised RuntimeError: boom"),
    ],
)
def test_environment(answer, expected):
    assert expected in refused(lambda: load(environment=answer).environment((0,), VIEW))


def test_environment_of_nothing():
    assert load(environment=None).environment((0,), VIEW) == {}
    assert load(environment={"A": "1"}).environment((0,), VIEW) == {"A": "1"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (["x"], "a sequence with str 'x', expected DeviceRecord"),
        ("none", "probe returned str 'none', expected a sequence of DeviceRecord, or Unavailable"),
        (5, "probe returned int 5"),
        ([ONE, ONE], "two devices of index 0"),
        ([replace(ONE, index=-1)], "a device of index -1"),
        ([replace(ONE, index="0")], "with a field of the wrong type"),
        ([replace(ONE, memory_bytes="much")], "with a field of the wrong type"),
    ],
)
def test_probe(answer, expected):
    assert expected in refused(lambda: load(probe=answer).probe())


@dataclass
class Half:
    capabilities: object = Capabilities()
    device: object = None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (None, "create returned None, expected a Backend: it has no capabilities, shapes, device"),
        (Half, "create returned Half"),
        (lambda: torch_runtime("nosuch"), "create raised"),
        (SystemExit(5), "create raised SystemExit: 5"),
        (lambda: good(device=None), "the backend's device is None, expected a DeviceRuntime: it has no device"),
        (lambda: good(storage=5), "the backend's storage is int 5, expected a Storage"),
        (lambda: good(device=torch_runtime("cuda", 99)), "create"),
        (lambda: good(graphs=5), "the backend's graphs is int 5, expected a Graphs"),
        (lambda: good(provide=None), "the backend's provide is None, expected a callable"),
        (lambda: good(capabilities=None), "capabilities is None, expected Capabilities"),
        (lambda: good(capabilities=Capabilities(model_dtypes=("float99",))), "model_dtypes has str 'float99'"),
        (lambda: good(capabilities=Capabilities(model_dtypes=())), "model_dtypes is tuple ()"),
        (lambda: good(capabilities=Capabilities(cache_dtypes=(5,))), "cache_dtypes has int 5"),
        (lambda: good(capabilities=Capabilities(activation_dtypes={"float32": "f"})), "activation_dtypes has str 'f'"),
        (lambda: good(capabilities=Capabilities(default_depth=0)), "default_depth is int 0, expected a number of 1"),
        (lambda: good(shapes=ShapePolicy(tokens=(8, 4))), "shapes.tokens is tuple (8, 4), expected ascending"),
        (lambda: good(shapes=ShapePolicy(rows=("a",))), "shapes.rows is tuple ('a',)"),
    ],
)
def test_create(make, expected):
    assert expected in refused(lambda: load(create=make).create((0,), VIEW))


def test_a_good_backend_comes_back_itself():
    backend = good()
    assert load(create=lambda: backend).create((0,), VIEW) is backend


def test_a_backend_that_can_not_open_says_so_in_its_own_words():
    with pytest.raises(DeviceError) as caught:
        load(create=Unavailable(reason="torch is too old", fix="install a newer torch")).create((0,), VIEW)
    assert caught.value.message.endswith(": torch is too old") and caught.value.fix == "install a newer torch"
    assert "create returned" in refused(lambda: load(create=Unavailable(reason=5, fix="")).create((0,), VIEW))


def test_names_that_differ_in_case_or_a_little():
    entries = (entry(), entry(name="cpu", wheel="drivetrain-cpu"))
    for asked, near in (("CPU", "cpu"), ("Zorc", "zork")):
        with pytest.raises(DeviceError) as caught:
            find_backend(asked, entries)
        assert caught.value.fix == f"did you mean --device {near}?"


def surveyed(name, outcome="usable", emulated=False):
    info = replace(INFO, name=name, emulated=emulated)
    found = Probe(outcome=outcome, info=info, devices=(ONE,) if outcome == "usable" else (), reason="no", fix="do")
    return Survey(entry=entry(name=name), probe=found)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([surveyed("cpu"), surveyed("sham", emulated=True), surveyed("sham2", emulated=True)], "cpu"),
        ([surveyed("cpu"), surveyed("real"), surveyed("sham", emulated=True)], "real"),
        ([surveyed("cpu"), surveyed("sham", "raised", emulated=True)], "cpu"),
        ([surveyed("cpu"), surveyed("real", "raised"), surveyed("sham", emulated=True)], "installed but unusable"),
        ([surveyed("cpu"), surveyed("one"), surveyed("two")], "2 accelerators are usable"),
        ([surveyed("sham", emulated=True)], "only emulated devices are installed: sham"),
        ([], "no backend wheel is installed"),
    ],
)
def test_auto(monkeypatch, found, expected):
    monkeypatch.setattr(choosing, "survey", lambda timeout: tuple(found))
    try:
        told = choose("auto", {}).name
    except DeviceError as error:
        told = error.message
    assert expected in told


# The probe's child, with a body in place of the vendor's hook.
CHILD = """
import os, sys, time
from drivetrain.select import probe
from drivetrain.select.probe import Probe, _write
from drivetrain_api.v1.hooks import BackendInfo, DeviceRecord
def answer(name, ask, telling):
{body}
    return Probe(outcome="usable", devices=(DeviceRecord(index=0, name="one"),))
probe._answer = answer
_write("zork", int(sys.argv[-2]), int(sys.argv[-1]))
"""


def probed(monkeypatch, body, timeout=10.0, **ahead):
    real = probing.subprocess.Popen
    text = CHILD.replace("{body}", "\n".join("    " + line for line in body.splitlines()))

    def start(words, **how):
        return real([sys.executable, "-c", text, *words[-2:]], **how)

    monkeypatch.setattr(probing.subprocess, "Popen", start)
    return probe(entry(), timeout, **ahead)


def ends(pid):
    """A kill takes effect a moment later."""
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_probe_leaves_behind_is_not_waited_for(monkeypatch, tmp_path):
    note = tmp_path / "pid"
    body = f"pid = os.fork()\nif not pid: time.sleep(60)\nopen({str(note)!r}, 'w').write(str(pid))"
    assert probed(monkeypatch, body).outcome == "usable"
    assert ends(int(note.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_limit_ends_the_probe_and_its_children(monkeypatch, tmp_path):
    note = tmp_path / "pid"
    body = f"pid = os.fork()\nif pid: open({str(note)!r}, 'w').write(str(pid))\ntime.sleep(60)"
    found = probed(monkeypatch, body, timeout=3.0)
    assert found.outcome == "hung" and "within 3 s" in found.reason
    assert ends(int(note.read_text()))


ASKED = {"view": ConfigView(max_model_len=77), "devices": (3,), "given": {"a": "b"}}
TOLD = [
    ('os.write(telling, b\'{"A": "1"}\\n\'); time.sleep(0.5)', {"A": "1"}),
    ("os.write(telling, b'{\"A\"'); time.sleep(0.3); os.write(telling, b': \"1\"}\\n')", {"A": "1"}),
    (
        "import json; assert ask.view.max_model_len == 77\n"
        "said = {str(ask.devices): ask.given['a']}; os.write(telling, json.dumps(said).encode() + b'\\n')",
        {"(3,)": "b"},
    ),
    ("os.close(telling)", None),
    ("", None),
    ("os.write(telling, b'nonsense\\n')", None),
    ("pid = os.fork()\nif not pid: time.sleep(60)", None),
]


@pytest.mark.parametrize(("body", "expected"), TOLD)
def test_variables_are_told_before_the_probe_ends(monkeypatch, body, expected):
    heard = []
    begin = time.monotonic()
    found = probed(monkeypatch, body, ask=Ask(**ASKED), told=lambda wanted: heard.append((wanted, time.monotonic())))
    assert found.outcome == "usable" and [wanted for wanted, _ in heard] == ([] if expected is None else [expected])
    assert time.monotonic() - begin < 8
    if body.endswith("sleep(0.5)"):
        assert time.monotonic() - heard[0][1] > 0.4


@pytest.mark.parametrize(("end", "expected"), [("os._exit(7)", "exit status 7"), ("time.sleep(60)", "within 2 s")])
def test_a_probe_that_ends_badly_after_it_told_is_reported_as_ever(monkeypatch, end, expected):
    heard = []
    body = "os.write(telling, b'{}\\n'); " + end
    assert expected in probed(monkeypatch, body, 2.0, ask=Ask(**ASKED), told=heard.append).reason
    assert heard == [{}]


def test_what_a_probe_leaves_to_the_end_of_its_process_is_not_run(monkeypatch):
    assert probed(monkeypatch, "import atexit; atexit.register(os._exit, 5)").outcome == "usable"


def test_a_forked_child_that_answers_too_is_not_heard(monkeypatch):
    assert probed(monkeypatch, "os.fork()").outcome == "usable"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("os._exit(0)", "exit status 0 and no answer"),
        ("sys.exit('gone')", "exit status 1: gone"),
        ("os.write(int(sys.argv[-1]), b'rubbish'); os._exit(0)", "exit status 0 and no answer"),
        ("os.kill(os.getpid(), 11)", "signal 11"),
    ],
)
def test_a_probe_that_ends_without_an_answer(monkeypatch, body, expected):
    found = probed(monkeypatch, body)
    assert found.outcome == "crashed" and expected in found.reason
