"""A start that is ended, or that can't begin: nothing is left running, no directory stays, and the reason is told."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from drivetrain.config import EngineConfig, note_environment, set_environment, unset_environment, was_given
from drivetrain.errors import DeviceError
from drivetrain.select import probe as probing
from drivetrain.select.entrypoints import find_backend, list_backends
from drivetrain.select.environment import check_environment
from drivetrain.server import child as children
from drivetrain.server.child import Begun, LoopChild, LoopSpec
from drivetrain.server.messages import PROTOCOL, Hello
from tests.unit.server.fakes import ROOT

PLUGIN = """
import os, time
from drivetrain_api.v1 import BackendInfo, hookimpl
class Plugin:
    @hookimpl
    def backend_info(self):
        return BackendInfo(name="stuck", vendor="x", wheel="drivetrain-stuck 0.1.0", api=">=0.1,<0.2",
                           torch_device_type="cpu", options=(), proof="measured")
    @hookimpl
    def environment(self, devices, view):
        return {}
    @hookimpl
    def probe(self):
        child = os.fork()
        if child:
            with open(os.environ["NOTE"] + ".part", "w") as file:
                file.write(f"{os.getppid()} {os.getpid()} {child}")
            os.rename(os.environ["NOTE"] + ".part", os.environ["NOTE"])
        time.sleep(60)
    @hookimpl
    def create(self, devices, view): ...
plugin = Plugin()
"""
METADATA = "Metadata-Version: 2.1\nName: drivetrain-stuck\nVersion: 0.1.0\nRequires-Dist: drivetrain-api<0.2,>=0.1\n"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def heard() -> None:
    """The command hears of SIGHUP even where these tests run under nohup, which commands go by."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@linux
@pytest.mark.parametrize(
    ("command", "number"),
    [("serve", signal.SIGTERM), ("generate", signal.SIGHUP), ("generate", signal.SIGKILL)],
)
def test_a_signal_while_the_device_is_probed_leaves_nothing(tmp_path, command, number):
    info, note, sockets = tmp_path / "w/drivetrain_stuck-0.1.0.dist-info", tmp_path / "note", tmp_path / "t"
    info.mkdir(parents=True)
    sockets.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text("[drivetrain.backends]\nstuck = stuck_plugin:plugin\n")
    (tmp_path / "w/stuck_plugin.py").write_text(PLUGIN)
    words = ["--prompt", "a"] if command == "generate" else ["--port", "0"]
    path = os.pathsep.join((str(tmp_path / "w"), os.environ.get("PYTHONPATH", "")))
    engine = subprocess.Popen(
        [sys.executable, "-m", "drivetrain", command, "none", "--device", "stuck", *words],
        env={**os.environ, "PYTHONPATH": path, "NOTE": str(note), "TMPDIR": str(sockets)},
        stderr=subprocess.PIPE,
        preexec_fn=heard,
    )
    begun = Path(f"/proc/{engine.pid}/task/{engine.pid}/children")
    try:
        assert wait_until(note.exists)
        assert wait_until(lambda: len(begun.read_text().split()) == 2), "the probe's and the loop's"
        others = {int(one) for one in note.read_text().split() + begun.read_text().split()} - {engine.pid}
        assert len(others) == 3 and all(runs(one) for one in others)
        engine.send_signal(number)
        assert engine.wait(20) == (-number if number == signal.SIGKILL else 128 + number)
        assert wait_until(lambda: not any(runs(one) for one in others))
        assert number == signal.SIGKILL or not list(sockets.iterdir())
        assert b"Traceback" not in engine.stderr.read()
    finally:
        engine.kill()
        engine.wait()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("from drivetrain.server.loop_process import end_without; end_without(-1)", 1),
        ("from drivetrain.select.probe import _live_for; _live_for(os.getppid(), 0.1)", -signal.SIGALRM),
        ("from drivetrain.select.probe import _live_for; os.setsid(); _live_for(-1, 60)", -signal.SIGKILL),
    ],
)
def test_a_child_that_hangs_ends_itself(code, status):
    words = [sys.executable, "-c", f"import os, time; {code}; time.sleep(30)"]
    done = subprocess.run(words, stderr=subprocess.PIPE)
    assert done.returncode == status and not done.stderr


