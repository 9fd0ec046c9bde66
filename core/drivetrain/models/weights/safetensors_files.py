"""Safetensors checkpoints: one file or shards with an index, memory-mapped and read tensor by tensor, or by place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.errors import WeightsError
from drivetrain.models.weights.checkpoint import Stored, TensorInfo

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
MOST_HEADER = 100_000_000  # bytes, as in the format's own library
FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """All tensors of a directory's safetensors files. Headers are checked when it is made; data is read on demand."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._files: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        claimed = self._index()
        for path in self._paths(claimed):
            for name, (info, offset) in _header(path).items():
                if name in self._where:
                    raise WeightsError(f"tensor {name} is in both {self._where[name].name} and {path.name}")
                self._where[name], self._infos[name], self._offsets[name] = path, info, offset
        for name, shard in claimed.items():
            if self._where.get(name, Path()).name != shard:
                raise WeightsError(
                    f"{INDEX} says that {name} is in {shard}, which does not hold it",
                    fix="download that shard again",
                )

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        path = self.stored(name).path
        if path not in self._files:
            from safetensors import SafetensorError, safe_open

            try:
                self._files[path] = safe_open(str(path), framework="pt", device="cpu")
            except SafetensorError as error:
                raise _cut(path, str(error)) from error
            except OSError as error:
                raise WeightsError(f"{path} can't be read: {error}", fix="check the file") from error
        tensor: torch.Tensor = self._files[path].get_tensor(name)
        return tensor.to(dtype)

    def stored(self, name: str) -> Stored:
        path, dtype = self._where[name], self._infos[name].dtype
        if dtype not in {DTYPES[kind][0] for kind in FLOATS}:
            raise WeightsError(
                f"tensor {name} of {path.name} has dtype {dtype}",
                fix="this engine loads float weights; quantized formats are not served yet",
            )
        return Stored(path=path, offset=self._offsets[name], dtype=dtype)

    def close(self) -> None:
        self._files.clear()

    def _index(self) -> dict[str, str]:
        path = self._directory / INDEX
        if not path.exists():
            return {}
        try:
            table = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): str(shard) for name, shard in table.items()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{path} is not an index of shards: {error!r}", fix="download it again") from error

    def _paths(self, claimed: dict[str, str]) -> list[Path]:
        if not claimed:
            if (self._directory / SINGLE).is_file():
                return [self._directory / SINGLE]
            paths = sorted(self._directory.glob("*.safetensors"))
            if not paths:
                pickles = sorted(p.name for p in self._directory.glob("*.bin")) + sorted(
                    p.name for p in self._directory.glob("*.pt*")
                )
                held = f"; {', '.join(pickles[:3])} would be unpickled, which can run code" if pickles else ""
                raise WeightsError(
                    f"{self._directory} holds no .safetensors file{held}",
                    fix="convert the weights to safetensors",
                )
            return paths
        paths = [self._directory / name for name in sorted(set(claimed.values()))]
        for path in paths:
            if path.parent != self._directory:
                raise WeightsError(f"{INDEX} names {path}, outside the checkpoint", fix="repair the index")
            if not path.exists():
                raise WeightsError(f"shard {path.name} is missing from {self._directory}", fix="download it")
        return paths


def _header(path: Path) -> dict[str, tuple[TensorInfo, int]]:
    """Read and check one file's header (format: 8 bytes of length, JSON, data). Returns tensors and their places."""
    table, begin, size = _table(path)
    found = {}
    for name, entry in table.items():
        if name != "__metadata__":
            found[name] = _entry(path, name, entry, begin, size)
    _check_places(found, path, begin, size)
    return found


def _table(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header, where the data begins, and the file's bytes."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise _cut(path, f"its header needs {length + 8} bytes, the file has {size}")
            if length > MOST_HEADER:
                raise _cut(path, f"its header has {length} bytes, the format allows {MOST_HEADER}")
            text = file.read(length)
    except OSError as error:
        fix = "download it" if isinstance(error, FileNotFoundError) else "check the file and its permissions"
        raise WeightsError(f"{path} can't be read: {error.strerror or error}", fix=fix) from error
    try:
        table = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, path))
    except (ValueError, RecursionError) as error:
        raise _cut(path, f"its header is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise _cut(path, f"its header is a {type(table).__name__}, not tensors by name")
    return table, 8 + length, size


def _entry(path: Path, name: str, entry: Any, first: int, size: int) -> tuple[TensorInfo, int]:
    """Check what the header says of one tensor: what it is, and its place in the file."""
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _cut(path, f"tensor {name} has no dtype, shape and offsets") from error
    if not isinstance(kind, str) or kind not in DTYPES:
        raise WeightsError(f"tensor {name} of {path.name} has the unknown dtype {kind}")
    if not all(type(one) is int and one >= 0 for one in (*shape, begin, end)):
        raise _cut(path, f"tensor {name} has the shape {list(shape)} and the offsets {begin}, {end}")
    nbytes = math.prod(shape) * DTYPES[kind][1]
    if end - begin != nbytes:
        raise _cut(path, f"tensor {name} of shape {list(shape)} claims {end - begin} bytes")
    if first + end > size:
        raise _cut(path, f"tensor {name} ends at byte {first + end}, the file has {size}")
    return TensorInfo(shape=shape, dtype=DTYPES[kind][0], nbytes=nbytes), first + begin


def _check_places(found: Mapping[str, tuple[TensorInfo, int]], path: Path, begin: int, size: int) -> None:
    """The format has tensors lie one after another, from the header's end to the file's. WeightsError otherwise."""
    at = begin
    for offset, nbytes, name in sorted((offset, info.nbytes, name) for name, (info, offset) in found.items()):
        if offset != at:
            raise _cut(path, f"tensor {name} begins at byte {offset}, the one before it ends at {at}")
        at += nbytes
    if at != size:
        raise _cut(path, f"its tensors end at byte {at}, the file has {size}")


def _once(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    """JSON's objects, but a name may not come twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise WeightsError(f"tensor {twice} is in {path.name} twice", fix="download it again")
    return found


def _cut(path: Path, what: str) -> WeightsError:
    return WeightsError(f"{path} is damaged or cut short: {what}", fix="download it again")
