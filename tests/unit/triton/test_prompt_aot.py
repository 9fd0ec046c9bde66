"""The attention kernel of long prompts, compiled: what fits, what does not wait for itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_products_run_beside_each_other(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.unit.triton.compiled_prompt"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["shared"] <= 232448 and line["stack"] <= 16 and line["overlaps"], line
        # Keys once, values twice (a last tile may hold unwritten ones), by blocks of 16 tokens and halves of a head.
        assert line["copies"] == 3 * 8 * 2, line
        # Where the assembler can't tell products apart, it lets each wait for the one before.
        assert line["products"] > 4 * line["waits"] > 0, line
