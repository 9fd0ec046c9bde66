"""The tokenizer's side of the front end: encoding and templates in threads, detokenizers, stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np

from drivetrain.server.assembly import Detokenizer, Stops

THREADS = 2
T = TypeVar("T")


class Text(Protocol):
    """What the front end asks of a tokenizer. Encoding and templates may be called from several threads."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def has_template(self) -> bool: ...
    def encode(self, text: str, special: bool) -> np.ndarray: ...
    def words(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]: ...
    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> np.ndarray: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...
    def detokenizer(self, prompt: np.ndarray, *, skip_special: bool) -> Detokenizer: ...
    def stops(self, strings: tuple[str, ...], *, include: bool) -> Stops: ...


class TextPool:
    """Runs what takes long off the event loop's thread: a long prompt delays nobody's stream."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call ``work`` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)
