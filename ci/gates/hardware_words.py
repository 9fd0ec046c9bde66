"""No hardware in the core and the contract: no vendor, device or kernel-language name anywhere in their text.

Code, strings, comments, docstrings and data files alike are read. An identifier is split at underscores,
digits and capitals, so that ``cuda_graph`` and ``CudaGraph`` are found and ``intelligent`` is not. Only
``cpu`` and ``meta`` may name a device type. Prints ``hardware words: N``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "plugins/api")
TEXT = {".py", ".pyi", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".jinja", ".cfg", ".html"}

WORDS = frozenset(
    # vendors and their products
    "nvidia amd intel habana gaudi ascend huawei qualcomm tenstorrent graphcore cerebras groq cambricon "
    "geforce radeon xeon epyc hopper blackwell ampere "
    # device types and platforms
    "cuda rocm hip xpu npu hpu tpu mps mtia ipu xla musa mlu vulkan opencl sycl privateuseone mirage "
    # kernel languages and libraries
    "triton mkldnn onednn cudnn cublas cublaslt cutlass rocblas hipblas aiter mkl nvml nvlink nvrtc cudart "
    # collective libraries
    "nccl rccl xccl hccl ccl gloo "
    # execution models and instruction sets
    "warp warps wavefront wavefronts ptx sass amdgcn avx amx hbm".split()
)
TORCH_PARTS = ("cuda", "xpu", "accelerator", "backends", "Generator", "ops")
DEVICE_LITERALS = frozenset({"cpu", "meta"})
PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(rf"\btorch\.({'|'.join(TORCH_PARTS)})\b"), "a part of torch that belongs to some device"),
    (re.compile(r"\.cuda\s*\("), "a device's own method"),
    (re.compile(r"\bpin_memory\b|\brecord_stream\b"), "a device's own method"),
    (re.compile(r"VISIBLE_DEVICES"), "a device's own variable"),
    (re.compile(r"(?<![a-z0-9])gfx\d+|(?<![a-z0-9])sm_?\d{2,3}(?![0-9])", re.IGNORECASE), "an architecture"),
    (re.compile(r"(?<![a-z0-9])([ah]100|h200|g?b200|mi\d{3}x?)(?![a-z0-9])", re.IGNORECASE), "a product"),
)
FORMATS = re.compile(r"float8_\w*fnuz|e[45]m[23]\w*fnuz")
FORMATS_HOME = "core/drivetrain/models/weights/"

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_RUN = re.compile(r"[A-Za-z]+")


class Finding(NamedTuple):
    """One banned word; ``line`` counts from 1."""

    path: str
    line: int
    word: str
    why: str


def words_in(line: str) -> Iterator[str]:
    """Yield the banned words of one line, each once, in lower case."""
    seen: set[str] = set()
    for run in _RUN.findall(line):
        for part in (run, *_PART.findall(run)):
            word = part.lower()
            if word in WORDS and word not in seen:
                seen.add(word)
                yield word


def scan_text(path: str, text: str) -> Iterator[Finding]:
    """Yield what the words and patterns find in any text file."""
    for number, line in enumerate(text.splitlines(), 1):
        for word in words_in(line):
            yield Finding(path, number, word, "a vendor, device or kernel-language name")
        for pattern, why in PATTERNS:
            for match in pattern.finditer(line):
                yield Finding(path, number, match.group(), why)
        if not path.startswith(FORMATS_HOME):
            for match in FORMATS.finditer(line):
                yield Finding(path, number, match.group(), f"a format that belongs in {FORMATS_HOME}")


def scan_code(path: str, text: str) -> Iterator[Finding]:
    """Yield device-type literals other than cpu and meta, and device parts of torch by other names."""
    tree = ast.parse(text, path)
    aliases: set[str] = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "torch" and alias.asname
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.stmt):
            continue
        for literal in _device_literals(node):
            if literal.split(":")[0] not in DEVICE_LITERALS:
                yield Finding(path, node.lineno, repr(literal), "a device type; only cpu and meta are known")
        part = _torch_part(node, aliases)
        if part:
            yield Finding(path, node.lineno, part, "a part of torch that belongs to some device")


def _text(node: ast.AST | None) -> list[str]:
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def _names_device(node: ast.AST) -> bool:
    """Say whether ``x.device.type``, ``device.type``, ``x.device_type`` or ``device_type`` is meant."""
    if isinstance(node, ast.Name):
        return node.id == "device_type"
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value
    of_device = (isinstance(owner, ast.Attribute) and owner.attr == "device") or (
        isinstance(owner, ast.Name) and owner.id == "device"
    )
    return node.attr == "device_type" or (node.attr == "type" and of_device)


def _device_literals(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Call):
        found = [text for k in node.keywords if k.arg in ("device", "device_type") for text in _text(k.value)]
        if node.args and isinstance(node.func, ast.Attribute) and node.func.attr in ("device", "to"):
            found += _text(node.args[0])
        return found
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return [text for side in sides for text in _text(side)] if any(map(_names_device, sides)) else []
    return []


def _torch_part(node: ast.AST, aliases: set[str]) -> str:
    if isinstance(node, ast.ImportFrom) and node.module == "torch":
        parts = [alias.name for alias in node.names if alias.name in TORCH_PARTS]
        return f"from torch import {parts[0]}" if parts else ""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}" if node.value.id in aliases and node.attr in TORCH_PARTS else ""
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
    if named and isinstance(node, ast.Call) and len(node.args) > 1:
        owner, key = node.args[0], _text(node.args[1])
        if isinstance(owner, ast.Name) and owner.id in aliases | {"torch"} and key and key[0] in TORCH_PARTS:
            return f"getattr({owner.id}, {key[0]!r})"
    return ""


def scan(root: Path, folders: tuple[str, ...] = FOLDERS) -> tuple[list[Finding], int]:
    """Return the findings in every text file under ``folders``, and how many files were read."""
    findings: list[Finding] = []
    files = 0
    for path in sorted(p for folder in folders for p in (root / folder).rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink() or not path.is_file() or path.suffix not in TEXT or "__pycache__" in name:
            continue
        files += 1
        text = path.read_text(encoding="utf-8")
        findings += [Finding(name, 0, word, "in the file's name") for word in words_in(name)]
        findings += scan_text(name, text)
        if path.suffix == ".py":
            findings += scan_code(name, text)
    return findings, files


def main(arguments: list[str] | None = None) -> int:
    """Print every finding and their number; 1 unless it is 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT)
    findings, files = scan(parser.parse_args(arguments).root)
    for finding in findings:
        print(f"{finding.path}:{finding.line}: {finding.word}: {finding.why}")
    print(f"hardware words: {len(findings)} (in {files} files of the core and the contract)")
    return 1 if findings or not files else 0


if __name__ == "__main__":
    sys.exit(main())
