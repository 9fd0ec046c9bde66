"""The cases of device_engine.py: each opens the engine that it needs, measures, and returns what it found."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from device_models import Rates, Sizes, batch_floor, overlapped, serial
from device_offline import DeviceMemory, Offline

from drivetrain.config import EngineConfig

GIB, SELDOM, OFTEN = 1 << 30, 1.0, 0.02  # seconds between looks at the device's memory
FULL: dict[str, Any] = {
    "batches": (1, 8, 64, 256),
    "new": (16, 144),
    "loads": ((512, 512, 256), (1024, 1024, 128)),
    "prefill": (16, 4096),
    "ttft": 4096,
    "long": 100_000,
    "longest": 131_072,
    "max_model_len": 8192,
    "stream": (64, 800),
    "touch": (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1024),
    "settle": 3.0,
}
SMALL: dict[str, Any] = {
    "batches": (1, 4),
    "new": (2, 6),
    "loads": ((8, 16, 4), (16, 24, 3)),
    "prefill": (2, 64),
    "ttft": 128,
    "long": 600,
    "longest": 1024,
    "max_model_len": 512,
    "stream": (4, 40),
    "touch": (1, 2, 4, 8),
    "settle": 0.1,
}
FIRST_TOKEN = """
import json, time
begin = time.perf_counter()
from drivetrain.config import EngineConfig
from drivetrain.launch import open_loop
config = EngineConfig(**{settings!r})
opened = open_loop(config)
ready = time.perf_counter()
import numpy as np
from drivetrain.params import GenerateRequest, SamplingParams
sampling = SamplingParams(temperature=0.0, ignore_eos=True)
prompt = np.arange(16, dtype=np.int32)
opened.loop.submit(GenerateRequest(request_id=0, prompt_ids=prompt, sampling=sampling, max_tokens=1, seed=0))
tokens = 0
while not tokens:
    tokens += sum(len(outputs.tokens) for outputs in opened.loop.step())
end = time.perf_counter()
times = dict(open_s=ready - begin, first_step_s=end - ready)
print(json.dumps(times | dict(opened.figures)), flush=True)
"""


@dataclass
class Run:
    """One model's measurement. At most one engine is open; ``memory`` watches the device from before it opens.

    ``longest``: tokens that the model was made for.
    """

    args: argparse.Namespace
    name: str
    folder: Path
    rates: Rates
    counts: dict[str, Any]
    sizes: Sizes
    longest: int
    engine: Offline | None = None
    memory: DeviceMemory | None = None
    opened: str = ""
    starts: dict[str, float] = field(default_factory=dict)

    def config(self, **more: Any) -> EngineConfig:
        """The engine's configuration, with changes."""
        values: dict[str, Any] = {
            "model": str(self.folder),
            "device": self.args.device,
            "dtype": "bfloat16",
            "load_format": "dummy",
            "max_model_len": self.counts["max_model_len"],
            "max_num_seqs": self.args.max_num_seqs,
            "max_num_batched_tokens": self.args.max_num_batched_tokens,
            "memory_utilization": self.args.memory_utilization,
            "depth": self.args.depth,
            "backend_options": dict(one.split("=", 1) for one in self.args.backend_option),
        }
        return EngineConfig(**(values | more))

    def open(self, kind: str) -> Offline:
        """Open the engine that a case needs, unless it is the one that is open: plain, cached, long, or fresh:
        plain, and used at once, so that steps meet captures."""
        if self.engine is None or self.opened != kind:
            self.close()
            more: dict[str, Any] = {"enable_prefix_caching": kind not in ("plain", "fresh")}
            if kind == "long":
                more |= {"max_model_len": self.counts["longest"]}
            self.memory = DeviceMemory(self.args.device)
            self.engine, self.opened = Offline(self.config(**more), self.args.loop), kind
            self.memory.interval = SELDOM
            if kind != "fresh":
                time.sleep(self.counts["settle"])  # what the engine does when it has nothing else to do
            self.starts[kind] = self.engine.started
        return self.engine

    def close(self) -> None:
        """Close what is open."""
        if self.engine is not None:
            self.engine.close()
        if self.memory is not None:
            self.memory.close()
        self.engine, self.memory = None, None


def middle(work: Callable[[], float], repeats: int) -> tuple[float, list[float]]:
    """Median and all of the repeats."""
    found = [work() for _ in range(repeats)]
    return statistics.median(found), found


def decode(run: Run) -> dict[str, Any]:
    """Milliseconds of a decode step by batch, and shares of the floors."""
    engine, found = run.open("plain"), {}
    few, many = run.counts["new"]
    for rows in run.counts["batches"]:
        engine.generate(engine.prompts(rows, 128), many)
        times = {new: [engine.generate(engine.prompts(rows, 128), new) for _ in range(3)] for new in (few, many)}
        short, long = (statistics.median(times[new]) for new in (few, many))
        step = (long - short) / (many - few)
        works = run.sizes.step(rows, 128 + (few + many) / 2)
        found[str(rows)] = {
            "step_ms": step * 1e3,
            "floor_ms": overlapped(works, run.rates) * 1e3,
            "share_of_floor": overlapped(works, run.rates) / step,
            "share_of_serial_floor": serial(works, run.rates) / step,
            "seconds": times,
        }
    return found


