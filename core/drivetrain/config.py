"""The configuration, resolved once into a frozen value. The only module that reads the process's environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from drivetrain.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
POLICIES = ("fair", "fcfs", "priority", "shortest-uncached-first")
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_PROBE_SECONDS = 3600.0
RANGES: dict[str, tuple[int, int]] = {
    "max_model_len": (0, 2**31 - 1),
    "max_num_seqs": (1, 65536),
    "max_num_batched_tokens": (1, 2**24),
    "max_adjusted_seqs": (0, 65536),
    "block_size": (0, 65536),
    "cache_bytes": (0, 2**50),
    "tensor_parallel_size": (1, 1024),
    "depth": (0, 64),
    "num_threads": (1, 1024),
    "seed": (-(2**63), 2**64 - 1),
    "port": (0, 65535),
    "max_queued_requests": (1, 2**31 - 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an operator can set about the engine; field names are the long flags with underscores.

    ``max_model_len`` 0: the model's own. ``memory_utilization``: the part of the device's free memory that the
    engine may use in all. ``cache_bytes``: the cache's size, overriding what the memory plan would give.
    ``depth`` 0: the backend's own. ``max_num_batched_tokens``: query tokens a step. ``max_adjusted_seqs``: requests
    with penalties, biases, bad words or a minimum length that run at once; others wait (0: they are refused).
    """

    model: str
    device: str = "auto"
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    served_model_name: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    cache_dtype: str = "auto"
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    max_model_len: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_adjusted_seqs: int = 32
    block_size: int = 0
    enable_prefix_caching: bool = True
    memory_utilization: float = 0.0
    cache_bytes: int = 0
    tensor_parallel_size: int = 1
    depth: int = 0
    scheduling_policy: str = "fair"
    deterministic: bool = False
    strict: bool = False
    num_threads: int | None = None
    seed: int = 0
    probe_timeout: float = 30.0
    backend_options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_kinds(self)
        if not self.model:
            raise ConfigError("no model given", fix="name it: engine serve MODEL (a directory, a file or a hub id)")
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load-format", self.load_format, LOAD_FORMATS)
        _one_of("scheduling-policy", self.scheduling_policy, POLICIES)
        _check_ranges(self)
        if not 0.0 <= self.memory_utilization <= 1.0:
            raise ConfigError(
                f"--memory-utilization is {self.memory_utilization}",
                fix="give a part above 0 and up to 1, such as 0.5; 0 stands for the default",
            )
        check_probe_timeout(self.probe_timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All that an operator can set about the HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_queued_requests: int = 1024
    log_level: str = "info"

    def __post_init__(self) -> None:
        _check_kinds(self)
        _one_of("log-level", self.log_level, LOG_LEVELS)
        _check_ranges(self)


def check_probe_timeout(seconds: float) -> None:
    """Raise ConfigError for a time that can't be waited."""
    if not 0.0 < seconds <= MAX_PROBE_SECONDS:
        raise ConfigError(
            f"--probe-timeout is {seconds}", fix=f"give seconds, above 0 and up to {MAX_PROBE_SECONDS:.0f}"
        )


# By a field's annotation: what to give, and the test. Whole numbers and named choices have checks of their own.
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda v: isinstance(v, str)),
    "str | None": ("text", lambda v: v is None or isinstance(v, str)),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "float": ("a number", lambda v: isinstance(v, int | float) and not isinstance(v, bool)),
    "Mapping[str, str]": (
        "text by text",
        lambda v: isinstance(v, Mapping) and all(isinstance(one, str) for pair in v.items() for one in pair),
    ),
}


def _check_kinds(config: EngineConfig | ServerConfig) -> None:
    for f in fields(config):
        what, test = KINDS.get(str(f.type), ("", lambda _: True))
        if not test(getattr(config, f.name)):
            raise ConfigError(f"--{f.name.replace('_', '-')} is {getattr(config, f.name)!r}", fix=f"give {what}")


def _check_ranges(config: EngineConfig | ServerConfig) -> None:
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name not in RANGES or (value is None and f.default is None):
            continue
        low, high = RANGES[f.name]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"--{f.name.replace('_', '-')} is {value!r}", fix=f"give a whole number, {low} to {high}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value).lower(), allowed, 1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(allowed)}"
        raise ConfigError(f"--{name} is {value!r}", fix=hint)


def environment() -> dict[str, str]:
    """Return a copy of the process's environment."""
    return dict(os.environ)


_given: dict[str, str] = {}  # variables that are here because a backend asked for them, as they were set


def set_environment(values: Mapping[str, str]) -> None:
    """Set variables that a backend needs before torch loads; clashes are checked by the caller."""
    os.environ.update(values)
    note_environment(values)


def note_environment(values: Mapping[str, str]) -> None:
    """Remember variables that were set for a backend by the process that started this one."""
    _given.update(values)


def was_given(name: str) -> bool:
    """Return whether a variable is what was set for a backend: not the user's, who can't unset it."""
    return name in _given and os.environ.get(name) == _given[name]


def unset_environment(names: Iterable[str]) -> None:
    """Take back variables."""
    for name in names:
        os.environ.pop(name, None)
        _given.pop(name, None)


def hub_cache() -> Path:
    """Return where the model hub's own tools keep what they download."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"
