"""A vendor's first hour: a backend of a few lines, built and installed as a wheel, serves the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.wheels import build_wheel
from tests.real_model import real_gguf  # noqa: F401  a fixture

HERE = Path(__file__).resolve().parent
GOLDEN = json.loads((HERE.parent / "data/gemma3_270m_golden.json").read_text(encoding="utf-8"))["cases"][0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the vendor's wheel was installed."""
    target = tmp_path_factory.mktemp("vendor")
    wheel = build_wheel(HERE / "vendor", target / "wheels")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target / "site")]
    subprocess.run([*pip, str(wheel)], check=True)
    return target / "site"


def engine(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain.cli.main", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(site)},
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_it_is_short_and_knows_only_the_contract() -> None:
    text = (HERE / "vendor/drivetrain_acme/__init__.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert {line.split()[1].split(".")[0] for line in imports} == {"collections", "drivetrain_api"}


def test_every_op_is_served_by_the_reference(site: Path, real_gguf: Path) -> None:  # noqa: F811
    told = json.loads(engine(site, "explain", str(real_gguf), "--device", "acme", "--json").stdout)
    assert {row["provider"] for row in told["ops"]} == {"reference"} and len(told["ops"]) >= 10


def test_it_serves_the_real_model(site: Path, real_gguf: Path) -> None:  # noqa: F811
    words = ["generate", str(real_gguf), "--device", "acme", "--dtype", "float32", "--temperature", "0", "--json"]
    words += ["--prompt", GOLDEN["prompt"], "--max-tokens", "12", "--max-model-len", "256", "--max-num-seqs", "4"]
    told = engine(site, *words, "--cache-bytes", "64M").stdout
    assert json.dumps(GOLDEN["out_ids"][:12])[1:-1].replace(" ", "") in told.replace(" ", "").replace("\n", "")