def throughput(run: Run, which: int) -> dict[str, Any]:
    """Output tokens a second of one load, after a pass that is not counted."""
    engine, load = run.open("plain"), run.counts["loads"][which]
    rows, prompt, new = load
    warm = engine.generate(engine.prompts(rows, prompt), new)
    seconds, times = middle(lambda: engine.generate(engine.prompts(rows, prompt), new), run.args.passes)
    return {
        "load": list(load),
        "output_tokens_per_s": rows * new / seconds,
        "share_of_floor": batch_floor(run.sizes, load, run.rates) / seconds,
        "floor_tokens_per_s": rows * new / batch_floor(run.sizes, load, run.rates),
        "seconds": times,
        "warm_up_seconds": warm,
        **engine.stats(),
    }


def prefill(run: Run) -> dict[str, Any]:
    """Prompt tokens a second."""
    engine = run.open("plain")
    rows, tokens = run.counts["prefill"]
    engine.generate(engine.prompts(rows, tokens), 1)
    seconds, times = middle(lambda: engine.generate(engine.prompts(rows, tokens), 1), 3)
    floor = serial(run.sizes.prompt(rows, tokens), run.rates)
    return {"prompt_tokens_per_s": rows * tokens / seconds, "share_of_floor": floor / seconds, "seconds": times}


def ttft(run: Run) -> dict[str, Any]:
    """Milliseconds to the one token of one prompt."""
    engine, tokens = run.open("cached"), run.counts["ttft"]
    kinds: dict[str, list[float]] = {"miss": [], "hit": [], "hit_and_32": [], "16_tokens": []}
    for repeat in range(6):
        (prompt,), (tail,), (short,) = (engine.prompts(1, length) for length in (tokens, 32, 16))
        longer = np.concatenate((prompt, tail))
        for kind, one in (("miss", prompt), ("hit", prompt), ("hit_and_32", longer), ("16_tokens", short)):
            seconds = engine.generate([one], 1)
            if repeat:
                kinds[kind].append(seconds)
    floors = {
        "miss": serial(run.sizes.prompt(1, tokens), run.rates),
        "hit": serial(run.sizes.step(1, tokens), run.rates),
        "hit_and_32": serial(run.sizes.step(1, tokens + 32), run.rates),
        "16_tokens": serial(run.sizes.prompt(1, 16), run.rates),
    }
    return {
        kind: {
            "ms": statistics.median(times) * 1e3,
            "share_of_floor": floors[kind] / statistics.median(times),
            "seconds": times,
        }
        for kind, times in kinds.items()
    } | engine.stats()


def start(run: Run) -> dict[str, Any]:
    """Seconds from a new process to its first token; kernel caches empty, then as the first left them."""
    run.close()
    code = FIRST_TOKEN.format(settings=start_settings(run))
    with tempfile.TemporaryDirectory() as caches:
        environment = own_caches(caches)
        new_process("import torch; print('{}')", environment)
        torch_alone = [new_process("import torch; print('{}')", environment)["seconds"] for _ in range(3)]
        cold = new_process(code, environment)
        warm = [new_process(code, environment) for _ in range(3)]
    return {
        "import_torch_s": statistics.median(torch_alone),
        "empty_caches_s": cold["seconds"],
        "warm_caches_s": statistics.median(one["seconds"] for one in warm),
        "import_torch_each": torch_alone,
        "empty_caches": cold,
        "warm_caches": warm,
    }


def start_files(run: Run) -> dict[str, Any]:
    """The same from safetensors files that have just been written, so that they lie in the page cache."""
    run.close()
    writer = [sys.executable, str(Path(__file__).parent / "device_files.py"), str(run.folder)]
    done = subprocess.run([*writer, "--device", run.args.device], stdout=subprocess.PIPE, text=True, check=True)
    written = json.loads(done.stdout.splitlines()[-1])
    code = FIRST_TOKEN.format(settings=start_settings(run) | {"load_format": "safetensors"})
    try:
        with tempfile.TemporaryDirectory() as caches:
            found = [new_process(code, own_caches(caches)) for _ in range(4)]
    finally:
        for path in run.folder.glob("*.safetensors*"):
            path.unlink()
    loading = statistics.median(one["load_seconds"] for one in found[1:])
    return {
        "warm_caches_s": statistics.median(one["seconds"] for one in found[1:]),
        "load_gb_per_s": written["bytes"] / loading / 1e9,
        "load_s": loading,
        **written,
        "empty_caches": found[0],
        "warm_caches": found[1:],
    }


