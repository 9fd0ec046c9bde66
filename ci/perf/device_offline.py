"""The offline engine over token ids, and how much of a device's memory is in use: what device measurements share.

The loop runs in a process of its own, as it does under ``LLM`` and under the server; requests go to it and tokens come
back without a tokenizer. ``inline`` runs it in this process.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import psutil

from drivetrain.config import EngineConfig
from drivetrain.launch import open_loop, resolve_device
from drivetrain.params import GenerateRequest, SamplingParams
from drivetrain.server.child import LoopSpec
from drivetrain.server.remote_loop import RemoteLoop

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Offline:
    """An open engine. ``figures``: seconds and bytes of its start, by name; ``started``: seconds until it was open."""

    def __init__(self, config: EngineConfig, place: str = "process", seed: int = 0) -> None:
        begin = time.perf_counter()
        choice = resolve_device(config)
        self.loop: Any
        if place == "process":
            self.loop = opened = RemoteLoop(LoopSpec(config=config, choice=choice), hang_seconds=580.0)
            self.figures: Mapping[str, float] = opened.ready.figures
        else:
            inline = open_loop(config, choice)
            self.loop, self.figures, opened = inline.loop, inline.figures, inline
        self.started = time.perf_counter() - begin
        self.vocabulary: int = opened.vocabulary
        self.first = 0.0
        self.gaps: list[float] = []
        self._random = np.random.default_rng(seed)
        self._number = 0

    def prompts(self, count: int, tokens: int) -> list[np.ndarray]:
        """Return ``count`` prompts of that many tokens that no earlier one shares."""
        return list(self._random.integers(0, self.vocabulary, (count, tokens), dtype=np.int32))

    def generate(self, prompts: Sequence[np.ndarray], new: int) -> float:
        """Complete all prompts with ``new`` tokens each; returns seconds. ``first``: seconds until any token came;
        ``gaps``: seconds between the arrivals of a step's tokens and the next one's.

        RuntimeError for a request that fails, or when tokens are missing.
        """
        waiting = set(range(self._number, self._number + len(prompts)))
        self._number += len(prompts)
        count, self.first = 0, 0.0
        came: list[float] = []
        begin = time.perf_counter()
        for number, prompt in zip(sorted(waiting), prompts, strict=True):
            self.loop.submit(
                GenerateRequest(request_id=number, prompt_ids=prompt, sampling=GREEDY, max_tokens=new, seed=0)
            )
        while waiting:
            for outputs in self.loop.step():
                count += len(outputs.tokens)
                if len(outputs.tokens):
                    came.append(time.perf_counter())
                for end in outputs.finished:
                    if end.reason == "error":
                        raise RuntimeError(f"request {end.request_id} failed: {end.error}")
                    waiting.discard(end.request_id)
        seconds = time.perf_counter() - begin
        self.first = came[0] - begin if came else 0.0
        self.gaps = [later - earlier for earlier, later in pairwise(came)]
        if count != len(prompts) * new:
            raise RuntimeError(f"{count} tokens came, {len(prompts) * new} were asked for")
        return seconds

    def stats(self) -> dict[str, int]:
        """Return figures that say whether a run was what it was meant to be; they come with the loop's next beat."""
        time.sleep(1.0)
        stats = self.loop.stats()
        names = ("preemptions", "prefix_hit_tokens", "prefix_query_tokens", "cache_total")
        return {name: int(getattr(stats, name, 0)) for name in names}

    def close(self) -> None:
        """End it and free the device."""
        self.loop.close()


class DeviceMemory:
    """Bytes in use on the device as the device itself says, by all processes; ``peak`` while it watches, with a look
    every ``interval`` seconds.

    A backend of the host: resident bytes of this process and its children.
    """

    def __init__(self, device: str) -> None:
        name, _, index = device.partition(":")
        self.source = "resident bytes of the processes" if name in ("cpu", "mirage", "mirage-static") else "nvidia-smi"
        self._index = int(index or 0)
        self._library: Any = None
        if self.source == "nvidia-smi":
            self._library = _management_library()
            self.source = "NVML" if self._library else self.source
        self.total = self._read("total")
        self.before = self.peak = self.used()
        self.interval = 0.02
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def used(self) -> int:
        """Return bytes in use now."""
        return self._read("used")

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _read(self, what: str) -> int:
        if self._library:
            handle = self._library.nvmlDeviceGetHandleByIndex(self._index)
            return int(getattr(self._library.nvmlDeviceGetMemoryInfo(handle), what))
        if self.source == "nvidia-smi":
            command = ["nvidia-smi", f"--query-gpu=memory.{what}", "--format=csv,noheader,nounits", "-i"]
            done = subprocess.run([*command, str(self._index)], capture_output=True, text=True, check=True)
            return int(done.stdout) << 20
        return int(psutil.virtual_memory().total) if what == "total" else _resident()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            self.peak = max(self.peak, self.used())


def _management_library() -> Any:
    """NVIDIA's management library, or None where its Python side is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    pynvml.nvmlInit()
    return pynvml


def _resident() -> int:
    own = psutil.Process()
    total = own.memory_info().rss
    for child in own.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
    return int(total)
