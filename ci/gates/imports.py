"""Who may import whom, where a graph of imports can't tell: what runs at import, what a wheel reaches into.

Rules, each with the name that is printed:
  contract    the contract imports the standard library, typing and pluggy when it is imported; torch and
              numpy only inside functions or for type checkers
  models      model code imports drivetrain.ops, drivetrain.models, drivetrain.errors, the contract, torch
              and the standard library; models/weights also the readers of checkpoint formats
  backend     a backend imports nothing of the core, by name or by a string, and no other backend
  subclass    no class of a backend derives from a class of the contract or of the core
  patch       nobody assigns to an attribute of a module that he imported
  environment in the core and the contract, only core/drivetrain/config.py reads os.environ
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
STDLIB = frozenset(sys.stdlib_module_names) | {"typing_extensions"}
CONTRACT = "plugins/api/drivetrain_api/"
CORE = "core/drivetrain/"
CONTRACT_AT_IMPORT = STDLIB | {"pluggy", "drivetrain_api"}
CONTRACT_WHEN_CALLED = CONTRACT_AT_IMPORT | {"torch", "numpy"}
MODELS = (*STDLIB, "torch", "drivetrain_api", "drivetrain.ops", "drivetrain.models", "drivetrain.errors")
WEIGHTS = (*MODELS, "numpy", "safetensors", "gguf")
SOURCE = (*MODELS, "drivetrain.config")  # where the hub keeps its files is the environment's affair
BY_STRING = ("import_module", "__import__", "find_spec")


class Imported(NamedTuple):
    """One import. ``at_import``: it runs when the module is imported, type checkers aside."""

    module: str
    line: int
    at_import: bool
    by_string: bool


class Finding(NamedTuple):
    """One breach of a rule."""

    path: str
    line: int
    rule: str
    what: str


class Source(NamedTuple):
    """One parsed file. ``package``: the dotted name that its relative imports start from."""

    path: str
    tree: ast.Module
    package: str


def read(root: Path, path: Path) -> Source:
    """Parse a file; its package is counted from the topmost folder that has an ``__init__.py``."""
    parts: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    name = path.relative_to(root).as_posix()
    return Source(name, ast.parse(path.read_text(encoding="utf-8"), name), ".".join(parts))


def imports(source: Source) -> Iterator[Imported]:
    """Yield every import of a file, relative ones made absolute, and those by a literal string."""
    yield from _visit(source.tree, source.package, True)


def _visit(node: ast.AST, package: str, at_import: bool) -> Iterator[Imported]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Imported(alias.name, child.lineno, at_import, False)
        elif isinstance(child, ast.ImportFrom):
            yield from _from(child, package, at_import)
        elif isinstance(child, ast.Call) and _called(child) in BY_STRING and child.args:
            name = child.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Imported(name.value, child.lineno, at_import, True)
        if isinstance(child, ast.If) and _for_type_checkers(child.test):
            for statement in child.body:
                yield from _visit_one(statement, package, False)
            for statement in child.orelse:
                yield from _visit_one(statement, package, at_import)
            continue
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _visit(child, package, at_import and not inside)


def _visit_one(statement: ast.stmt, package: str, at_import: bool) -> Iterator[Imported]:
    yield from _visit(ast.Module(body=[statement], type_ignores=[]), package, at_import)


def _from(node: ast.ImportFrom, package: str, at_import: bool) -> Iterator[Imported]:
    start = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    base = ".".join([*start, *([node.module] if node.module else [])])
    for alias in node.names:
        yield Imported(f"{base}.{alias.name}", node.lineno, at_import, False)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _for_type_checkers(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def within(module: str, allowed: tuple[str, ...] | frozenset[str]) -> bool:
    """Say whether a dotted name is one of ``allowed`` or lies inside one."""
    parts = module.split(".")
    return any(".".join(parts[:n]) in allowed for n in range(1, len(parts) + 1))


def contract_rule(source: Source) -> Iterator[Finding]:
    """Check what the contract imports."""
    if source.path.startswith(CONTRACT):
        for item in imports(source):
            allowed = CONTRACT_AT_IMPORT if item.at_import else CONTRACT_WHEN_CALLED
            if not within(item.module, allowed):
                when = "when it is imported" if item.at_import else "at all"
                yield Finding(source.path, item.line, "contract", f"imports {item.module} {when}")


def models_rule(source: Source) -> Iterator[Finding]:
    """Check what model code imports."""
    if source.path.startswith(CORE + "models/"):
        allowed = WEIGHTS if source.path.startswith(CORE + "models/weights/") else MODELS
        allowed = SOURCE if source.path == CORE + "models/source.py" else allowed
        for item in imports(source):
            if not within(item.module, allowed):
                yield Finding(source.path, item.line, "models", f"imports {item.module}")


def is_backend(path: str) -> bool:
    """Say whether a file belongs to a wheel that is neither the core nor the contract."""
    return path.startswith(("backends/", "plugins/")) and not path.startswith("plugins/api/")


def backend_rule(source: Source) -> Iterator[Finding]:
    """Check that a backend reaches neither the core nor another backend."""
    if is_backend(source.path):
        own = source.package.split(".")[0]
        shared = (own, "drivetrain_api", "drivetrain_triton")
        for item in imports(source):
            if item.module.split(".")[0].startswith("drivetrain") and not within(item.module, shared):
                yield Finding(source.path, item.line, "backend", f"imports {item.module}")


def subclass_rule(source: Source) -> Iterator[Finding]:
    """Check that no backend's class derives from a class of the contract or the core."""
    if is_backend(source.path):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    origin = _origin(base, _names(source))
                    if origin.split(".")[0] in ("drivetrain", "drivetrain_api"):
                        what = f"{node.name} derives from {origin}"
                        yield Finding(source.path, node.lineno, "subclass", what)