def start_settings(run: Run) -> dict[str, Any]:
    """The engine's configuration as a new process is given it."""
    values = run.config()
    names = ("model", "device", "dtype", "load_format", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    settings = {name: getattr(values, name) for name in (*names, "depth", "memory_utilization")}
    return settings | {"backend_options": dict(values.backend_options)}


def own_caches(folder: str) -> dict[str, str]:
    """An environment in which everything that is compiled is kept in ``folder``."""
    names = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
    return {**os.environ, **{name: str(Path(folder, name.lower())) for name in names}}


def new_process(code: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run code in a new interpreter; ``seconds`` until its one line of JSON came."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode or not line:
        raise RuntimeError(f"the new process ended with status {process.returncode}")
    return {"seconds": seconds, **json.loads(line)}


def memory(run: Run) -> dict[str, Any]:
    """The plan against the device's own report, after steps of every batch size, a full step and some rest."""
    engine = run.open("plain")
    watch = run.memory
    assert watch is not None
    watch.interval = OFTEN
    for _ in range(2):
        for rows in run.counts["touch"]:
            if rows <= run.args.max_num_seqs:
                engine.generate(engine.prompts(rows, 32), 8)
        engine.generate(engine.prompts(*run.counts["prefill"]), 1)
        time.sleep(run.counts["settle"])
    watch.interval = SELDOM
    peak, planned = watch.peak - watch.before, int(engine.figures["peak_bytes"])
    cache, own = int(engine.figures["cache_bytes"]), peak - int(engine.figures["cache_bytes"])
    could_hold = watch.total - watch.before - own
    return {
        "planned_gib": planned / GIB,
        "device_reported_peak_gib": peak / GIB,
        "planned_less_peak_gib": (planned - peak) / GIB,
        "after_work_gib": (watch.used() - watch.before) / GIB,
        "cache_gib": cache / GIB,
        "cache_share_of_what_fits": cache / could_hold,
        "source": watch.source,
        "before_gib": watch.before / GIB,
        "total_gib": watch.total / GIB,
        "figures": dict(engine.figures),
    }


def pauses(run: Run) -> dict[str, Any]:
    """Milliseconds between the tokens of a full batch while further buckets are captured between its steps, and when
    all are captured."""
    engine = run.open("fresh")
    rows, new = run.counts["stream"]
    found = {}
    for title in ("while capturing", "captured"):
        engine.generate(engine.prompts(rows, 128), new)
        gaps = np.array(engine.gaps[1:]) * 1e3
        names = {"median_ms": 50, "p99_ms": 99, "p99.9_ms": 99.9, "longest_ms": 100}
        found[title] = {name: float(np.percentile(gaps, share)) for name, share in names.items()}
        found[title] |= {"gaps": len(gaps), "rows": rows}
        time.sleep(2 * run.counts["settle"])
    return found


def long_context(run: Run) -> dict[str, Any]:
    """Seconds of one very long prompt, and milliseconds of a decode step behind it."""
    if run.longest < run.counts["longest"]:
        return {"skipped": f"the model was made for {run.longest} tokens"}
    engine, tokens = run.open("long"), run.counts["long"]
    few, many = run.counts["new"]
    engine.generate(engine.prompts(1, 256), 4)
    prompts = engine.prompts(3, tokens)
    times = [engine.generate([prompt], 1) for prompt in prompts]
    engine.generate(prompts[-1:], many)
    steps = {new: [engine.generate(prompts[-1:], new) for _ in range(3)] for new in (few, many)}
    step = (statistics.median(steps[many]) - statistics.median(steps[few])) / (many - few)
    seconds, floor = statistics.median(times), serial(run.sizes.prompt(1, tokens), run.rates)
    works = run.sizes.step(1, tokens + (few + many) / 2)
    return {
        "prompt_tokens": tokens,
        "prefill_s": seconds,
        "prefill_share_of_floor": floor / seconds,
        "step_ms": step * 1e3,
        "step_floor_ms": serial(works, run.rates) * 1e3,
        "step_share_of_floor": serial(works, run.rates) / step,
        "seconds": times,
        "decode_seconds": steps,
        **engine.stats(),
    }


CASES: dict[str, tuple[tuple[str, Callable[[Run], dict[str, Any]]], ...]] = {
    "decode": (("decode", decode),),
    "throughput": (
        ("throughput 512", lambda run: throughput(run, 0)),
        ("throughput 1024", lambda run: throughput(run, 1)),
    ),
    "prefill": (("prefill", prefill),),
    "memory": (("memory", memory),),
    "ttft": (("ttft", ttft),),
    "pauses": (("pauses", pauses),),
    "start": (("start", start),),
    "files": (("start from files", start_files),),
    "long": (("long", long_context),),
}
