"""The HTTP server on an accelerator against the offline engine: many streams at once, each 512 -> 256 tokens.

    python ci/perf/device_serve.py [--device cuda] [--model A] [--offline TOKENS_PER_S] [--json FILE] [--scale tiny]

``engine serve`` runs with random weights and a made-up tokenizer of the model's vocabulary, so that detokenizing costs
what it always costs. Clients are processes of their own: they post token ids to /v1/completions, one connection a
stream, and count the tokens of the streamed answers. Output tokens a second from the first request to the last answer;
one pass warms up, the median of the others counts. Without ``--offline`` the offline engine is measured first, in the
same run, with the same load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from device_engine import brief, measured_rates
from device_models import TITLES, config_of, write_model
from device_rates import commit_of

READY_SECONDS = 300.0
LOADS = {"full": (256, 512, 256), "tiny": (6, 24, 8)}  # streams, prompt tokens, new tokens


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """Flags of ``engine serve``, the offline engine's settings too."""
    return {
        "device": args.device,
        "dtype": "bfloat16",
        "load-format": "dummy",
        "max-model-len": "512" if args.scale == "tiny" else "8192",
        "max-num-seqs": str(args.max_num_seqs),
        "max-num-batched-tokens": str(args.max_num_batched_tokens),
    }


class Server:
    """``engine serve`` in a process. ``seconds``: until it was ready."""

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        flags = [text for name, value in settings_of(args).items() for text in (f"--{name}", value)]
        flags += ["--no-enable-prefix-caching", "--port", str(self.port), "--served-model-name", "measured"]
        flags += [text for one in args.backend_option for text in ("--backend-option", one)]
        begin = time.perf_counter()
        command = [sys.executable, "-m", "drivetrain", "serve", str(model), *flags]
        self._process = subprocess.Popen(command, stdout=sys.stderr)
        try:
            self._wait(begin + READY_SECONDS)
        except BaseException:
            self.close()
            raise
        self.seconds = time.perf_counter() - begin

    def _wait(self, until: float) -> None:
        while time.perf_counter() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=2):
                    return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("the server is not ready")

    def busy_seconds(self) -> float:
        """Processor time of the process that speaks HTTP, without the loop's."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        """Tell it to stop, and wait."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def request_of(prompt: list[int], new: int) -> bytes:
    """One request, head and body; its answer ends with the number of tokens."""
    body = {
        "model": "measured",
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def stream(port: int, request: bytes, new: int) -> tuple[float, float]:
    """Send a request and read its stream; returns the times of its first chunk and its end. RuntimeError when
    the answer is not what was asked for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(request)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r}: {(await reader.read(4000))[-500:]!r}")
    first, tail = 0.0, b""
    while data := await reader.read(1 << 16):
        if not first and b"data:" in data:
            first = time.time()
        tail = (tail + data)[-4096:]
    writer.close()
    if b"[DONE]" not in tail or f'"completion_tokens":{new}'.encode() not in tail.replace(b" ", b""):
        raise RuntimeError(f"a stream ended with {tail[-500:]!r}")
    return first, time.time()


def client(port: int, prompts: list[list[int]], new: int, begin: Any, answers: Any) -> None:
    """A process of clients: waits for the start, runs its streams together, says when tokens came."""
    requests = [request_of(prompt, new) for prompt in prompts]

    async def all_streams() -> list[tuple[float, float]]:
        return await asyncio.gather(*(stream(port, one, new) for one in requests))

    begin.wait()
    started = time.time()
    try:
        answers.put((started, asyncio.run(all_streams()), ""))
    except Exception as error:
        answers.put((started, [], f"{type(error).__name__}: {error}"))


def one_pass(port: int, load: tuple[int, int, int], vocabulary: int, seed: int, processes: int) -> dict[str, float]:
    """Run all streams once from ``processes`` processes; returns rates and times."""
    count, tokens, new = load
    prompts = np.random.default_rng(seed).integers(0, vocabulary, (count, tokens)).tolist()
    context = multiprocessing.get_context("spawn")
    begin, answers = context.Barrier(processes), context.Queue()
    parts = [prompts[part::processes] for part in range(processes)]
    workers = [context.Process(target=client, args=(port, part, new, begin, answers)) for part in parts]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=500) for _ in workers]
    for worker in workers:
        worker.join()
    if problems := [problem for _, _, problem in found if problem]:
        raise RuntimeError(problems[0])
    start = min(started for started, _, _ in found)
    times = [one for _, streams, _ in found for one in streams]
    firsts = [first - start for first, _ in times]
    seconds = max(end for _, end in times) - start
    return {
        "output_tokens_per_s": count * new / seconds,
        "seconds": seconds,
        "first_token_median_s": statistics.median(firsts),
        "first_token_last_s": max(firsts),
    }


def offline_rate(model: Path, args: argparse.Namespace, load: tuple[int, int, int]) -> float:
    """Output tokens a second of the same load without a server: the median after one pass that is not counted."""
    from device_offline import Offline

    from drivetrain.config import EngineConfig

    values: dict[str, Any] = {name.replace("-", "_"): value for name, value in settings_of(args).items()}
    values |= {name: int(value) for name, value in values.items() if value.isdigit()}
    options = dict(one.split("=", 1) for one in args.backend_option)
    engine = Offline(EngineConfig(model=str(model), enable_prefix_caching=False, backend_options=options, **values))
    count, tokens, new = load
    seconds = [engine.generate(engine.prompts(count, tokens), new) for _ in range(args.passes + 1)]
    engine.close()
    return count * new / statistics.median(seconds[1:])


def measure(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Offline where it is not given, then the server: passes and their median."""
    load = LOADS[args.scale]
    load = (args.streams or load[0], *load[1:])
    vocabulary: int = config_of(args.model, tiny=args.scale == "tiny")["vocab_size"]
    offline = args.offline or offline_rate(model, args, load)
    server = Server(model, args)
    try:
        passes = []
        for seed in range(args.passes + 1):
            busy = server.busy_seconds()
            found = one_pass(server.port, load, vocabulary, seed, args.clients)
            used = (server.busy_seconds() - busy) / (load[0] * load[2])
            passes.append({**found, "http_process_us_per_token": used * 1e6})
    finally:
        server.close()
    rate = statistics.median(one["output_tokens_per_s"] for one in passes[1:])
    return {
        "load": list(load),
        "output_tokens_per_s": rate,
        "offline_tokens_per_s": offline,
        "offline_measured_here": not args.offline,
        "share_of_offline": rate / offline,
        "ready_s": server.seconds,
        "passes": passes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=tuple(TITLES), default="A")
    parser.add_argument("--offline", type=float, default=0.0, metavar="TOKENS_PER_S")
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--commit", default=os.environ.get("COMMIT", ""), help="where git can't be asked")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--backend-option", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    first = measured_rates(args)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(args.model, Path(folder, args.model), tiny=args.scale == "tiny", tokenizer=True)
        found = measure(args, model)
    print(json.dumps(brief(found)))
    if args.json:
        record = {
            "machine": first["machine"],
            "versions": first["versions"],
            "commit": commit_of(args.commit),
            "command": "python ci/perf/device_serve.py " + " ".join(Path(one).name for one in sys.argv[1:]),
            "rates": first["rates"],
            "model": TITLES[args.model],
            "scale": args.scale,
            **found,
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
