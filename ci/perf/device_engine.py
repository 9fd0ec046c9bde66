"""The engine on an accelerator with dense models of random weights: the protocol that other engines were measured by.

    python ci/perf/device_engine.py [--device cuda] [--models A C] [--cases decode ...] [--json FILE] [--scale tiny]

bfloat16, greedy, end tokens ignored, prompts of token ids from a fixed generator, sequences of up to 8,192 tokens, no
tokenizer. Times are wall times of one call over a whole batch.

- decode: prompts of 128 tokens; (median t(144 new) - median t(16 new)) / 128 over 3 repeats each, after a warm-up.
- throughput: 512 requests 512 -> 256 and 1,024 requests 1,024 -> 128, prefix cache off, after one warm-up pass.
- prefill: 16 prompts of 4,096 tokens, one new token. ttft: one prompt of 4,096, one new token: miss, full hit,
  hit and 32 more; and one of 16 tokens.
- pauses: milliseconds between the tokens of 64 rows from the moment the engine is ready, and later.
- start: a new process to its first token, import included, with empty and with warm kernel caches.
- files: the same with the weights in safetensors files, which lie in the page cache.
- memory: the plan against what the device reports, after work of every batch size; the cache's share of the card.
- long: a prompt of 100,000 tokens: its seconds, and a decode step at that context.

Floors are from rates that the same run measures, see device_models.py. The file is written after every case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from device_cases import CASES, FULL, SMALL, Run
from device_models import TITLES, Rates, Sizes, config_of, write_model
from device_rates import commit_of

HERE = Path(__file__).parent
DETAILS = ("seconds", "figures", "decode_seconds", "empty_caches", "warm_caches")  # in the file only


def measured_rates(args: argparse.Namespace) -> dict[str, Any]:
    """Rates, machine and versions, from a process of their own."""
    command = [sys.executable, str(HERE / "device_rates.py"), "--device", args.device, "--scale", args.scale]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


class Record:
    """What was found so far; the file is written anew after every addition."""

    def __init__(self, args: argparse.Namespace, first: dict[str, Any]) -> None:
        self._file = args.json
        self.data: dict[str, Any] = {
            "machine": first["machine"],
            "versions": first["versions"],
            "commit": commit_of(args.commit),
            "command": "python ci/perf/device_engine.py " + " ".join(Path(one).name for one in sys.argv[1:]),
            "scale": args.scale,
            "loop": args.loop,
            "settings": {"max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": args.max_num_batched_tokens},
            "rates": first["rates"],
            "models": {},
        }
        self.write()

    def add(self, model: str, case: str, found: dict[str, Any]) -> None:
        """Keep a case's figures and print them in short."""
        self.data["models"][model][case] = found
        print(f"{model} {case}: {json.dumps(brief(found))}", flush=True)
        self.write()

    def write(self) -> None:
        """Write the file, if one was asked for."""
        if self._file:
            Path(self._file).write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")


def brief(value: Any) -> Any:
    """Round numbers and drop lists of single times, for the screen."""
    if isinstance(value, dict):
        return {name: brief(one) for name, one in value.items() if name not in DETAILS and not isinstance(one, list)}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def measure(args: argparse.Namespace, record: Record, name: str, folder: Path) -> None:
    """Run all cases of one model; one that fails is noted, and the next gets an engine of its own."""
    tiny = args.scale == "tiny"
    run = Run(
        args=args,
        name=name,
        folder=write_model(name, folder, tiny=tiny),
        rates=Rates(read=record.data["rates"]["read"], products=record.data["rates"]["products"]),
        counts=SMALL if tiny else FULL,
        sizes=Sizes.of(config_of(name, tiny=tiny)),
        longest=config_of(name, tiny=tiny)["max_position_embeddings"],
    )
    record.data["models"][name] = {"shape": TITLES[name], "scale": args.scale, "open_seconds": run.starts}
    try:
        for title, case in (one for wanted in args.cases for one in CASES[wanted]):
            if time.monotonic() > args.end:
                record.add(name, title, {"skipped": "the time given with --budget was over"})
                continue
            try:
                found = case(run)
            except Exception as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"[:2000]}
                run.close()
            record.add(name, title, found)
    finally:
        run.close()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", choices=tuple(TITLES), default=list(TITLES))
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--loop", choices=("process", "inline"), default="process")
    parser.add_argument("--passes", type=int, default=3, help="counted passes of a throughput load")
    parser.add_argument("--budget", type=float, default=1e9, help="begin no case after that many seconds")
    parser.add_argument("--commit", default=os.environ.get("COMMIT", ""), help="where git can't be asked")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--memory-utilization", type=float, default=0.0)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--backend-option", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    args.end = time.monotonic() + args.budget
    return args


def main() -> int:
    args = arguments()
    record = Record(args, measured_rates(args))
    print(json.dumps(brief(record.data["rates"])), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            measure(args, record, name, Path(folder, name))
    record.data["rates_after"] = measured_rates(args)["rates"]
    record.write()
    return int(any("error" in case for model in record.data["models"].values() for case in model.values()))


if __name__ == "__main__":
    sys.exit(main())
