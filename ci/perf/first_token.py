"""Where the time to a first token goes: a timeline of one request through an engine that is otherwise idle.

    python ci/perf/first_token.py [--device cuda] [--model A] [--loops process inline] [--rounds 16] [--json FILE]
        [--scale tiny] [--stand-ins] [--calls]

The requests are those of device_engine.py's ``ttft``: rounds of a miss, a full hit, a hit and 32 more tokens, and a
short prompt, one new token each, one after another. For each kind: medians over the rounds (the first two left out) of
the microseconds from the client's ``submit`` to each moment on the host, from rounds in which nothing else is done; and
``device``: from other rounds, in which the device tells when it reached these places of its queue, to the same clock.
Theirs is ``marked_us``; they are a little slower. ``queued_us``: when the host put that place there.

``--stand-ins``: captured steps without their kernels, so that only the host's part is left. ``--calls``: then one round
in a process of its own under torch's profiler: what the host called and what the device ran.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from device_models import MODELS, TITLES, write_model
from device_offline import GREEDY, Offline
from first_token_loop import DEVICE, FILE, KINDS, STAND_INS, open_watched

from drivetrain.config import EngineConfig
from drivetrain.launch import resolve_device
from drivetrain.params import GenerateRequest
from drivetrain.server.child import LoopSpec
from drivetrain.server.remote_loop import RemoteLoop

HERE = Path(__file__).resolve().parent
NAMES = ("miss", "hit", "hit_and_32", "short")
CLIENT = ("handed over", "got")  # moments of the client itself
SKIPPED = 2
LONGEST_CALLS = 12
now = time.perf_counter_ns


class Watched(Offline):
    """An engine whose loop notes its moments. ``first_token``: one request's begin and the client's moments."""

    def __init__(self, config: EngineConfig, place: str, file: Path, stand_ins: bool) -> None:
        given = {FILE: str(file), STAND_INS: "1" if stand_ins else ""}
        choice = resolve_device(config)
        if place == "process":
            paths = os.pathsep.join(one for one in (str(HERE), os.environ.get("PYTHONPATH", "")) if one)
            given["PYTHONPATH"] = paths
            factory = "first_token_loop:open_watched"
            spec = LoopSpec(config=config, choice=choice, factory=factory, extra_environment=given)
            self.loop = opened = RemoteLoop(spec, hang_seconds=580.0)
        else:
            os.environ.update(given)
            opened = open_watched(config, choice)
            self.loop = opened.loop
        self.vocabulary = opened.vocabulary
        self._random = np.random.default_rng(0)
        self._number = 0

    def first_token(self, prompt: np.ndarray) -> tuple[int, dict[str, int]]:
        """Complete one prompt with one token."""
        self._number += 1
        request = GenerateRequest(request_id=self._number, prompt_ids=prompt, sampling=GREEDY, max_tokens=1, seed=0)
        begin = now()
        self.loop.submit(request)
        passed = {"handed over": now()}
        over = False
        while not over:
            for outputs in self.loop.step():
                if len(outputs.tokens):
                    passed["got"] = now()
                for end in outputs.finished:
                    if end.reason == "error":
                        raise RuntimeError(f"a request failed: {end.error}")
                    over = True
        settle = getattr(self.loop, "settle", None)
        if settle is not None:
            settle()
        return begin, passed

    def round(self, tokens: int) -> list[tuple[int, dict[str, int]]]:
        """One request of each kind."""
        (prompt,), (tail,), (short,) = (self.prompts(1, length) for length in (tokens, 32, 16))
        return [self.first_token(one) for one in (prompt, prompt, np.concatenate((prompt, tail)), short)]


def timeline(args: argparse.Namespace, folder: Path, place: str) -> dict[str, Any]:
    """Run the rounds in one mode of the loop; returns the kinds' timelines."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "moments.json")
        engine = Watched(configuration(args, folder), place, file, args.stand_ins)
        try:
            time.sleep(args.settle)
            rounds = []
            for _ in range(args.rounds):
                rounds.append(engine.round(args.tokens))
                time.sleep(args.pause)
        finally:
            engine.close()
        noted = json.loads(file.read_text(encoding="utf-8"))
    return {name: of_kind(rounds, at, noted) for at, name in enumerate(NAMES)}