def _names(source: Source) -> dict[str, str]:
    """Map the names that imports bind to what they stand for."""
    names: dict[str, str] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.split(".")[0]
                names[alias.asname or head] = alias.name if alias.asname else head
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _origin(node: ast.expr, names: dict[str, str]) -> str:
    """Return the dotted name of an expression, its first part resolved; empty where it is no name."""
    if isinstance(node, ast.Subscript):
        return _origin(node.value, names)
    if isinstance(node, ast.Attribute):
        owner = _origin(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def patch_rule(source: Source) -> Iterator[Finding]:
    """Check that nobody assigns to, deletes or sets an attribute of something imported from elsewhere."""
    names = _names(source)
    for node in ast.walk(source.tree):
        for target in _targets(node):
            origin = _origin(target, names)
            if origin:
                yield Finding(source.path, target.lineno, "patch", f"changes {origin}")


def _targets(node: ast.AST) -> list[ast.expr]:
    """Return the attributes that a statement changes on a plain name or module."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and _called(node) in ("setattr", "delattr") and node.args:
        return [node.args[0]]
    return [target for target in targets if isinstance(target, ast.Attribute)]


def environment_rule(source: Source) -> Iterator[Finding]:
    """Check that only the configuration reads the process's environment."""
    if not source.path.startswith((CORE, CONTRACT)) or source.path == CORE + "config.py":
        return
    names = _names(source)
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute | ast.Name):
            continue
        origin = _origin(node, names)
        if origin in ("os.environ", "os.getenv", "os.putenv", "os.environb"):
            yield Finding(source.path, node.lineno, "environment", f"uses {origin}; read it in config.py")


RULES: tuple[Callable[[Source], Iterator[Finding]], ...] = (
    contract_rule,
    models_rule,
    backend_rule,
    subclass_rule,
    patch_rule,
    environment_rule,
)


def scan(root: Path) -> tuple[list[Finding], int]:
    """Apply every rule to every file of the wheels; return the findings and how many files were read."""
    folders = ("core", "plugins", "backends")
    paths = sorted(p for folder in folders for p in (root / folder).rglob("*.py"))
    sources = [read(root, path) for path in paths]
    return [finding for source in sources for rule in RULES for finding in rule(source)], len(sources)


def main(arguments: list[str] | None = None) -> int:
    """Print every finding and their number; 1 unless it is 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--root", type=Path, default=ROOT)
    findings, files = scan(parser.parse_args(arguments).root)
    for finding in findings:
        print(f"{finding.path}:{finding.line}: {finding.rule}: {finding.what}")
    print(f"imports: {len(findings)} findings in {files} files")
    return 1 if findings or not files else 0


if __name__ == "__main__":
    sys.exit(main())
