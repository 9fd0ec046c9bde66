"""Every kernel under compute-sanitizer: reads and writes out of bounds, races in shared memory.

    python ci/perf/device_sanitize.py [--tools memcheck racecheck] [--only LOAD ...] [--sanitizer PATH]
                                      [--libraries FOLDER] [--limit SECONDS] [--json FILE]

Loads (``sanitize_loads``; all, or those named) make small calls with random inputs and poisoned outputs; a tiny engine
without graphs is one of them. Each tensor is an allocation of its own, so that a step beyond its end shows. The loads
run once without a tool, which compiles what they need, then under all tools side by side. ``orderly`` and ``racing``
are control kernels (``sanitize_controls``): what racecheck says of warp_specialize alone, and whether it sees a race
there. A race that a barrier is proved to prevent (``sanitize_report``) is listed as cleared and not counted, nor is
what torch's own kernels are said to do.

FILE is written after each load; one of the same commit is added to, so that parts make a whole: ``lacking`` says which
kernels no clean call of a tool has had. The exit status is 1 unless all tools are clean and all kernels ran that the
loads are there for (with all loads: all of ``plugins/triton``). ``--inner`` is the part that runs under the tool.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sanitize_report import Kernels, judged

RACING = "racing"  # the control kernel that has a race
CONTROLS = ("orderly", RACING)
ENVIRONMENT = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # as the backend sets it before torch loads
}


def watched(folder: Path | None) -> Counter[str]:
    """Count launches by kernel from now on, and keep the code of each variant in ``folder``."""
    from drivetrain_triton import launch

    counts: Counter[str] = Counter()
    kept: dict[tuple[str, int], Any] = {}
    plain = launch.Kernel._launch

    def counted(self: Any, grid: Any, *args: Any, **options: Any) -> Any:
        compiled = plain(self, grid, *args, **options)
        if launch.COLLECTING.get() is not None:
            return compiled
        name = self.__name__
        counts[name] += 1
        if folder is not None and (name, id(compiled)) not in kept:
            kept[name, id(compiled)] = compiled
            code = (getattr(compiled, "asm", None) or {}).get("cubin")  # without it no proof
            (folder / f"{name}.{len(kept)}.cubin").write_bytes(code or b"")
        return compiled

    launch.Kernel._launch = counted
    return counts


def say(kind: str, value: Any) -> None:
    """A line for the outer part."""
    print(f"{kind} {json.dumps(value)}", flush=True)


def run_loads(names: list[str], folder: Path | None) -> int:
    """Run loads in turn; with a ``folder`` for the code of kernels, what can be is compiled side by side first."""
    import torch

    torch.manual_seed(0)
    from sanitize_loads import LOADS, Poisoned, every_kernel, site_of

    from drivetrain_triton.launch import compiling

    counts, site, status = watched(folder), site_of("cuda"), 0
    chosen = [load for load in LOADS if not names or load.name in names]
    say("PLANNED", {"loads": {load.name: load.kernels for load in chosen}, "every": sorted(every_kernel()),
                    "whole": len(chosen) == len(LOADS)})  # fmt: skip
    for load in chosen:
        begin, problem = time.monotonic(), ""
        counts.clear()
        try:
            if folder is not None and load.ahead:
                with compiling():
                    load.run(site)
            with Poisoned():
                load.run(site)
            torch.cuda.synchronize()
        except Exception:
            problem, status = traceback.format_exc()[-2000:], 1
        seconds = round(time.monotonic() - begin, 1)
        say("LOAD", {"name": load.name, "seconds": seconds, "kernels": dict(counts), "problem": problem})
    return status


@dataclass
class Tool:
    """A process of the inner part, under a tool or (``plain``) none. ``text``: all that it printed."""

    name: str
    process: subprocess.Popen[str]
    begin: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    loads: dict[str, Any] = field(default_factory=dict)
    planned: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None  # until it ended

    @classmethod
    def start(cls, name: str, args: argparse.Namespace, kernels: Path) -> Tool:
        """Start it. ``--libraries``: where the tool's own lie, if not where it looks; they need each other."""
        environment = {**os.environ, **ENVIRONMENT}
        command = [sys.executable, __file__, "--inner", "--only", *args.only]
        if name == "plain":
            command += ["--kernels", str(kernels)]
        else:
            more = ["--padding", "256"] if name == "memcheck" else []
            more += ["--injection-path", args.libraries] if args.libraries else []
            command = [args.sanitizer, "--tool", name, "--print-limit", "10000", *more, *command]
            if args.libraries:
                paths = (args.libraries, os.environ.get("LD_LIBRARY_PATH"))
                environment["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        tool = cls(name, subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes))
        threading.Thread(target=tool.listen, daemon=True).start()
        return tool

    def listen(self) -> None:
        """Read until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("PLANNED "):
                self.planned = json.loads(line[8:])
            elif line.startswith("LOAD "):
                load = json.loads(line[5:])
                self.loads[load.pop("name")] = load
        self.process.wait()
        self.seconds = round(time.monotonic() - self.begin, 1)

    def stop(self) -> None:
        """End it and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.lines.append("stopped: it took too long\n")

    def ran(self) -> Counter[str]:
        """How often each kernel ran."""
        return sum((Counter(load["kernels"]) for load in self.loads.values()), Counter())

    def missing(self) -> list[str]:
        """Kernels that did not run although the loads are there for them."""
        wanted = {kernel for kernels in self.planned.get("loads", {}).values() for kernel in kernels}
        wanted |= set(self.planned.get("every", ())) if self.planned.get("whole") else set()
        return sorted(wanted - set(self.ran()))

    def result(self, kernels: Kernels) -> dict[str, Any]:
        """What it found so far."""
        text = "".join(self.lines)
        ours = {*self.planned.get("every", ()), *CONTROLS}
        found = judged(text, kernels, RACING, ours if self.planned else ())
        if self.name == "plain":
            found |= {"errors": 0, "left": 0}
        blind = self.name == "racecheck" and RACING in self.ran() and not found["expected"]
        ended = self.process.poll() == 0 and bool(self.planned) and set(self.loads) == set(self.planned["loads"])
        problems = [name for name, load in self.loads.items() if load["problem"]]
        found |= {"clean": ended and found["left"] == 0 and not problems and not self.missing() and not blind}
        found |= {"ended": ended, "problems": problems, "missing": self.missing(), "sees_no_race": blind}
        found |= {"seconds": self.seconds, "loads": self.loads}
        if not found["clean"]:
            found["output"] = text[-20000:]
        return found


def lacking(calls: list[dict[str, Any]]) -> dict[str, list[str]]:
    """By tool, the kernels of ``plugins/triton`` that no clean call has had."""
    every = {kernel for call in calls for kernel in call["every"]}
    left: dict[str, set[str]] = {}
    for call in calls:
        for name, found in call["tools"].items():
            had = {kernel for load in found["loads"].values() for kernel in load["kernels"]}
            left[name] = left.get(name, every) - (had if found["clean"] else set())
    return {name: sorted(kernels) for name, kernels in left.items()}


def save(path: Path | None, facts: dict[str, Any], call: dict[str, Any]) -> list[dict[str, Any]]:
    """Write all calls of a commit, this one last; returns them."""
    earlier: list[dict[str, Any]] = []
    if path is not None and path.exists():
        held = json.loads(path.read_text(encoding="utf-8"))
        same = all(held.get(key) == value for key, value in facts.items())
        earlier = [one for one in held["calls"] if one["begun"] != call["begun"]] if same else []
    calls = [*earlier, call]
    if path is not None:
        whole = facts | {"lacking": lacking(calls), "calls": calls}
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return calls


def steps(tools: list[Tool], end: float) -> Iterator[None]:
    """Yield whenever a load or a tool has come to its end; at ``end`` what still runs is stopped."""
    before: list[Any] = []
    while True:
        running = [tool for tool in tools if tool.seconds is None]
        if time.monotonic() > end:
            for tool in running:
                tool.stop()
        now = [(len(tool.loads), tool.seconds) for tool in tools]
        if now != before:
            before = now
            yield
        if not running:
            return
        time.sleep(0.2)


def report(name: str, found: dict[str, Any]) -> None:
    """A few lines for people."""
    ran = {kernel for load in found["loads"].values() for kernel in load["kernels"]}
    counted = f"{found['errors']} reports, {len(found['cleared'])} cleared, {found['expected']} of the control's race"
    print(
        f"{name}: {'clean' if found['clean'] else 'NOT CLEAN'} in {found['seconds']} s: {counted}, {len(ran)} kernels"
    )
    print("  seconds: " + ", ".join(f"{load} {one['seconds']}" for load, one in found["loads"].items()))
    for one in found["cleared"]:
        print("  cleared: " + " / ".join(one["report"]) + "\n    " + " / ".join(one["never_meet"]))
    for what in ("problems", "missing"):
        if found[what]:
            print(f"  {what}: {', '.join(found[what])}")
    for text in found["foreign"]:
        print("  not of ours: " + " / ".join(text))
    if found["sees_no_race"]:
        print("  the race of the control kernel was not reported")
    for load in found["loads"].values():
        print(load["problem"], end="")
    if not found["clean"]:
        print(found["output"][-3000:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="*", default=["memcheck", "racecheck"])
    parser.add_argument("--only", nargs="*", default=[], metavar="LOAD")
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer") or "compute-sanitizer")
    parser.add_argument("--libraries", default="")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for everything")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kernels", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        return run_loads(args.only, args.kernels)
    version = subprocess.run([args.sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    facts = {"machine": platform.machine(), "sanitizer": version.strip().splitlines()[-1]}
    facts |= {"commit": os.environ.get("COMMIT", "")}
    call: dict[str, Any] = {"begun": time.time(), "command": " ".join(["python", *sys.argv]), "every": [], "tools": {}}
    end = time.monotonic() + args.limit
    spec = find_spec("triton")
    assert spec is not None and spec.origin is not None
    with tempfile.TemporaryDirectory() as folder:
        kernels = Kernels(Path(folder), Path(spec.origin).parent / "backends/nvidia/bin/nvdisasm")
        for names in (["plain"], args.tools):
            tools = [Tool.start(name, args, kernels.folder) for name in names]
            for _ in steps(tools, end):
                for tool in tools:
                    call["tools"][tool.name] = tool.result(kernels)
                    call["every"] = tool.planned.get("every", call["every"])
                save(args.json, facts, call)
            for tool in tools:
                report(tool.name, call["tools"][tool.name])
    left = lacking(save(args.json, facts, call))
    print("kernels that no clean call has had: " + json.dumps(left))
    return 0 if all(found["clean"] for found in call["tools"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