def of_kind(rounds: list[Any], at: int, noted: dict[str, Any]) -> dict[str, Any]:
    """Medians of one kind's moments over the rounds that are not marked, and over those that are."""
    assert len(NAMES) == KINDS
    spans = [(number % 2 == 1, *rounds[number][at]) for number in range(SKIPPED, len(rounds))]
    free = [of_request(begin, passed, noted["host"]) for marked, begin, passed in spans if not marked]
    marked = [of_request(begin, passed, noted["host"]) for marked, begin, passed in spans if marked]
    device = [of_request(begin, passed, noted["device"]) for marked, begin, passed in spans if marked]
    host = ordered(free)
    found: dict[str, Any] = {"us": host["got"], "rounds": len(free), "host_us": host}
    found["all_us"] = sorted(round(one["got"], 1) for one in free)
    if any(name in DEVICE for one in device for name in one):
        found["device_us"] = {k: v for k, v in ordered(device).items() if k not in CLIENT}
        found["queued_us"] = {k: v for k, v in ordered(marked).items() if k in DEVICE}
        found["marked_us"] = ordered(marked)["got"]
    return found


def of_request(begin: int, passed: dict[str, int], noted: list[tuple[str, int]]) -> dict[str, float]:
    """Microseconds from a request's begin to each moment that passed until its token came; of several of one name the
    first. The one before may still be told of when a request begins: its end is no moment of this one."""
    found: dict[str, float] = {name: (when - begin) / 1e3 for name, when in passed.items()}
    arrived = False
    for name, when in noted:
        if begin <= when <= passed["got"]:
            arrived = arrived or name != "sent"
            if arrived:
                found.setdefault(name, (when - begin) / 1e3)
    return found


def ordered(requests: list[dict[str, float]]) -> dict[str, float]:
    """Medians of the moments that most requests had, in their order."""
    names = {name for one in requests for name in one}
    times = {name: [one[name] for one in requests if name in one] for name in names}
    medians = {name: statistics.median(values) for name, values in times.items() if 2 * len(values) > len(requests)}
    return {name: round(value, 1) for name, value in sorted(medians.items(), key=lambda item: item[1])}


def show(place: str, found: dict[str, Any]) -> None:
    """Print the timelines side by side: microseconds since the moment before."""
    print(f"--- loop: {place}", flush=True)
    for kind, one in found.items():
        parts, last = [], 0.0
        for name, when in one["host_us"].items():
            parts.append(f"{name} +{when - last:.0f}")
            last = when
        print(f"{kind:10s} {one['us']:9.0f} us: " + ", ".join(parts))
        if "device_us" in one:
            device, queued = one["device_us"], one["queued_us"]
            parts = [f"{name} {device[name]:.0f} (queued {queued.get(name, 0):.0f})" for name in device]
            print(f"{'':10s} {one['marked_us']:9.0f} us marked, device at: " + ", ".join(parts), flush=True)


