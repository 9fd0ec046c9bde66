"""``serve`` as a process: its ready line, its errors, how it stops."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.unit.server.fakes import ROOT

CODE = """
import sys
from drivetrain.config import ServerConfig
from drivetrain.errors import DrivetrainError
from drivetrain.server import serve
from drivetrain.server.supervisor import Watch
from tests.unit.server.fakes import ByteText, spec

options = dict(one.split("=") for one in sys.argv[2:])
text = ByteText
serve.DRAIN_SECONDS = float(options.pop("drain", "30"))
watch = Watch(silent=float(options.pop("silent", "15")))
if options.pop("text", ""):
    def text(config):
        raise DrivetrainError("the tokenizer is no tokenizer")
try:
    code = serve.serve_spec(spec(**options), ServerConfig(port=int(sys.argv[1])), text, watch)
except DrivetrainError as error:
    print("error:", error)
    code = 2
assert "torch" not in sys.modules
sys.exit(code)
"""


READY = re.compile(r"ready: (http://127\.0\.0\.1:\d+)/v1 after [\d.]+ s \(float32, context 4096 tokens\)")


class Server:
    def __init__(self, *options: str, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, str(port), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        self.lines: list[str] = []

    def ready(self) -> str:
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.match(
                r"ready: (http://127\.0\.0\.1:\d+)/v1 after [\d.]+ s \(float32, context 4096 tokens\)", line
            )
            if found:
                threading.Thread(target=lambda: self.lines.extend(self.process.stdout)).start()
                return found[1]
        raise AssertionError("".join(self.lines))

    def end(self) -> tuple[int, str]:
        self.process.wait(60)
        time.sleep(0.05)
        return self.process.returncode, "".join([*self.lines, *self.process.stdout.readlines()])


@pytest.fixture
def start():
    made: list[Server] = []

    def make(*options: str, port: int = 0) -> Server:
        made.append(Server(*options, port=port))
        return made[-1]

    yield make
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()


def child_of(pid: int) -> int:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="utf-8") as file:
        return int(file.read().split()[0])


def gone(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_running_requests_end(start, number):
    server = start("step_seconds=0.005")
    url = server.ready()
    child = child_of(server.process.pid)
    answers: list[httpx.Response] = []
    body = {"prompt": "go", "max_tokens": 200}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=30)))
    thread.start()
    while "drivetrain_requests_running 1.0" not in httpx.get(f"{url}/metrics").text:
        pass
    server.process.send_signal(number)
    thread.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 200
    code, text = server.end()
    assert code == 0, text
    assert "finishing what runs" in text and "Traceback" not in text
    assert gone(child)


def test_the_second_signal_ends_at_once(start):
    server = start("step_seconds=0.01")
    url = server.ready()
    child = child_of(server.process.pid)

    def ask() -> None:
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{url}/v1/completions", json={"prompt": "go", "max_tokens": 4000}, timeout=60)

    thread = threading.Thread(target=ask)
    thread.start()
    while "drivetrain_requests_running 1.0" not in httpx.get(f"{url}/metrics").text:
        pass
    server.process.send_signal(signal.SIGTERM)
    while not any("finishing" in one for one in server.lines):
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    code, _ = server.end()
    thread.join()
    assert code == 128 + signal.SIGTERM
    assert gone(child)


def test_what_still_runs_when_the_time_is_up_is_told_so(start):
    server = start("step_seconds=0.02", "drain=1.0")
    url = server.ready()
    answers: list[httpx.Response] = []

    def ask(stream: bool) -> None:
        body = {"prompt": "go", "max_tokens": 4000, "stream": stream}
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    while "drivetrain_requests_running 2.0" not in httpx.get(f"{url}/metrics").text:
        pass
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    whole, stream = sorted(answers, key=lambda one: "event-stream" in one.headers["content-type"])
    assert whole.status_code == 503 and "the server is stopping" in whole.json()["error"]["message"]
    assert (
        stream.status_code == 200
        and "the server is stopping" in stream.text.split("data: ")[-1 - stream.text.count("[DONE]")]
    )
    code, text = server.end()
    assert code == 0 and "Traceback" not in text, text


def test_a_silent_loop_is_not_ready_and_becomes_so_again(start):
    server = start("silent=0.6")
    url = server.ready()
    child = child_of(server.process.pid)
    os.kill(child, signal.SIGSTOP)
    try:
        while (answer := httpx.get(f"{url}/ready")).status_code == 200:
            time.sleep(0.02)
        assert "has not answered" in answer.json()["error"]["message"]
        assert "drivetrain_ready 0.0" in httpx.get(f"{url}/metrics").text
        assert httpx.get(f"{url}/health").status_code == 200
    finally:
        os.kill(child, signal.SIGCONT)
    while httpx.get(f"{url}/ready").status_code != 200:
        time.sleep(0.02)
    server.process.terminate()
    assert server.end()[0] == 0


def test_health_answers_while_the_loop_is_built(start):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = start("open_seconds=1.5", port=port)
    statuses = set()
    while (503, "starting") not in statuses:
        assert server.process.poll() is None
        try:
            health, ready = (httpx.get(f"http://127.0.0.1:{port}/{one}") for one in ("health", "ready"))
            assert health.status_code == 200
            statuses.add((ready.status_code, "starting" if "starting" in ready.text else ""))
        except httpx.ConnectError:
            time.sleep(0.02)
    url = server.ready()
    assert httpx.get(f"{url}/ready").status_code == 200
    server.process.terminate()
    assert server.end()[0] == 0


def test_a_signal_while_the_loop_is_built_stops_it(start):
    server = start("open_seconds=60")
    while True:
        try:
            child = child_of(server.process.pid)
            break
        except (IndexError, FileNotFoundError):
            time.sleep(0.02)
    time.sleep(1.0)
    server.process.terminate()
    code, text = server.end()
    assert code in (0, -signal.SIGTERM), text
    assert gone(child)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("fail=model",), "error: the model is no model; name another"),
        (("fail=exit",), "error: the loop's process ended with status 7 before it was ready"),
        (("text=broken", "open_seconds=30"), "error: the tokenizer is no tokenizer"),
    ],
)
def test_what_cannot_be_served_ends_with_the_reason(start, options, why):
    code, text = start(*options).end()
    assert code == 2
    assert why in text and "Traceback" not in text


def test_a_port_in_use_is_told_before_anything_is_loaded(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, text = start("open_seconds=60", port=taken.getsockname()[1]).end()
    assert code == 2
    assert "--port" in text and "choose another port" in text
