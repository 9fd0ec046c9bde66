"""A tiny tokenizer, and the real model's."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.models.source import resolve
from drivetrain.tokens import Tokenizer, load_tokenizer
from tests.checkpoints import tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's directory: byte-level BPE of 293 tokens."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(directory, 293)
    return directory


@pytest.fixture(scope="session")
def tiny(tiny_directory: Path) -> Tokenizer:
    return load_tokenizer(None, str(tiny_directory))


@pytest.fixture(scope="session")
def gemma(real_gguf: Path) -> Tokenizer:
    return load_tokenizer(resolve(str(real_gguf)))
