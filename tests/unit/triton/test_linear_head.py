"""Heads without logits: which rows, the best of all panels, and what the compiler makes of the rest."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from drivetrain_triton.linear_tiles import is_best_kept
from drivetrain_triton.target import INTERPRETER
from tests.unit.triton.interpreted import interpreted
from tests.unit.triton.test_linear_aot import SHARED, compiled

with interpreted():
    from drivetrain_triton import draws

ROOT = Path(__file__).resolve().parents[3]
A, C = (128256, 4096), (151936, 1024)


def keys_of(values: np.ndarray) -> np.ndarray:
    """Joined keys int64 of logits, whose columns are tokens."""
    bits = (values.astype(np.float32) + np.float32(0)).view(np.int32)
    keys = np.where(np.isnan(values), 0x7FFFFFFF, np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)).astype(np.int64)
    return keys << 32 | (0x7FFFFFFF - np.arange(values.shape[1]))


@pytest.mark.parametrize("pieces", [1, 4, 128, 594, draws.TILE, draws.TILE + 1, 2374])
def test_the_best_of_any_number_of_panels(pieces):
    values = np.random.default_rng(pieces).normal(size=(6, pieces)).astype(np.float32)
    values[1] = -np.inf
    values[2, [pieces // 2, pieces - 1]] = np.nan
    values[3] = -3.0
    values[4, pieces - 1] = 9.0
    keys = keys_of(values)
    tokens, logits = draws.choose_best(torch.from_numpy(keys), INTERPRETER)
    values[2] = np.where(np.isnan(values[2]), np.inf, values[2])
    assert tokens.tolist() == values.argmax(1).tolist() and tokens.dtype == torch.int32
    assert tokens[1:5].tolist() == [0, pieces // 2, 0, pieces - 1]
    assert logits[2].isnan(), "a row that is no number shows it"
    assert np.array_equal(np.delete(logits.numpy(), 2), np.delete(values.max(1), 2))


@pytest.mark.parametrize(
    ("shape", "taken", "left"),
    [
        (C, (2, 4, 8, 64, 65, 128, 224, 256, 384, 512, 1024), (0, 1, 129, 160, 192)),
        (A, (2, 4, 8, 64), (0, 1, 65, 128, 256, 260, 512, 1024)),  # the vendor's product is too far ahead
        ((151936, 2048), (2, 64), (1, 65, 256)),
        ((34048, 1024), (64,), (65, 128)),  # a second round for one tile of vocabulary
        ((1000, 1024), (2, 64), (1, 65, 128, 256)),
        ((1000, 1028), (), (1, 2, 64, 128, 1024)),
    ],
)
def test_rows_are_taken_where_it_pays(shape, taken, left):
    assert all(is_best_kept(rows, *shape, 90, 2, 132) for rows in taken)
    assert not any(is_best_kept(rows, *shape, 90, 2, 132) for rows in left)
    for other in ((80, 2), (100, 2), (90, 4)):
        assert not any(is_best_kept(rows, *shape, *other, 132) for rows in (*taken, *left))


def test_the_best_key_of_a_panel_is_the_right_one(tmp_path):
    """The kernels' last step, run on the host as it is compiled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.unit.triton.best_panels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("right") == 20


def test_heads_compile_within_limits(tmp_path):
    lines = compiled(90, tmp_path, "head")
    assert {line["kernel"] for line in lines} == {"stream_products", "wide_best"}
    for line in lines:
        assert line["stack"] == 0 and line["shared"] <= SHARED[90] and line["wgmma"] and line["copies"], line
        assert 0 < line["first_weight"] < line["wait"], line
        if line["kernel"] == "wide_best":
            assert line["products"] == 8 and line["waits"] == 4, line
