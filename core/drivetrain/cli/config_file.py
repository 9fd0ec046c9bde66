"""``--config FILE.yaml``: its keys are the long flags, its values have the flags' types; nothing is guessed."""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from drivetrain.config import EngineConfig, ServerConfig
from drivetrain.errors import ConfigError

LINES = "one `flag: value` a line"
OPTIONS = ("backend-option", "backend-options")


def read_file(path: str | Path) -> dict[str, Any]:
    """Return a YAML file's values by field. ConfigError for what is no such file, and for a key that is unknown."""
    where = f"--config {path}"
    kinds = {f.name.replace("_", "-"): kind for kind in (EngineConfig, ServerConfig) for f in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in _load(where, path).items():
        name = str(key).replace("_", "-").lstrip("-")
        if name in OPTIONS:
            name, value = OPTIONS[1], _options(f"{where}: {key}", value)
        if name not in kinds:
            raise ConfigError(f"{where}: unknown key {key!r}", fix=_advice(name, kinds))
        field = name.replace("-", "_")
        if field in values:
            raise ConfigError(f"{where}: the key {key!r} is there twice", fix="keep one of them")
        values[field] = value
    for kind in (EngineConfig, ServerConfig):
        own = {f.name for f in fields(kind)}
        values |= check({k: v for k, v in values.items() if k in own}, kind, where=f"{where}: ", before="")
    return values


def check(values: Mapping[str, Any], kind: type, *, where: str = "", before: str = "--") -> dict[str, Any]:
    """Return the values as the fields' types. ConfigError for one of another type: true is no number, 1 is not true."""
    hints = get_type_hints(kind)
    return {
        name: _typed(f"{where}{before}{name.replace('_', '-')}", name, value, hints[name])
        for name, value in values.items()
    }


def key_value(text: str) -> tuple[str, str]:
    """Split ``key=value``. ConfigError where it is something else."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--backend-option {text}", fix="give key=value")
    return key, value


def _typed(label: str, name: str, value: Any, hint: Any) -> Any:
    allowed = get_args(hint) if type(None) in get_args(hint) else (hint,)
    if name == "backend_options" or (value is None and type(None) in allowed):
        return value
    if value is None:
        raise ConfigError(f"{label} has no value", fix="give one, or leave the key out")
    if isinstance(value, dict | list):
        shown = "a mapping" if isinstance(value, dict) else "a list"
        raise ConfigError(f"{label} is {shown}", fix="give one plain value")
    if bool in allowed:
        if not isinstance(value, bool):
            raise ConfigError(f"{label} is {value!r}", fix="give true or false")
        return value
    if int in allowed or float in allowed:
        return _number(label, name, value, whole=int in allowed)
    if not isinstance(value, str):
        raise ConfigError(f"{label} is {value!r}, which is not text", fix="put it in quotes")
    return value


def _number(label: str, name: str, value: Any, *, whole: bool) -> int | float:
    """YAML takes 8k, 4G and 1e9 for text; they are numbers here, as they are on the command line."""
    from drivetrain.cli.flags import count, size

    if isinstance(value, str):
        try:
            return (size(value) if name.endswith("bytes") else count(value)) if whole else float(value)
        except (argparse.ArgumentTypeError, ValueError):
            pass
    elif not isinstance(value, bool) and isinstance(value, int if whole else int | float):
        try:
            return value if whole else float(value)
        except OverflowError:
            pass
    raise ConfigError(f"{label} is {value!r}", fix="give a whole number" if whole else "give a number")


def _options(label: str, value: Any) -> dict[str, str]:
    """``key=value``, a list of such, or a mapping: what the flag says, once or repeated."""
    if isinstance(value, str):
        return dict([key_value(value)])
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return dict(key_value(one) for one in value)
    if not isinstance(value, dict) or any(isinstance(one, dict | list | None) for one in value.values()):
        raise ConfigError(f"{label} is {value!r}", fix="give key=value, a list of such, or a mapping of plain values")
    return {str(k): str(v).lower() if isinstance(v, bool) else str(v) for k, v in value.items()}


def _advice(name: str, known: Iterable[str]) -> str:
    """Say what an unknown key may have meant: another key, or a flag of some commands."""
    from drivetrain.cli.main import COMMANDS, Parser

    having = []
    for command in COMMANDS:
        sub = Parser(prog=command, add_help=False)
        importlib.import_module(f"drivetrain.cli.{command}").add_arguments(sub)
        if f"--{name}" in sub._option_string_actions:
            having.append(f"engine {command}")
    if having:
        return f"--{name} is a flag of {', '.join(having)}: give it on the command line; no file holds it"
    near = difflib.get_close_matches(name, [*known, OPTIONS[0]], 1)
    return f"did you mean {near[0]}?" if near else "engine serve --help lists the flags"


def _load(where: str, path: str | Path) -> dict[Any, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if key.value in seen if isinstance(key, yaml.ScalarNode) else False:
                    line = key.start_mark.line + 1
                    raise ConfigError(f"{where}: the key {key.value!r} is there twice (line {line})", fix="keep one")
                if isinstance(key, yaml.ScalarNode):
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}", fix="give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text: byte {error.start}", fix="give a YAML file in UTF-8") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        what = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{where} is not YAML{line}: {what}", fix=LINES) from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{where} holds no mapping", fix=LINES)
    return data
