"""A tokenizer of bytes, and a real HTTP server in this process over a fake loop in its own."""

from __future__ import annotations

import asyncio
import codecs
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import uvicorn

from drivetrain.config import EngineConfig
from drivetrain.server.app import App, Door
from drivetrain.server.child import LoopSpec
from drivetrain.server.frontend import FrontEnd
from drivetrain.server.metrics import Metrics
from drivetrain.server.supervisor import Watch
from drivetrain.server.text import TextPool
from drivetrain.tokens.stops import StopStrings

ROOT = Path(__file__).resolve().parents[3]
FACTORY = "tests.unit.server.fake_loop:open_loop"
QUICK = Watch(start=30.0, hang=1.5, backoff_first=0.05, backoff_max=0.2, tick=0.02, stop=5.0)


class ByteDetokenizer:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids) -> str:
        return self._utf8.decode(bytes(one for one in ids if one < 256))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class ByteText:
    """Token ids are bytes; 256 ends."""

    eos_ids = (256,)

    def __init__(self, has_template: bool = True) -> None:
        self.has_template = has_template

    def encode(self, text: str, special: bool) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def chat(self, messages, options) -> np.ndarray:
        assert options["add_generation_prompt"] is True
        return self.encode("\n".join(one["content"] for one in messages), True)

    def decode(self, ids) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if token < 256 else b""

    def detokenizer(self, prompt, *, skip_special: bool) -> ByteDetokenizer:
        return ByteDetokenizer()

    def stops(self, strings, *, include: bool) -> StopStrings:
        return StopStrings(strings, include=include)


def spec(**options: str) -> LoopSpec:
    config = EngineConfig(model="fake", backend_options=options)
    return LoopSpec(
        config=config,
        choice=None,
        factory=FACTORY,
        beat_seconds=0.05,
        extra_environment={"PYTHONPATH": str(ROOT)},
    )


class Running:
    """A server that answers at ``url``; ``call`` runs a coroutine function's result on its event loop."""

    def __init__(self, front: FrontEnd, app: App, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self.front, self.app, self.loop = front, app, loop
        self.url = f"http://127.0.0.1:{port}"
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(base_url=self.url, timeout=1800.0, verify=False, limits=limits)

    def client(self) -> httpx.Client:
        return self._client

    def metric(self, name: str) -> float:
        text = self.client().get("/metrics").text
        for line in text.splitlines():
            if line.startswith(f"drivetrain_{name} "):
                return float(line.rpartition(" ")[2])
        raise KeyError(f"{name} is not among\n{text}")

    def until(self, condition, seconds: float = 20.0) -> None:
        """Wait for a condition; a test fails by its absence, never by its lateness."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            time.sleep(0.02)

    def idle(self) -> bool:
        gauges = ("requests_waiting", "requests_running", "http_requests_held", "cache_use_ratio")
        return all(self.metric(one) == 0 for one in gauges) and self.front.num_held == 0


@contextmanager
def serving(
    loop_spec: LoopSpec | None = None, *, door: Door | None = None, text: ByteText | None = None, watch: Watch = QUICK
) -> Iterator[Running]:
    """Serve in a thread until the block ends; fails when the loop's process outlives it."""
    started: list[Running] = []
    failure: list[BaseException] = []
    ready, stop = threading.Event(), threading.Event()

    async def main() -> None:
        front, pool = FrontEnd(loop_spec or spec(), Metrics(), watch), TextPool()
        app = App(front, pool, door or Door(model="fake"))
        http = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", access_log=False, ws="none"))
        task = asyncio.create_task(http.serve())
        await front.supervisor.start()
        front.text = text or ByteText()
        while not http.started:
            await asyncio.sleep(0.01)
        port = http.servers[0].sockets[0].getsockname()[1]
        started.append(Running(front, app, asyncio.get_running_loop(), port))
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.02)
        await front.close()
        pool.close()
        http.should_exit = http.force_exit = True
        await task

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failure.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(watch.start + 60), "the server never started"
        if failure:
            raise failure[0]
        yield started[0]
    finally:
        stop.set()
        thread.join(30)
        for one in started:
            one.client().close()
    assert not thread.is_alive() and not failure, failure
