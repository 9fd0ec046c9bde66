"""The engine on the CPU backend with a real model: decode against the read bandwidth of the same run, and more.

    python ci/perf/cpu_engine.py MODEL [--rounds N] [--json FILE]

- decode: one request, prompt of 128 tokens, in rounds that alternate with measuring the bandwidth; the ceiling is
  bandwidth / bytes of weights that a token reads. Medians over rounds.
- deterministic: the same steps with ``--deterministic``, in alternating rounds: at 1 and 8 requests, and a prompt.
- repeated prompt: seconds from submission to the first token of a 1,000-token prompt, new and again.
- start: ``engine --help``, and ``engine serve`` until ready.
- host: one-layer model of 16 channels at 1 and 256 rows: whole steps, and what is left of them without the ops
  (embedding, layers, norm, logits, draws), which is what schedule, prepare, launch and commit cost beside calling ops.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.config import EngineConfig
from drivetrain.launch import Opened, describe, open_loop, resolve_device
from drivetrain.params import GenerateRequest, SamplingParams
from drivetrain_cpu.plugin import processor_name

ENGINE = [sys.executable, "-m", "drivetrain"]
PROMPT, STEPS, READ_BYTES = 128, 48, 512 << 20
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


class Bench:
    """An open engine that takes requests of random tokens."""

    def __init__(self, config: EngineConfig, seed: int = 0) -> None:
        self.opened: Opened = open_loop(config, resolve_device(config))
        self._random = np.random.default_rng(seed)
        self._number = 0

    def prompt(self, tokens: int) -> np.ndarray:
        """Return token ids [tokens] that no earlier prompt shares."""
        return self._random.integers(0, self.opened.vocabulary, tokens, dtype=np.int32)

    def submit(self, prompt: np.ndarray, new: int) -> int:
        """Queue a greedy request; returns its id."""
        self._number += 1
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        request = GenerateRequest(request_id=self._number, prompt_ids=prompt, sampling=sampling, max_tokens=new, seed=0)
        self.opened.loop.submit(request)
        return self._number

    def step(self) -> set[int]:
        """Run a step; returns the requests that got tokens."""
        got: set[int] = set()
        for outputs in self.opened.loop.step():
            got.update(outputs.request_ids.tolist())
        return got

    def drain(self) -> None:
        """Run until nothing is left."""
        while self.opened.loop.has_work():
            self.step()

    def first_token(self, prompt: np.ndarray) -> float:
        """Seconds until a lone prompt has its one token."""
        begin = time.perf_counter()
        self.submit(prompt, 1)
        self.drain()
        return time.perf_counter() - begin

    def decode(self, requests: int, steps: int = STEPS, prompt: int = PROMPT) -> float:
        """Median seconds of a steady decode step of that many requests."""
        waiting = {self.submit(self.prompt(prompt), 4 * steps + 64) for _ in range(requests)}
        numbers = tuple(waiting)
        while waiting:
            waiting -= self.step()
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begin)
        for number in numbers:
            self.opened.loop.abort(number)
        self.drain()
        return statistics.median(seconds)


def read_bandwidth(buffer: Any) -> float:
    """Bytes a second that all threads read: the best of three sums over the buffer."""
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        buffer.sum()
        best = max(best, buffer.numel() * buffer.element_size() / (time.perf_counter() - begin))
    return best


def weight_bytes(opened: Opened) -> int:
    """Bytes of weights that one token reads: every linear once, in the checkpoint's dtype; not the embedding's row."""
    from drivetrain.models.parameters import Projection
    from drivetrain_api.v1 import dtype_bytes

    specs = [holder.spec for holder in opened.runner.decoder.holders if isinstance(holder, Projection)]
    return sum(spec.in_features * spec.out_features * dtype_bytes(spec.dtype) for spec in specs)


def decode_share(bench: Bench, rounds: int) -> dict[str, float]:
    """Decode of one request against the bandwidth, in alternating rounds."""
    import torch

    buffer = torch.ones(READ_BYTES // 4)
    bandwidths, steps = [], []
    for _ in range(rounds):
        bandwidths.append(read_bandwidth(buffer))
        steps.append(bench.decode(1))
    bandwidth, step, nbytes = statistics.median(bandwidths), statistics.median(steps), weight_bytes(bench.opened)
    return {
        "read_gb_per_s": bandwidth / 1e9,
        "weight_bytes_a_token": nbytes,
        "step_ms": step * 1e3,
        "tokens_per_s": 1 / step,
        "ceiling_tokens_per_s": bandwidth / nbytes,
        "share_of_ceiling": nbytes / step / bandwidth,
        "share_lowest_round": min(nbytes / s / b for s, b in zip(steps, bandwidths, strict=True)),
    }


def deterministic_cost(plain: Bench, fixed: Bench, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds with and without ``--deterministic``, rounds alternating, and their ratio."""
    cases: dict[str, Callable[[Bench], float]] = {
        "decode of 1": lambda bench: bench.decode(1),
        "decode of 8": lambda bench: bench.decode(8),
        "prompt of 512": lambda bench: bench.first_token(bench.prompt(512)),
    }
    found = {}
    for name, case in cases.items():
        pairs = [(case(plain), case(fixed)) for _ in range(rounds)]
        without, with_it = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
        found[name] = {"plain_ms": without, "deterministic_ms": with_it, "ratio": with_it / without}
    return found


