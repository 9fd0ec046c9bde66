"""A memory plan against the card, stage by stage: what is in use, what torch's allocator holds, what was planned.

    python ci/perf/device_memory.py [--device cuda] [--model A] [--max-num-seqs 256] [--max-num-batched-tokens 8192]
                                    [--memory-utilization 0.98] [--json FILE]

The loop runs in this process. Bytes in use are the card's own figure, other processes included.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from device_models import MODELS
from device_offline import Offline

from drivetrain.config import EngineConfig

MIB = 1 << 20


def reading(index: int = 0) -> dict[str, float]:
    """MiB in use on the card, and of torch's allocator: handed out, held, and the most of both."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(index)
    values = {
        "used": total - free,
        "allocated": torch.cuda.memory_allocated(index),
        "reserved": torch.cuda.memory_reserved(index),
        "peak_allocated": torch.cuda.max_memory_allocated(index),
        "peak_reserved": torch.cuda.max_memory_reserved(index),
    }
    return {name: round(value / MIB, 1) for name, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="A", choices=sorted(MODELS))
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--memory-utilization", type=float, default=0.98)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    found: dict[str, Any] = {}

    def note(stage: str) -> None:
        found[stage] = reading()
        print(f"{stage:28s} {found[stage]}", flush=True)

    free, total = torch.cuda.mem_get_info(0)
    print("before anything", (total - free) / MIB, "of", total / MIB)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[args.model]), encoding="utf-8")
        config = EngineConfig(
            model=folder,
            device=args.device,
            dtype="bfloat16",
            load_format="dummy",
            max_model_len=8192,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            memory_utilization=args.memory_utilization,
            enable_prefix_caching=False,
        )
        engine = Offline(config, "inline")
        planned = {k: round(v / MIB, 1) for k, v in engine.figures.items() if k.endswith("_bytes")}
        found["planned"] = planned
        print("planned", planned)
        print("seconds", {k: round(v, 2) for k, v in engine.figures.items() if "seconds" in k})
        note("ready")
        begin, count = time.perf_counter(), 0
        while engine.loop.idle():
            count += 1
        found["captures"] = {"count": count, "seconds": time.perf_counter() - begin}
        found["graphs"] = dict(engine.loop.figures())
        print("captured later", found["captures"], found["graphs"])
        note("all graphs")
        engine.generate(engine.prompts(1, 16), 4)
        note("a short prompt")
        engine.generate(engine.prompts(16, 4096), 2)
        note("16 prompts of 4096")
        engine.generate(engine.prompts(args.max_num_seqs, 128), 32)
        note(f"{args.max_num_seqs} requests")
        engine.generate(engine.prompts(7, 1000), 40)
        note("7 requests")
        engine.close()
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