def calls(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What the host called and the device ran for one request of each kind, by torch's profiler."""
    with tempfile.TemporaryDirectory() as scratch:
        engine = Watched(configuration(args, folder), "inline", Path(scratch, "moments.json"), args.stand_ins)
        try:
            time.sleep(args.settle)
            for _ in range(3):
                engine.round(args.tokens)
            import torch  # not before the engine has: it sets variables for it

            kinds = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available() and args.device.startswith("cuda"):
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            (prompt,), (short,) = (engine.prompts(1, length) for length in (args.tokens, 16))
            found = {}
            for name, one in (("warm-up", short), ("miss", prompt), ("hit", prompt), ("short", short[::-1].copy())):
                with torch.profiler.profile(activities=kinds) as profile:
                    engine.first_token(one)
                found[name] = of_profile(list(profile.events() or ()))
        finally:
            engine.close()
    return found


def of_profile(events: list[Any]) -> dict[str, Any]:
    """Sort one request's events: calls into the device's library in order, kernels in short, and the device's gaps."""
    if not events:
        return {}
    begin = min(event.time_range.start for event in events)
    here = [e for e in events if "CPU" in str(e.device_type) and e.name.startswith("cu")]
    there = sorted((e for e in events if "CPU" not in str(e.device_type)), key=lambda e: e.time_range.start)
    gaps, last = [], None
    for one in there:
        if last is not None and one.time_range.start - last > 5:
            gaps.append((round(last - begin, 1), round(one.time_range.start - last, 1), one.name[:40]))
        last = one.time_range.end if last is None else max(last, one.time_range.end)
    steps = [(round(e.time_range.start - begin, 1), round(e.time_range.elapsed_us(), 1), e.name) for e in here]
    return {
        "calls": sorted(steps),
        "kernels": len(there),
        "device_begins_us": round(there[0].time_range.start - begin, 1) if there else None,
        "device_ends_us": round(last - begin, 1) if last is not None else None,
        "first_kernels": [(round(e.time_range.start - begin, 1), round(e.time_range.elapsed_us(), 1), e.name[:40])
                          for e in there[:10]],
        "gaps": gaps,
    }  # fmt: skip


def show_calls(found: dict[str, Any]) -> None:
    """Print the longest calls and the device's span of each request."""
    for kind, one in found.items():
        print(f"--- calls of {kind}: device {one.get('device_begins_us')} to {one.get('device_ends_us')} us")
        for when, took, name in one.get("calls", [])[:60]:
            if took >= 4.0:
                print(f"    {when:9.1f} {took:9.1f} us {name}")
        for when, took, name in sorted(one.get("gaps", []), key=lambda gap: -gap[1])[:LONGEST_CALLS]:
            print(f"    gap at {when:9.1f} of {took:8.1f} us before {name}", flush=True)


def configuration(args: argparse.Namespace, folder: Path) -> EngineConfig:
    """The engine that device_engine.py opens for its case of first tokens."""
    more: dict[str, Any] = {"cache_bytes": args.cache_bytes} if args.cache_bytes else {}
    return EngineConfig(
        model=str(folder),
        device=args.device,
        dtype="float32" if args.scale == "tiny" and args.device == "cpu" else "bfloat16",
        load_format="dummy",
        max_model_len=8192,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=8192,
        enable_prefix_caching=True,
        memory_utilization=args.memory_utilization,
        backend_options=dict(one.split("=", 1) for one in args.backend_option),
        **more,
    )


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=sorted(MODELS), default="A")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--loops", nargs="*", choices=("process", "inline"), default=["process", "inline"])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--settle", type=float, default=4.0, help="seconds to do what the engine does when idle")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between rounds")
    parser.add_argument("--stand-ins", action="store_true")
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--memory-utilization", type=float, default=0.0)
    parser.add_argument("--cache-bytes", type=int, default=0)
    parser.add_argument("--backend-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--commit", default=os.environ.get("COMMIT", ""))
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def in_own_process(args: argparse.Namespace, part: list[str], found: dict[str, Any]) -> int:
    """Run one part in a process of its own and take over what it found: an engine has its device for itself."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "part.json")
        own = [one for one in sys.argv[1:] if one != "--calls"]
        command = [sys.executable, str(Path(__file__).resolve()), *own, *part, "--json", str(file)]
        status = subprocess.run(command, check=False).returncode
        if file.exists():
            part_found = json.loads(file.read_text(encoding="utf-8"))
            found["loops"] |= part_found["loops"]
            found |= {"calls": part_found["calls"]} if "calls" in part_found else {}
    write(args, found)
    return status


def write(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write the file, if one was asked for."""
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    args = arguments()
    found: dict[str, Any] = {
        "model": args.model,
        "title": TITLES[args.model],
        "scale": args.scale,
        "device": args.device,
        "stand_ins": args.stand_ins,
        "commit": args.commit,
        "command": "python ci/perf/first_token.py " + " ".join(Path(one).name for one in sys.argv[1:]),
        "loops": {},
    }
    if len(args.loops) + args.calls > 1:
        parts = [["--loops", place] for place in args.loops] + ([["--loops", "--calls"]] if args.calls else [])
        return max(in_own_process(args, part, found) for part in parts)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(args.model, Path(folder, args.model), tiny=args.scale == "tiny")
        for place in args.loops:
            found["loops"][place] = timeline(args, model, place)
            show(place, found["loops"][place])
        if args.calls:
            found["calls"] = calls(args, model)
            show_calls(found["calls"])
    write(args, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
