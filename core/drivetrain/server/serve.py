"""``engine serve``: binds first, starts the loop's process, loads the tokenizer meanwhile, answers until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from functools import partial

import uvicorn

from drivetrain.config import EngineConfig, ServerConfig
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.models.sentence import read_sentence
from drivetrain.server.app import App, Door
from drivetrain.server.child import LoopSpec
from drivetrain.server.frontend import FrontEnd
from drivetrain.server.metrics import Metrics
from drivetrain.server.supervisor import Watch
from drivetrain.server.text import Text, TextPool
from drivetrain.tokens.text import load_text

DRAIN_SECONDS = 30  # for running requests once the server was told to stop; what is left is told so
SAY_SECONDS = 5  # for writing that
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections: theirs is the side that closes
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve_spec(
    spec: LoopSpec,
    server: ServerConfig,
    open_text: Callable[[EngineConfig], Text] = load_text,
    watch: Watch | None = None,
) -> int:
    """Serve the loop that ``spec`` describes with the tokenizer that ``open_text`` loads, until stopped. Returns 0
    then; raises DrivetrainError when the model can't be served at all.

    The first SIGINT, SIGTERM or SIGHUP stops accepting and lets running requests end; the second ends all at once.
    """
    begin = time.monotonic()
    logging.basicConfig(level=server.log_level.upper(), format="%(levelname)s: %(message)s", stream=sys.stderr)
    listener = bind(server.host, server.port)
    front = FrontEnd(spec, Metrics(), watch)
    pool = TextPool()
    engine = spec.config
    door = Door(
        model=engine.served_model_name or engine.model,
        api_key=server.api_key,
        max_queued_requests=server.max_queued_requests,
        sentence=partial(read_sentence, engine.model, engine.revision),
    )
    config = uvicorn.Config(
        App(front, pool, door),
        log_config=None,
        log_level="warning" if server.log_level == "info" else server.log_level,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS + SAY_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ws="none",
    )
    before = {one: signal.getsignal(one) for one in SIGNALS}
    try:
        front.supervisor.spawn()
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(Serving(front, pool, config, listener).run(partial(open_text, engine), begin))
    finally:
        for one, handler in before.items():  # closing the event loop has set what ends the process at once
            signal.signal(one, handler)
        front.supervisor.kill()
        pool.close()
        listener.close()
    return 0


class Http(uvicorn.Server):
    """The HTTP server, which leaves the signals to ``Serving``."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield


class Serving:
    """The life of one server on one event loop."""

    def __init__(self, front: FrontEnd, pool: TextPool, config: uvicorn.Config, listener: socket.socket) -> None:
        self._front = front
        self._pool = pool
        self._http = Http(config)
        self._listener = listener
        self._signals = 0

    async def run(self, open_text: Callable[[], Text], begin: float) -> None:
        """Answer from the start (/ready says 503), open when loop and tokenizer are there, stop when told."""
        self._catch_signals()
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        while not (self._http.started or http.done()):
            await asyncio.sleep(0.01)
        opening = asyncio.create_task(self._open(open_text))
        try:
            await asyncio.wait((http, opening), return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                opening.result()
                self._say_ready(begin)
                await http
        finally:
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError, DrivetrainError):
                await opening
            await self._front.close()
            self._http.should_exit = self._http.force_exit = True
            await http

    async def _open(self, open_text: Callable[[], Text]) -> None:
        """Load the tokenizer and build the loop at once; the first error of either ends both."""
        loading = asyncio.create_task(self._pool.run(open_text))
        starting = asyncio.create_task(self._front.supervisor.start())
        try:
            await asyncio.wait((loading, starting), return_when=asyncio.FIRST_EXCEPTION)
            for task in (starting, loading):
                if task.done():
                    task.result()
        except BaseException:
            loading.cancel()
            starting.cancel()
            await asyncio.gather(loading, starting, return_exceptions=True)
            raise
        self._front.text = loading.result()
        self._front.metrics.take_ready(starting.result())

    def _say_ready(self, begin: float) -> None:
        ready = self._front.model
        host, port = self._listener.getsockname()[:2]
        where = f"[{host}]" if ":" in host else host
        print(
            f"ready: http://{where}:{port}/v1 after {time.monotonic() - begin:.1f} s "
            f"({ready.dtype}, context {ready.max_model_len} tokens)",
            flush=True,
        )

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for one in SIGNALS:
            if signal.getsignal(one) is not signal.SIG_IGN:  # as nohup wants it of SIGHUP
                loop.add_signal_handler(one, self._signalled, one)

    def _signalled(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals > 1:
            self._front.supervisor.kill()
            os._exit(128 + number)
        print(f"{number.name}: finishing what runs; once more ends at once", file=sys.stderr, flush=True)
        self._http.should_exit = True
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._front.end_all)


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket. ConfigError when the address can't be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror or error}", fix="choose another port, or --port 0"
        ) from error
    listener.setblocking(False)
    return listener
