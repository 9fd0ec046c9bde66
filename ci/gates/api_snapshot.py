"""The public contract, written down: a change of it is a decision, never an accident.

Every public name of ``drivetrain_api`` and ``drivetrain_api.v1`` is described in sorted text (methods with
their signatures, fields with types and defaults, enum members, functions, constants) and compared with
``plugins/api/api_snapshot.txt``. ``--update`` writes the file anew. Annotations are shown as written.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import enum
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "plugins/api/api_snapshot.txt"
MODULES = ("drivetrain_api", "drivetrain_api.v1")
CHANGED = (
    "The public contract changed. If that is meant: write a page in docs/decisions/ that says why and what\n"
    "a vendor must do, raise the version of drivetrain-api, run `make snapshot`, and commit all of it."
)


def public_names(module: ModuleType) -> list[str]:
    """Return ``__all__``, or every name without an underscore that is no module; each exists."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [n for n, value in vars(module).items() if n[0] != "_" and not inspect.ismodule(value)]
    for name in names:
        getattr(module, name)
    return sorted(names)


def annotation(value: Any) -> str:
    """Return an annotation as text."""
    if isinstance(value, str):
        return value
    return value.__name__ if isinstance(value, type) and get_origin(value) is None else repr(value)


def default(value: Any) -> str:
    """Return a default as text that is the same in every process: functions and classes by name."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return value.__qualname__
    text = repr(value)
    if " at 0x" in text:
        raise ValueError(f"a default without a lasting text: {text}; give its class a __repr__")
    return text


def signature(function: Any) -> str:
    """Return ``(a: int, *, b: str = 'x') -> bool``, independent of the Python version."""
    parsed = inspect.signature(function)
    empty = inspect.Parameter.empty
    parameters = [
        p.replace(
            annotation=empty if p.annotation is empty else _Verbatim(annotation(p.annotation)),
            default=empty if p.default is empty else _Verbatim(default(p.default)),
        )
        for p in parsed.parameters.values()
    ]
    result = parsed.return_annotation
    shown = result if result is empty else _Verbatim(annotation(result))
    return str(inspect.Signature(parameters, return_annotation=shown))


class _Verbatim:
    """Text that is shown as it is, without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def describe(name: str, value: Any) -> Iterator[str]:
    """Yield the lines of one public name: a head, and members indented below it."""
    if inspect.isclass(value):
        yield from _describe_class(name, value)
    elif inspect.isroutine(value):
        yield f"def {name}{signature(value)}"
    elif isinstance(value, str | int | float | bool | tuple | frozenset | type(None)) or get_origin(value):
        yield f"{name} = {sorted(value) if isinstance(value, frozenset) else value!r}"
    else:
        yield f"{name}: {type(value).__module__}.{type(value).__qualname__}"


def _describe_class(name: str, kind: type) -> Iterator[str]:
    bases = [base.__name__ for base in kind.__bases__ if base is not object]
    marks = []
    if dataclasses.is_dataclass(kind):
        parameters = kind.__dataclass_params__  # type: ignore[attr-defined]
        marks.append("frozen dataclass" if parameters.frozen else "dataclass")
    if getattr(kind, "_is_runtime_protocol", False):
        marks.append("runtime checkable")
    yield f"class {name}({', '.join(bases)}){' [' + ', '.join(marks) + ']' if marks else ''}"
    if issubclass(kind, enum.Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in kind)
        return
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    yield from (f"    {_describe_field(field)}" for field in fields)
    named = {field.name for field in fields}
    for key, text in sorted(vars(kind).get("__annotations__", {}).items()):
        if key not in named and not key.startswith("_"):
            yield f"    {key}: {annotation(text)}"
    for key, member in sorted(vars(kind).items()):
        if key not in named and (not key.startswith("_") or (key in ("__call__", "__init__") and not fields)):
            yield from (f"    {line}" for line in _describe_member(key, member))


def _describe_field(field: dataclasses.Field[Any]) -> str:
    head = f"{field.name}: {annotation(field.type)}" + ("" if field.kw_only else " (positional)")
    if field.default is not dataclasses.MISSING:
        return f"{head} = {default(field.default)}"
    if field.default_factory is not dataclasses.MISSING:
        return f"{head} = {getattr(field.default_factory, '__name__', 'factory')}()"
    return head


def _describe_member(key: str, member: Any) -> Iterator[str]:
    if isinstance(member, property):
        yield f"property {key}{signature(member.fget)}"
    elif isinstance(member, staticmethod | classmethod):
        yield f"{type(member).__name__} {key}{signature(member.__func__)}"
    elif inspect.isfunction(member) and not member.__module__.startswith("typing"):
        yield f"def {key}{signature(member)}"


def snapshot(modules: tuple[str, ...] = MODULES) -> str:
    """Return the text for the modules, one paragraph a public name."""
    paragraphs = []
    for module_name in modules:
        module = importlib.import_module(module_name)
        paragraphs.append(f"# {module_name}")
        for name in public_names(module):
            paragraphs.append("\n".join(describe(name, getattr(module, name))))
    return "\n\n".join(paragraphs) + "\n"


def compare(old: str, new: str) -> list[str]:
    """Return a unified diff, empty when nothing changed."""
    before, after = old.splitlines(), new.splitlines()
    return list(difflib.unified_diff(before, after, "committed", "now", lineterm="", n=2))


def main(arguments: list[str] | None = None) -> int:
    """Compare, or write with ``--update``; 1 when the committed file differs or is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    new = snapshot()
    names = sum(1 for line in new.splitlines() if line and line[0] not in " #")
    if options.update:
        options.file.write_text(new, encoding="utf-8")
        print(f"contract snapshot: {names} public names written")
        return 0
    if not options.file.exists():
        print(f"{options.file.name} is missing; run `make snapshot` and commit it")
        return 1
    changes = compare(options.file.read_text(encoding="utf-8"), new)
    if changes:
        print("\n".join(changes))
        print(CHANGED)
        return 1
    print(f"contract snapshot: {names} public names, unchanged")
    return 0


if __name__ == "__main__":
    sys.exit(main())
