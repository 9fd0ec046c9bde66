"""Where a decode step's time goes: kernels by name on the device, calls by name on the host.

    python ci/perf/device_profile.py [--model A] [--rows 1 64 256] [--context 200] [--prompts 4] [--json FILE]

The loop runs in this process. ``device``: microseconds a step that each kernel runs, from torch's profiler, and the
time in which none does. ``host``: microseconds a step inside the loop's calls; ``poll`` is mostly waiting.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from device_models import MODELS
from device_offline import GREEDY, Offline

from drivetrain.config import EngineConfig
from drivetrain.params import GenerateRequest

STEPS, PROFILED, SHOWN = 60, 12, 24
PROMPT, STEP_TOKENS = 4096, 8192


def timed(owner: Any, name: str, spent: dict[str, float], label: str) -> None:
    """Let a method add its seconds to ``spent``."""
    method = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*given, **named)
        finally:
            spent[label] += time.perf_counter() - begin

    setattr(owner, name, call)


def steady(engine: Offline, rows: int, context: int) -> None:
    """Submit requests and step until all of them decode."""
    waiting = set()
    for prompt in engine.prompts(rows, context):
        engine._number += 1
        waiting.add(engine._number)
        request = GenerateRequest(
            request_id=engine._number, prompt_ids=prompt, sampling=GREEDY, max_tokens=1000, seed=0
        )
        engine.loop.submit(request)
    while waiting:
        for outputs in engine.loop.step():
            waiting -= set(outputs.request_ids.tolist())
    for _ in range(10):
        engine.loop.step()


def drain(engine: Offline) -> None:
    """End all requests."""
    for number in range(engine._number + 1):
        engine.loop.abort(number)
    while engine.loop.has_work():
        engine.loop.step()


def host(engine: Offline, spent: dict[str, float]) -> dict[str, float]:
    """Median seconds of a step, and mean microseconds of its parts."""
    spent.clear()
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        engine.loop.step()
        seconds.append(time.perf_counter() - begin)
    parts = {name: value / STEPS * 1e6 for name, value in spent.items()}
    return {"step_ms": statistics.median(seconds) * 1e3, **{k: round(v, 1) for k, v in parts.items()}}


def device(work: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Microseconds a step by kernel, busy and in all, of work that is so many steps."""
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as found:
        work()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name[:70]].append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    busy, last = 0.0, -np.inf
    for begin, end in spans:
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    whole = spans[-1][1] - spans[0][0] if spans else 0.0
    table = sorted(((sum(v) / steps, len(v) / steps, k) for k, v in kernels.items()), reverse=True)
    return {"busy_us": busy / steps, "span_us": whole / steps, "kernels": table}


def show(title: str, kernels: dict[str, Any]) -> None:
    """Print a table of kernels."""
    print(f"--- {title}\n    device busy {kernels['busy_us']:.0f} us of {kernels['span_us']:.0f}")
    for us, count, name in kernels["kernels"][:SHOWN]:
        print(f"    {us:9.1f} us {count:7.1f} x {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="A", choices=sorted(MODELS))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--prompts", type=int, default=0, help=f"even; profile so many prompts of {PROMPT} tokens too")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--json", default=None)
    parser.add_argument("--backend-option", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[args.model]), encoding="utf-8")
        options = dict(one.split("=", 1) for one in args.backend_option)
        config = EngineConfig(
            model=folder, device=args.device, dtype="bfloat16", load_format="dummy", max_model_len=8192,
            max_num_seqs=max([*args.rows, 16]), max_num_batched_tokens=STEP_TOKENS, enable_prefix_caching=False,
            backend_options=options,
        )  # fmt: skip
        engine = Offline(config, "inline")
        print("start", {k: round(v, 3) for k, v in engine.figures.items() if "seconds" in k})
        spent: dict[str, float] = defaultdict(float)
        loop = engine.loop
        for owner, name in ((loop.scheduler, "schedule"), (loop.scheduler, "commit"), (loop.executor, "forward"),
                            (loop.executor, "sample"), (loop.executor, "poll")):  # fmt: skip
            timed(owner, name, spent, name)
        if args.prompts:
            engine.generate(engine.prompts(args.prompts, PROMPT), 1)
            prompts = engine.prompts(args.prompts, PROMPT)
            kernels = device(lambda: engine.generate(prompts, 1), args.prompts * PROMPT // STEP_TOKENS)
            found["prompts"] = {"count": args.prompts, "tokens": PROMPT, "device": kernels}
            show(f"{args.model}, {args.prompts} prompts of {PROMPT} tokens, a step of {STEP_TOKENS}", kernels)
        for rows in args.rows:
            steady(engine, rows, args.context)
            times = host(engine, spent)
            kernels = device(lambda: [engine.loop.step() for _ in range(PROFILED)], PROFILED)
            found[str(rows)] = {"host": times, "device": kernels}
            show(f"{args.model}, {rows} rows: {times}", kernels)
            drain(engine)
            if args.json:
                Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
