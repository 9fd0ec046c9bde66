"""The memory plan against measured peaks, over models of several shapes on the CPU backend.

    python ci/perf/memory_plan.py MODEL [--json FILE]

Each case is one run of ``engine plan --measure``: MODEL as it is, in float32, with small steps, and dummy models whose
largest term is another one each time. Exit status 1 when a plan misses by more than 5 % or weights are not exact.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cpu_engine import TINY, facts

WITHIN = 0.05
DUMMY = TINY | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 50000,
}
WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
VOCABULARY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_hidden_layers": 2,
    "vocab_size": 150000,
}
SMALL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 1000}
CASES: tuple[tuple[str, dict[str, Any] | None, tuple[str, ...]], ...] = (
    ("the model", None, ()),
    ("the model, float32", None, ("--dtype", "float32")),
    ("the model, small steps", None, ("--max-num-batched-tokens", "512", "--cache-bytes", "200MiB")),
    ("dummy Llama", {}, ()),
    ("wide dummy Llama", WIDE, ("--cache-bytes", "300MiB")),
    ("large vocabulary", VOCABULARY, ("--max-num-seqs", "64", "--cache-bytes", "100MiB", "--dtype", "float32")),
    ("large steps of a small model", SMALL, ("--max-num-batched-tokens", "4096", "--cache-bytes", "64MiB")),
)


def measure(model: str, flags: tuple[str, ...]) -> dict[str, Any]:
    """Run one plan; returns its error, peaks in MiB, and whether the weights were exact."""
    command = [sys.executable, "-m", "drivetrain", "plan", model, "--device", "cpu", "--measure", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    data = json.loads(done.stdout)
    terms = {term["name"]: term["nbytes"] for term in data["terms"]}
    return {
        "error": round(data["measured"]["memory_error"], 4),
        "planned_mib": terms["peak"] >> 20,
        "measured_mib": data["measured"]["measured_peak_bytes"] >> 20,
        "weights_exact": terms["weights"] == data["measured"]["weights_loaded_bytes"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json", metavar="FILE", default=None)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, changes, flags in CASES:
            model, more = args.model, flags
            if changes is not None:
                model, more = str(Path(folder) / name.replace(" ", "-")), ("--load-format", "dummy", *flags)
                Path(model).mkdir()
                Path(model, "config.json").write_text(json.dumps(DUMMY | changes), encoding="utf-8")
            found[name] = measure(model, more)
            print(f"{name}: {found[name]}")
    if args.json:
        Path(args.json).write_text(json.dumps(facts() | {"plans": found}, indent=1) + "\n", encoding="utf-8")
    return int(any(abs(f["error"]) > WITHIN or not f["weights_exact"] for f in found.values()))


if __name__ == "__main__":
    sys.exit(main())
