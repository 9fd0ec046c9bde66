"""Names that are fixed or refused, and text that must not leave the machine it was written on.

No ``utils.py``, ``common.py``, ``base.py`` or ``*_v2.py``; no class whose name ends in Engine or Mixin; no
path of somebody's machine and no package index in any file that git knows.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE_NAMES = re.compile(r"^(utils?|common|base|helpers|misc)\.py$|_v\d+\.py$")
CLASS_NAMES = re.compile(r"(Engine|Mixin)$")
# Written in pieces, so that this file does not hold what it looks for.
PLACES = re.compile(
    "|".join(
        (
            r"(?<![\w.:/])/(?:wo" r"rk|ro" r"ot|ho" r"me|Us" r"ers)/\w",
            r"\.\./sha" r"red\b",
            r"pypi\." r"org|pythonhosted\." r"org|npmjs\." r"org|deb\.debian\." r"org|proxy\.golang\." r"org",
        )
    )
)
EXEMPT = ("tests/data/",)


def tracked(root: Path) -> list[Path]:
    """Return the files of the work tree that git tracks or would add; without git, every file."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, capture_output=True, check=False)
    if listing.returncode:
        return sorted(path for path in root.rglob("*") if path.is_file())
    names = listing.stdout.decode().split("\0")
    return sorted(root / name for name in set(names) if name and (root / name).is_file())


def findings(name: str, text: str) -> Iterator[str]:
    """Yield what is wrong with one file, as ``path:line: message``."""
    if FILE_NAMES.search(Path(name).name):
        yield f"{name}:0: the file's name says nothing about what is in it"
    for number, line in enumerate(text.splitlines(), 1):
        for match in PLACES.finditer(line):
            yield f"{name}:{number}: {match.group()!r} names a place that the reader does not have"
    if name.endswith(".py"):
        for node in ast.walk(ast.parse(text, name)):
            if isinstance(node, ast.ClassDef) and CLASS_NAMES.search(node.name):
                yield f"{name}:{node.lineno}: class {node.name}: say what it does instead"


def scan(root: Path) -> tuple[list[str], int]:
    """Return the findings over all text files that git knows, and how many were read."""
    found: list[str] = []
    files = 0
    for path in tracked(root):
        name = path.relative_to(root).as_posix()
        if name.startswith(EXEMPT) or path.is_symlink():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        files += 1
        found += findings(name, text)
    return found, files


def main(arguments: list[str] | None = None) -> int:
    """Print every finding and their number; 1 unless it is 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--root", type=Path, default=ROOT)
    found, files = scan(parser.parse_args(arguments).root)
    for finding in found:
        print(finding)
    print(f"words: {len(found)} findings in {files} files")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main())
