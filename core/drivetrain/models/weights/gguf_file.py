"""The header of a GGUF file (format version 2 and 3): metadata and where tensors lie. Torch-free.

The layout follows the format's specification in the ggml repository (docs/gguf.md). The ``gguf`` package's reader
builds one array object a value, which takes many seconds for a large vocabulary; its dequantization is used as is.
Every count and offset is checked against the file's size before it is used.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.errors import WeightsError

MAGIC = b"GGUF"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor as stored. ``shape``: rows first, as torch has it. ``kind``: ggml's number of the type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int


def _mapped(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} can't be read: {error}", fix="give the path of a GGUF file") from error


class GgufFile:
    """A memory-mapped GGUF file. ``metadata``: key -> value (arrays as lists or numpy); ``tensors``: name -> place."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.data = _mapped(self.path)
        self._at = 0
        self.metadata: dict[str, Any] = {}
        try:
            self.tensors = self._header()
        except RecursionError:
            raise self._damaged("its metadata nests arrays too deeply") from None

    def _header(self) -> dict[str, GgufTensor]:
        if self._take(4) != MAGIC:
            raise WeightsError(f"{self.path} is not a GGUF file", fix="give the path of a GGUF file")
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._damaged(f"GGUF version {version} is not supported (2 and 3 are)")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        if max(num_tensors, num_keys) > len(self.data):
            raise self._damaged(f"it claims {num_tensors} tensors and {num_keys} keys")
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        return self._place([self._tensor() for _ in range(num_tensors)])

    def close(self) -> None:
        """Unmap the file; the header stays."""
        self.data.close()

    def reopen(self) -> None:
        """Map the file again after ``close``, without reading the header again."""
        if self.data.closed:
            self.data = _mapped(self.path)

    def bytes_of(self, tensor: GgufTensor) -> np.ndarray:
        """Return a tensor's stored bytes, uint8 [rows, bytes a row], as a view of the file."""
        flat = np.frombuffer(self.data, np.uint8, tensor.nbytes, tensor.offset)
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        return flat.reshape(rows, -1)

    def _damaged(self, what: str) -> WeightsError:
        return WeightsError(f"{self.path} is damaged or cut short: {what}", fix="download the file again")

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes < 0 or num_bytes > len(self.data) - self._at:
            raise self._damaged(f"{num_bytes} bytes are needed at offset {self._at}, the file has {len(self.data)}")
        part = self.data[self._at : self._at + num_bytes]
        self._at += num_bytes
        return part

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            inner, length = self._scalar("I"), self._scalar("Q")
            return self._array(inner, length)
        raise self._damaged(f"unknown value type {kind} at offset {self._at}")

    def _array(self, inner: int, length: int) -> Any:
        if length > len(self.data):
            raise self._damaged(f"an array claims {length} elements")
        if inner in SCALARS:
            dtype = np.dtype(SCALARS[inner]).newbyteorder("<")
            return np.frombuffer(self._take(length * dtype.itemsize), dtype)
        if inner == STRING:
            return self._strings(length)
        return [self._value(inner) for _ in range(length)]

    def _strings(self, length: int) -> list[str]:
        at, data, end, unpack = self._at, self.data, len(self.data), struct.Struct("<Q").unpack_from
        found = []
        for _ in range(length):
            if at + 8 > end:
                raise self._damaged("an array of strings runs past the end")
            (size,) = unpack(data, at)
            at += 8
            if size > end - at:
                raise self._damaged("a string runs past the end")
            found.append(data[at : at + size].decode("utf-8", errors="replace"))
            at += size
        self._at = at
        return found

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("I")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} claims {num_dims} dimensions")
        dims = tuple(self._scalar("Q") for _ in range(num_dims))
        return name, tuple(reversed(dims)), self._scalar("I"), self._scalar("Q")

    def _place(self, found: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, GgufTensor]:
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align <= 0:
            raise self._damaged(f"alignment {align!r}")
        base = -(-self._at // align) * align
        placed: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in found:
            block, size = block_of(kind, name)
            elements = 1
            for dim in shape:
                elements *= dim
            if elements == 0 or elements > len(self.data) * 64 or shape[-1] % block:
                raise self._damaged(f"tensor {name} has shape {list(shape)}")
            nbytes = elements // block * size
            if base + offset + nbytes > len(self.data):
                raise self._damaged(
                    f"tensor {name} ends at byte {base + offset + nbytes}, the file has {len(self.data)}"
                )
            if name in placed:
                raise self._damaged(f"tensor {name} appears twice")
            placed[name] = GgufTensor(name=name, shape=shape, kind=kind, offset=base + offset, nbytes=nbytes)
        return placed


def block_of(kind: int, name: str) -> tuple[int, int]:
    """Return (elements, bytes) of one block of a ggml type. WeightsError for a type that the package does not know."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise WeightsError("reading GGUF files needs the gguf package", fix="pip install 'drivetrain[gguf]'") from error
    try:
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise WeightsError(f"tensor {name} has ggml type {kind}, which the gguf package does not know") from None
    return int(elements), int(size)
