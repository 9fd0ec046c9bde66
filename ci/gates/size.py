"""Functions of 60 lines or fewer, files of 400 or fewer. Prints the longest of each; tests are exempt.

Of a compiled kernel (a decorator ``jit``) the body counts alone: thirty arguments, one a line, are no complexity.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import NamedTuple

MAX_FUNCTION = 60
MAX_FILE = 400
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "plugins", "backends", "ci")


class Sized(NamedTuple):
    """A function or a file, and its physical lines (docstring included, decorators not; of a kernel its body's)."""

    lines: int
    where: str
    limit: int


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's lines; of a kernel those after its signature and docstring."""
    end, marks = function.end_lineno or function.lineno, [ast.unparse(mark) for mark in function.decorator_list]
    if not any(mark.split("(")[0].split(".")[-1] == "jit" for mark in marks):
        return end - function.lineno + 1
    told = ast.get_docstring(function, clean=False) is not None
    return end - function.body[1].lineno + 1 if told and len(function.body) > 1 else end - function.body[0].lineno + 1


def measure(root: Path, folders: tuple[str, ...] = FOLDERS) -> tuple[list[Sized], list[Sized]]:
    """Return (functions, files) of every Python file under ``folders``, longest first."""
    functions: list[Sized] = []
    files: list[Sized] = []
    for path in sorted(p for folder in folders for p in (root / folder).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        files.append(Sized(len(text.splitlines()), name, MAX_FILE))
        for node in ast.walk(ast.parse(text, name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(Sized(lines_of(node), f"{name}:{node.lineno} {node.name}", MAX_FUNCTION))
    return sorted(functions, reverse=True), sorted(files, reverse=True)


def main(arguments: list[str] | None = None) -> int:
    """Print the longest function and file and every one over its limit; 1 when there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT)
    root = parser.parse_args(arguments).root
    functions, files = measure(root)
    for kind, sizes in (("function", functions), ("file", files)):
        if sizes:
            print(f"longest {kind}: {sizes[0].lines} lines, {sizes[0].where} (limit {sizes[0].limit})")
    over = [size for size in functions + files if size.lines > size.limit]
    for size in over:
        print(f"too long: {size.where}: {size.lines} lines, {size.limit} allowed")
    print(f"{len(functions)} functions in {len(files)} files, {len(over)} too long")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
