"""The loop's side of first_token.py: a loop that notes when moments pass, on the host and on the device.

``first_token_loop:open_watched`` opens it wherever it runs; what it noted goes to the file that is named in the
environment when the loop is closed.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from drivetrain import moments
from drivetrain.config import EngineConfig
from drivetrain.launch import open_loop
from drivetrain.select.choose import Choice

FILE, STAND_INS = "FIRST_TOKEN_FILE", "FIRST_TOKEN_STAND_INS"
KINDS = 4  # requests of a round; odd rounds are marked on the device too
DEVICE = ("planned", "uploaded", "changed", "forward queued", "draws queued", "copy queued")
now = time.perf_counter_ns


class Watch:
    """Moments as they pass. In marked rounds each is followed by an event on the device's stream, and each request
    begins with one that is waited for, so that both clocks can be compared."""

    def __init__(self, runtime: Any) -> None:
        import torch  # not before the engine has: it sets variables for it

        self.seen: list[tuple[str, int]] = []
        self.marks: list[tuple[str, Any, Any, int]] = []  # name, event, the request's first one, when that was over
        self._device = runtime.device if runtime.asynchronous else None
        self._module: Any = torch.get_device_module(runtime.device) if runtime.asynchronous else None
        self._requests = 0
        self._first: tuple[Any, int] | None = None

    def __call__(self, moment: str) -> None:
        self.seen.append((moment, now()))
        if self._module is None:
            return
        if moment == "admitted":
            self._begin()
        elif self._first is not None and moment in DEVICE:
            self.marks.append((moment, self._record(), *self._first))

    def _begin(self) -> None:
        marked = self._requests // KINDS % 2 == 1
        self._requests += 1
        self._first = None
        if marked:
            event = self._record()
            event.synchronize()
            self._first = event, now()
            self.seen[-1] = "admitted", now()

    def _record(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def save(self, path: str) -> None:
        """Write the host's moments, and when the device reached its marks, by the host's clock."""
        if self._module is not None:
            self._module.synchronize(self._device)
        marks = [(name, when + int(first.elapsed_time(event) * 1e6)) for name, event, first, when in self.marks]
        Path(path).write_text(json.dumps({"host": self.seen, "device": marks}), encoding="utf-8")


def open_watched(config: EngineConfig, choice: Choice) -> Any:
    """Open a loop that is watched from now on."""
    opened: Any = open_loop(config, choice)
    loop, close = opened.loop, opened.loop.close
    watch = Watch(opened.runner.runtime)
    moments.watch(watch)

    def closing() -> None:
        moments.watch(None)
        watch.save(os.environ[FILE])
        close()

    loop.close = closing
    if os.environ.get(STAND_INS):
        from first_token_stand_ins import put_stand_ins

        put_stand_ins(opened.runner)
    return opened
