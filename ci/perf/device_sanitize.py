"""Every kernel of a small engine under compute-sanitizer: reads and writes out of bounds, races in shared memory.

    python ci/perf/device_sanitize.py [--tools memcheck racecheck] [--sanitizer PATH] [--libraries FOLDER] [--json FILE]

A two-layer model with heads of 128 serves random prompts without graphs: prompts alone and beside decode rows, 1 to 40
decode rows, long and short rows, every way of sampling. Each tensor is an allocation of its own, so that a step beyond
its end shows. The kernels that ran are listed; the exit status is 1 if a tool found anything or no kernel ran.

``--inner`` is the part that runs under the tool. Tools run side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
# (prompt lengths, new tokens): together in one engine, one after the other
LOADS = (((300,), 2), ((20, 3), 2), ((40,) * 8, 2), ((17,) * 40, 2), ((700,), 3), ((260, 1, 9, 130), 2))
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def run_all() -> None:
    """Serve the loads; prints how often each kernel ran."""
    import numpy as np
    from device_models import MODELS
    from device_offline import Offline

    from drivetrain.config import EngineConfig
    from drivetrain.params import GenerateRequest, SamplingParams
    from drivetrain_triton import launch

    counts: Counter[str] = Counter()
    plain = launch.Kernel._launch

    def counted(self: Any, grid: Any, *args: Any, **options: Any) -> Any:
        if launch.COLLECTING.get() is None:
            counts[self.__name__] += 1
        return plain(self, grid, *args, **options)

    launch.Kernel._launch = counted
    ways = [
        SamplingParams(temperature=0.0, ignore_eos=True),
        SamplingParams(temperature=0.8, ignore_eos=True, seed=1),
        SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, ignore_eos=True, seed=2, logprobs=2),
    ]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS["C"] | SIZES), encoding="utf-8")
        config = EngineConfig(
            model=folder, device="cuda", dtype="bfloat16", load_format="dummy", max_model_len=1024, max_num_seqs=48,
            max_num_batched_tokens=1024, cache_bytes=32 << 20, backend_options={"graphs": "off"},
        )  # fmt: skip
        engine, number = Offline(config, "inline"), 0
        for lengths, new in LOADS:
            for prompt in (np.arange(length, dtype=np.int32) % SIZES["vocab_size"] for length in lengths):
                engine.loop.submit(
                    GenerateRequest(
                        request_id=number, prompt_ids=prompt, sampling=ways[number % 3], max_tokens=new, seed=number
                    )
                )
                number += 1
            tokens = 0
            while engine.loop.has_work():
                tokens += sum(len(outputs.tokens) for outputs in engine.loop.step())
            if tokens != len(lengths) * new:
                raise RuntimeError(f"{tokens} tokens came of {len(lengths)} prompts of {new}")
        engine.close()
    print("KERNELS " + json.dumps(dict(counts.most_common())), flush=True)


def under(tool: str, sanitizer: str, libraries: str) -> subprocess.Popen[str]:
    """Start the inner part under a tool. ``libraries``: where the tool's own lie, if not where it looks."""
    command = [sanitizer, "--tool", tool, "--target-processes", "all", "--print-limit", "20"]
    command += ["--injection-path", libraries] if libraries else []
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if libraries:  # they need each other
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, (libraries, os.environ.get("LD_LIBRARY_PATH"))))
    return subprocess.Popen(
        [*command, sys.executable, __file__, "--inner"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def found_by(tool: str, process: subprocess.Popen[str], limit: float) -> dict[str, Any]:
    """Wait for a tool; what it said."""
    begin = time.monotonic()
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        text += "\nstopped: it took too long"
    summary = SUMMARY.findall(text)
    kernels = [json.loads(line[8:]) for line in text.splitlines() if line.startswith("KERNELS ")]
    found: dict[str, Any] = {"errors": int(summary[-1]) if summary else None, "kernels": kernels[0] if kernels else {}}
    clean = found["errors"] == 0 and bool(kernels) and process.returncode == 0
    found |= {"clean": clean, "seconds": round(time.monotonic() - begin, 1), "status": process.returncode}
    if not clean:
        found["output"] = text[-6000:]
    print(f"{tool}: {'clean' if clean else 'NOT CLEAN'}, {found['errors']} errors, {len(found['kernels'])} kernels")
    if not clean:
        print(text[-3000:])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer") or "compute-sanitizer")
    parser.add_argument("--libraries", default="")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for all tools")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        run_all()
        return 0
    version = subprocess.run([args.sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    processes = {tool: under(tool, args.sanitizer, args.libraries) for tool in args.tools}
    end = time.monotonic() + args.limit
    tools = {tool: found_by(tool, process, max(1.0, end - time.monotonic())) for tool, process in processes.items()}
    if args.json:
        facts = {"machine": platform.machine(), "sanitizer": version.strip().splitlines()[-1], "model": SIZES}
        facts |= {"commit": os.environ.get("COMMIT", ""), "command": "python ci/perf/device_sanitize.py"}
        args.json.write_text(json.dumps(facts | {"tools": tools}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(found["clean"] for found in tools.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