INTERRUPTED = """
import asyncio, os, signal, sys, uvicorn
import drivetrain.cli.serve as command
from drivetrain.cli.main import main
from drivetrain.config import ServerConfig
from drivetrain.server import serve
from tests.unit.server.fakes import ByteText, spec

class Early(asyncio.Runner):
    def run(self, work):
        work.close()
        os.kill(os.getpid(), signal.SIGINT)
        return super().run(asyncio.sleep(9))

async def startup(self, sockets=None):
    os.kill(os.getpid(), signal.SIGINT)
    await real(self, sockets=sockets)

if sys.argv[1] == "runner":
    asyncio.Runner = Early
real, uvicorn.Server.startup = uvicorn.Server.startup, startup
command.run = lambda arguments: serve.serve_spec(spec(), ServerConfig(port=0), ByteText)
sys.exit(main(["serve", "m"]))
"""


@pytest.mark.parametrize(("where", "status", "said"), [("runner", 130, "engine serve: interrupted"), ("http", 0, "")])
def test_an_interrupt_before_the_server_is_up_prints_no_traceback(where, status, said):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, where], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status and said in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("number", [errno.E2BIG, errno.EAGAIN])
def test_a_process_that_can_not_be_started_is_told_in_two_lines(monkeypatch, tmp_path, number):
    def refuse(*given, **how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MINE", "x" * 200_000)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    spec = LoopSpec(config=EngineConfig(model="m"), choice=None)
    for start in (lambda: Begun({"WANTED": "x" * 300_000}), lambda: LoopChild(spec)):
        with pytest.raises(DeviceError, match="the loop's process can't be started") as told:
            start()
        assert os.strerror(number) in told.value.message and told.value.fix
        if number == errno.E2BIG:
            assert ("unset MINE" in told.value.fix) or ("wheel" in told.value.fix and "WANTED" in told.value.message)
    with pytest.raises(DeviceError, match="its probe can't be started"):
        probing.probe(find_backend("cpu", list_backends()))
    assert not list(tmp_path.iterdir())


def test_an_interrupt_is_not_for_a_process_that_has_just_started(capfd):
    meeting = children.Meeting()
    channel = meeting.bind()
    process = children.start_process(meeting.url, os.environ)
    try:
        for _ in range(5):
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        assert isinstance(channel.receive(20), Hello) and process.poll() is None
        assert not capfd.readouterr().err
    finally:
        children.end_process(meeting, channel, process)


def test_a_variable_that_a_backend_got_is_not_the_users(monkeypatch):
    monkeypatch.setenv("USERS", "1")
    with pytest.raises(DeviceError) as told:
        check_environment({"USERS": "2"}, "drivetrain-odd 1.0")
    assert told.value.fix == "unset USERS or set it to 2"
    for set_it in (set_environment, lambda values: (monkeypatch.setenv("ODD", "1"), note_environment(values))):
        set_it({"ODD": "1"})
        with pytest.raises(DeviceError, match=r"drivetrain-odd 1.0 asks for ODD=2, but ODD=1") as told:
            check_environment({"ODD": "2"}, "drivetrain-odd 1.0")
        assert "vendor" in told.value.fix and "unset" not in told.value.fix
        unset_environment(["ODD"])
        monkeypatch.setenv("ODD", "1")
        assert not was_given("ODD")
        unset_environment(["ODD"])


def test_a_loop_is_told_which_variables_were_set_for_it(monkeypatch):
    class Sent(list):
        send = list.append

    sent = Sent()
    monkeypatch.setattr(children, "open_process", lambda values: (None, sent, None))
    child = LoopChild(LoopSpec(config=EngineConfig(model="m"), choice=None, extra_environment={"ODD": "1"}))
    child.greet(Hello(PROTOCOL, 1))
    assert sent[0].given["ODD"] == "1" and "PATH" not in sent[0].given