def repeated_prompt(bench: Bench, rounds: int) -> dict[str, float]:
    """First token of a 1,000-token prompt, new and from the prefix cache."""
    pairs, cached = [], 0
    for _ in range(rounds):
        prompt = bench.prompt(1000)
        before = bench.opened.loop.scheduler.stats().prefix_hit_tokens
        pairs.append((bench.first_token(prompt), bench.first_token(prompt)))
        cached = bench.opened.loop.scheduler.stats().prefix_hit_tokens - before
    new, again = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    return {"new_ms": new, "again_ms": again, "times_sooner": new / again, "cached_tokens": cached}


def host_cost(rows: int) -> dict[str, float]:
    """Milliseconds of a decode step of a tiny model, whole and without its ops."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY), encoding="utf-8")
        bench = Bench(EngineConfig(model=folder, device="cpu", load_format="dummy", cache_bytes=256 << 20))
    runner = bench.opened.runner
    spent = [0.0]
    decoder, drawer = runner.decoder, runner._sampler._drawer
    for owner, name in ((decoder, "embed"), (decoder, "forward"), (decoder, "finish"), (drawer, "run")):
        timed(owner, name, spent)
    waiting = {bench.submit(bench.prompt(40 + row % 16), 1000) for row in range(rows)}
    while waiting:
        waiting -= bench.step()
    whole, own = [], []
    for _ in range(300):
        before, begin = spent[0], time.perf_counter()
        bench.step()
        whole.append(time.perf_counter() - begin)
        own.append(whole[-1] - (spent[0] - before))
    bench.opened.loop.close()
    return {"rows": rows, "step_ms": statistics.median(whole) * 1e3, "without_ops_ms": statistics.median(own) * 1e3}


def starts(model: str, rounds: int) -> dict[str, float]:
    """Seconds of ``engine --help``, and from starting ``engine serve`` until /ready says 200: medians."""
    helps, ready = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        subprocess.run([*ENGINE, "--help"], stdout=subprocess.DEVNULL, check=True)
        helps.append(time.perf_counter() - begin)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        begin = time.perf_counter()
        flags = ["--device", "cpu", "--dtype", "bfloat16", "--port", str(port)]
        with subprocess.Popen([*ENGINE, "serve", model, *flags], stdout=subprocess.DEVNULL) as server:
            while not answers(f"http://127.0.0.1:{port}/ready"):
                if server.poll() is not None:
                    raise RuntimeError("the server ended before it was ready")
                time.sleep(0.02)
            ready.append(time.perf_counter() - begin)
            server.terminate()
    return {"help_s": statistics.median(helps), "ready_s": statistics.median(ready), "ready_slowest_s": max(ready)}


def answers(url: str) -> bool:
    """Say whether a GET gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def timed(owner: Any, name: str, spent: list[float]) -> None:
    """Let a method add its seconds to ``spent``."""
    method = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*given, **named)
        finally:
            spent[0] += time.perf_counter() - begin

    setattr(owner, name, call)


def facts() -> dict[str, Any]:
    """Machine, versions, commit and command."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False)
    return {
        "machine": {"processor": processor_name(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")},
        "commit": commit.stdout.strip() + ("+" if changed.stdout.strip() else ""),
        "command": f"python ci/perf/{Path(sys.argv[0]).name} " + " ".join(Path(a).name for a in sys.argv[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", default=None)
    args = parser.parse_args()
    config = EngineConfig(model=args.model, device="cpu", dtype="bfloat16", max_num_seqs=16, cache_bytes=256 << 20)
    plain = Bench(config)
    found: dict[str, Any] = {"decode": decode_share(plain, args.rounds)}
    print(json.dumps(found["decode"], indent=1))
    found["kernels"] = sorted({f"{c.op}: {c.label}" for c in describe(config, resolve_device(config)).ops.report})
    found["repeated_prompt"] = repeated_prompt(plain, args.rounds)
    print(json.dumps(found["repeated_prompt"], indent=1))
    fixed = Bench(replace(config, deterministic=True))
    found["deterministic"] = deterministic_cost(plain, fixed, args.rounds)
    print(json.dumps(found["deterministic"], indent=1))
    plain.opened.loop.close()
    fixed.opened.loop.close()
    found["start"] = starts(args.model, min(3, args.rounds))
    print(json.dumps(found["start"], indent=1))
    found["host"] = [host_cost(rows) for rows in (1, 256)]
    print(json.dumps(found["host"], indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(facts() | found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
