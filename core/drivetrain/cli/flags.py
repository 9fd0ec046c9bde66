"""Flags that several commands share, and how they become an ``EngineConfig``. A file's keys equal the flags."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from drivetrain.config import DTYPES, LOAD_FORMATS, LOG_LEVELS, EngineConfig, ServerConfig
from drivetrain.errors import ConfigError, ModelError


def size(text: str) -> int:
    """Parse bytes: a number, or one with K, M, G (powers of 1024), such as 4G."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    body = text.strip().upper().removesuffix("IB").removesuffix("B")
    factor = units.get(body[-1:], 1)
    try:
        value = float(body[:-1] if factor > 1 else body)
    except ValueError:
        value = math.nan
    if not math.isfinite(value * factor):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give bytes or such as 512M, 4G")
    return int(value * factor)


def count(text: str) -> int:
    """Parse a count: a number, or one with k (thousands, of 1024), such as 8k."""
    body = text.strip().lower()
    try:
        return int(body[:-1]) * 1024 if body.endswith("k") else int(body)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def within(low: int, high: int) -> Callable[[str], int]:
    """Return the parser of a count between two bounds, which are meant too."""

    def parse(text: str) -> int:
        value = count(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is out of range; give a whole number, {low} to {high}")
        return value

    return parse


Flag = tuple[str, dict[str, Any]]
ENGINE_FLAGS: tuple[Flag, ...] = (
    (
        "device",
        {"metavar": "NAME[:IDS]", "help": "backend, and devices of it; auto (default) takes the only one"},
    ),
    (
        "backend-option",
        {"metavar": "KEY=VALUE", "action": "append", "help": "an option of the backend; repeatable"},
    ),
    ("revision", {"help": "revision of a hub model"}),
    ("tokenizer", {"metavar": "DIR", "help": "directory with another tokenizer"}),
    ("chat-template", {"metavar": "FILE", "help": "jinja2 file to use in place of the model's own"}),
    ("served-model-name", {"metavar": "NAME", "help": "name in the API (default: the model as given)"}),
    ("dtype", {"choices": DTYPES, "help": "type of weights and activations (auto: the checkpoint's own)"}),
    ("cache-dtype", {"help": "type of cached keys and values (auto: the model's)"}),
    ("load-format", {"choices": LOAD_FORMATS, "help": "checkpoint format; dummy makes random weights"}),
    ("max-model-len", {"type": count, "metavar": "N", "help": "longest prompt plus output, in tokens"}),
    ("max-num-seqs", {"type": count, "metavar": "N", "help": "requests that run at once"}),
    ("max-num-batched-tokens", {"type": count, "metavar": "N", "help": "query tokens a step"}),
    (
        "max-adjusted-seqs",
        {
            "type": within(0, 65536),
            "metavar": "N",
            "help": "requests with penalties, biases, bad words or a minimum length that run at once (default 32)",
        },
    ),
    (
        "block-size",
        {"type": count, "metavar": "N", "help": "tokens a cache block (default: the backend's own)"},
    ),
    (
        "enable-prefix-caching",
        {"action": argparse.BooleanOptionalAction, "help": "reuse equal prompt beginnings"},
    ),
    (
        "memory-utilization",
        {"type": float, "metavar": "PART", "help": "part of the free memory to use in all (0: the default)"},
    ),
    (
        "cache-bytes",
        {"type": size, "metavar": "SIZE", "help": "size of the cache, such as 4G, in place of the plan's"},
    ),
    ("tensor-parallel-size", {"type": count, "metavar": "N", "help": "devices that share each layer"}),
    ("depth", {"type": count, "metavar": "N", "help": "steps in flight (default: the backend's own)"}),
    ("scheduling-policy", {"metavar": "NAME", "help": "fair, fcfs, priority, shortest-uncached-first"}),
    ("deterministic", {"action": argparse.BooleanOptionalAction, "help": "tokens independent of the batch"}),
    ("strict", {"action": argparse.BooleanOptionalAction, "help": "refuse hot ops on the torch reference"}),
    ("num-threads", {"type": count, "metavar": "N", "help": "host threads for computing"}),
    ("seed", {"type": int, "help": "seed from which unseeded requests get theirs"}),
    ("probe-timeout", {"type": float, "metavar": "SECONDS", "help": "how long a backend's probe may take"}),
)
SERVER_FLAGS: tuple[Flag, ...] = (
    ("host", {"help": "address to bind (default 127.0.0.1: this machine only)"}),
    ("port", {"type": int, "help": "port to bind; 0 takes a free one (default 8000)"}),
    ("api-key", {"metavar": "KEY", "help": "require this key as a bearer token, but for /health and /ready"}),
    ("max-queued-requests", {"type": count, "metavar": "N", "help": "requests held before 429 is answered"}),
    ("log-level", {"choices": LOG_LEVELS, "help": "default info"}),
)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, as a positional or as ``--model``, and the configuration file."""
    parser.add_argument("model_word", metavar="MODEL", nargs="?", help="a directory, a .gguf file, or a hub id")
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same, as a flag")
    parser.add_argument("--config", metavar="FILE.yaml", help="read flags from a YAML file; flags given here win")


def add_flags(parser: argparse.ArgumentParser, flags: tuple[Flag, ...]) -> None:
    """Add flags whose absence leaves no trace, so that a file's value or the default stands."""
    for name, options in flags:
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, **options)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json [FILE]``."""
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON, to FILE or standard output")


def configs(arguments: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """Resolve defaults < file < flags. ConfigError for what can't be used, and for files named that are not there."""
    from drivetrain.cli.config_file import check, key_value, read_file

    values: dict[str, Any] = read_file(arguments.config) if getattr(arguments, "config", None) else {}
    given = dict(vars(arguments))
    if given.get("model_word") and given.get("model_flag") and given["model_word"] != given["model_flag"]:
        raise ConfigError(
            f"two models are given: {given['model_word']} and --model {given['model_flag']}", fix="give one"
        )
    model = given.get("model_word") or given.get("model_flag")
    if model:
        values["model"] = model
    options = dict(key_value(text) for text in given.pop("backend_option", []))
    if options:
        values["backend_options"] = {**values.get("backend_options", {}), **options}
    engine = {f.name for f in fields(EngineConfig)}
    server = {f.name for f in fields(ServerConfig)}
    values.update({name: value for name, value in given.items() if name in (engine | server) - {"model"}})
    values.setdefault("model", "")
    config = EngineConfig(**check({k: v for k, v in values.items() if k in engine}, EngineConfig))
    _check_paths(config)
    return config, ServerConfig(**check({k: v for k, v in values.items() if k in server}, ServerConfig))


def _check_paths(config: EngineConfig) -> None:
    """Look for the files that a configuration names beside the model, before anything slow happens."""
    if config.chat_template not in (None, "plain") and not Path(config.chat_template).is_file():
        raise ConfigError(
            f"--chat-template {config.chat_template}: there is no such file", fix="give a Jinja2 file, or `plain`"
        )
    if config.tokenizer is None:
        return
    from drivetrain.models.source import resolve

    path = Path(config.tokenizer).expanduser()
    fix = "give a directory with tokenizer.json, that file, a GGUF file, or the id of a fetched hub model"
    try:
        found = path if path.exists() else resolve(config.tokenizer).path
    except ModelError as error:
        raise ConfigError(f"--tokenizer {config.tokenizer}: {error.message}", fix=fix) from error
    if found.is_dir() and not (found / "tokenizer.json").is_file():
        raise ConfigError(f"--tokenizer {config.tokenizer}: the directory has no tokenizer.json", fix=fix)


def write_json(target: str, data: Any) -> None:
    """Write data as JSON to standard output (``-``) or a file."""
    text = json.dumps(data, indent=2, default=str)
    if target == "-":
        sys.stdout.write(text + "\n")
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {target}: {error.strerror}", fix="give a path that can be written") from error
