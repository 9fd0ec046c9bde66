"""The configuration, resolved once into a frozen value. The only module that reads the process's environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from drivetrain.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
POLICIES = ("fair", "fcfs", "priority", "shortest-uncached-first")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an operator can set about the engine; field names are the long flags with underscores.

    ``max_model_len`` 0: the model's own. ``memory_utilization``: the part of the device's free memory that the
    engine may use in all. ``cache_bytes``: the cache's size, overriding what the memory plan would give.
    ``depth`` 0: the backend's own. ``max_num_batched_tokens``: query tokens a step.
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
        if not self.model:
            raise ConfigError("no model given", fix="name it: engine serve MODEL (a directory, a file or a hub id)")
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load-format", self.load_format, LOAD_FORMATS)
        _one_of("scheduling-policy", self.scheduling_policy, POLICIES)
        for name, low in (
            ("max_model_len", 0),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("block_size", 0),
            ("cache_bytes", 0),
            ("tensor_parallel_size", 1),
            ("depth", 0),
        ):
            if getattr(self, name) < low:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is {getattr(self, name)}", fix=f"give {low} or more")
        if not 0.0 <= self.memory_utilization <= 1.0:
            raise ConfigError(
                f"--memory-utilization is {self.memory_utilization}",
                fix="give a part between 0 and 1, such as 0.5",
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"--num-threads is {self.num_threads}", fix="give 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All that an operator can set about the HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_queued_requests: int = 1024
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}", fix="give a port between 0 (any free one) and 65535")
        if self.max_queued_requests < 1:
            raise ConfigError(f"--max-queued-requests is {self.max_queued_requests}", fix="give 1 or more")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, 1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(allowed)}"
        raise ConfigError(f"--{name} is {value!r}", fix=hint)


def known_keys() -> tuple[str, ...]:
    """Return every key a configuration file may hold, as the long flags are spelt."""
    return tuple(f.name.replace("_", "-") for kind in (EngineConfig, ServerConfig) for f in fields(kind))


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a YAML file whose keys are the long flags. ConfigError for an unknown key, with the nearest name."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}", fix="give the path of a YAML file") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML: {error}", fix="one `flag: value` a line") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path} holds no mapping", fix="one `flag: value` a line")
    known = known_keys()
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("_", "-").lstrip("-")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else "engine serve --help lists the flags"
            raise ConfigError(f"--config {path}: unknown key {key!r}", fix=hint)
        values[name.replace("-", "_")] = value
    return values


def environment() -> dict[str, str]:
    """Return a copy of the process's environment."""
    return dict(os.environ)


def set_environment(values: Mapping[str, str]) -> None:
    """Set variables that a backend needs before torch loads; clashes are checked by the caller."""
    os.environ.update(values)


def hub_cache() -> Path:
    """Return where the model hub's own tools keep what they download."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"
