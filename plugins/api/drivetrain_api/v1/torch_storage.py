"""``Storage`` of strided torch tensors over a ``DeviceRuntime``, and a memory profiler over the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from .backend import dtype_bytes, torch_dtype
from .device import Baseline, DeviceRuntime, MemoryProfiler, MemoryUse, ShrinkableBuffer, ShrinkableMemory
from .storage import CacheHandle, CacheLayout, CacheSpec, SlabPool, Storage

if TYPE_CHECKING:
    import torch


def torch_storage(
    runtime: DeviceRuntime, block_tokens: tuple[int, ...] = (16, 32, 64, 128), slot_dtype: str = "int64"
) -> Storage:
    """Compose storage whose blocks are rows of one byte tensor; within a block each part is contiguous."""
    return _TorchStorage(runtime, block_tokens, slot_dtype)


def generic_profiler(runtime: DeviceRuntime) -> MemoryProfiler:
    """Compose a memory profiler from the runtime's own figures."""
    return _GenericProfiler(runtime)


class TorchSlabs:
    """A pool as one uint8 tensor."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def nbytes(self) -> int:
        return self.data.numel()


class ShrinkableSlabs(TorchSlabs):
    """A pool whose end can go back to the device."""

    def __init__(self, buffer: ShrinkableBuffer, num_bytes: int) -> None:
        """ValueError for a buffer that does not have so many bytes, or not as the contract says."""
        if problem := _unfit(buffer, num_bytes):
            raise ValueError(f"shrinkable({num_bytes}) made a {type(buffer).__name__} {problem}")
        super().__init__(buffer.data[:num_bytes])
        self.piece_bytes = buffer.piece_bytes
        self.shrink = buffer.shrink


class TorchCache:
    """One layer's blocks. ``parts``: one tensor a part, [num_blocks, slots, *shape], over the shared bytes."""

    def __init__(self, layout: CacheLayout, data: torch.Tensor, num_blocks: int, owned: bool) -> None:
        """``data``: uint8 [num_blocks, bytes_per_block], rows possibly strided."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.nbytes = data.numel() if owned else 0
        self._data = data
        self.slots = slots_of(layout)
        self.parts = tuple(_part_views(layout, data, self.slots))

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        block, offset = slots // self.slots, slots % self.slots
        return tuple(part[block, offset] for part in self.parts)

    def write(self, slots: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        block, offset = slots // self.slots, slots % self.slots
        for part, value in zip(self.parts, values, strict=True):
            part[block, offset] = value.to(part.dtype)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._data[target] = self._data[source]

    def zero_blocks(self, blocks: torch.Tensor) -> None:
        self._data[blocks] = 0

    def export_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return self._data[blocks]

    def import_blocks(self, blocks: torch.Tensor, data: torch.Tensor) -> None:
        self._data[blocks] = data


def slots_of(layout: CacheLayout) -> int:
    """Return the slots in one block: tokens for paged kinds, one for recurrent states."""
    return 1 if layout.spec.kind == "recurrent" else layout.block_tokens


def part_bytes(layout: CacheLayout) -> tuple[int, ...]:
    """Return the bytes of each part in one block, padded to 16 so that every part is aligned."""
    slots = slots_of(layout)
    sizes = (slots * prod(p.shape) * dtype_bytes(p.dtype) for p in layout.spec.parts)
    return tuple(-(-size // 16) * 16 for size in sizes)


def _unfit(buffer: ShrinkableBuffer, num_bytes: int) -> str:
    data: Any = getattr(buffer, "data", None)
    piece: Any = getattr(buffer, "piece_bytes", None)
    dtype, shape = getattr(data, "dtype", None), getattr(data, "shape", None)
    if dtype != torch_dtype("uint8") or shape is None or len(shape) != 1 or not data.is_contiguous():
        came = type(data).__name__ if dtype is None or shape is None else f"{dtype} {list(shape)}"
        return f"whose data is {came}, expected a dense tensor of uint8 with one dimension"
    if shape[0] < num_bytes:
        return f"of {shape[0]} bytes"
    if type(piece) is not int or piece <= 0:
        return f"whose piece_bytes is {piece!r}, expected a number of bytes above 0"
    return "" if callable(getattr(buffer, "shrink", None)) else "without shrink"


def _part_views(layout: CacheLayout, data: torch.Tensor, slots: int) -> list[torch.Tensor]:
    views, offset = [], 0
    for part, size in zip(layout.spec.parts, part_bytes(layout), strict=True):
        exact = slots * prod(part.shape) * dtype_bytes(part.dtype)
        view = data[:, offset : offset + exact].view(torch_dtype(part.dtype))
        views.append(view.unflatten(1, (slots, *part.shape)))
        offset += size
    return views


class _TorchStorage:
    def __init__(self, runtime: DeviceRuntime, block_tokens: tuple[int, ...], slot_dtype: str) -> None:
        self.block_tokens = block_tokens
        self._runtime, self._slot_dtype = runtime, slot_dtype

    def layout(self, spec: CacheSpec, block_tokens: int) -> CacheLayout:
        if block_tokens not in self.block_tokens:
            raise ValueError(f"block size {block_tokens} is not one of {self.block_tokens}")
        shape = CacheLayout(spec=spec, block_tokens=block_tokens, bytes_per_block=0, alignment=64, strided=True)
        return CacheLayout(
            spec=spec,
            block_tokens=block_tokens,
            bytes_per_block=-(-sum(part_bytes(shape)) // 64) * 64,
            alignment=64,
            strided=True,
            slot_dtype=self._slot_dtype,
        )

    def allocate_pool(self, num_bytes: int) -> SlabPool:
        runtime = self._runtime
        buffer = runtime.shrinkable(num_bytes) if num_bytes and isinstance(runtime, ShrinkableMemory) else None
        if buffer is None:
            return TorchSlabs(self._touched((num_bytes,)))
        pool = ShrinkableSlabs(buffer, num_bytes)
        pool.data.zero_()
        return pool

    def view(self, pool: SlabPool, layout: CacheLayout, block_stride: int, offset: int) -> CacheHandle:
        if not isinstance(pool, TorchSlabs):
            raise TypeError(f"this storage did not make that pool: {type(pool).__name__}")
        num_blocks = pool.nbytes // block_stride
        rows = pool.data[: num_blocks * block_stride].view(num_blocks, block_stride)
        return TorchCache(layout, rows[:, offset : offset + layout.bytes_per_block], num_blocks, owned=False)

    def allocate(self, layout: CacheLayout, num_blocks: int) -> CacheHandle:
        return TorchCache(layout, self._touched((num_blocks, layout.bytes_per_block)), num_blocks, owned=True)

    def _touched(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Zeros that are written at once: what was planned is then really held, not just promised by the system."""
        return self._runtime.empty(shape, torch_dtype("uint8")).zero_()


class _GenericProfiler:
    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime

    def baseline(self) -> Baseline:
        now = self._runtime.memory()
        return Baseline(context=now.allocated, others=max(0, now.total - now.free - now.allocated), total=now.total)

    def measure(self, run: Callable[[], Any]) -> MemoryUse:
        self._runtime.synchronize()
        self._runtime.trim()
        self._runtime.reset_peak()
        before = self._runtime.memory()
        run()
        self._runtime.synchronize()
        after = self._runtime.memory()
        taken = (before.free - after.free) - (after.allocated - before.allocated)
        return MemoryUse(
            persistent=max(0, after.allocated - before.allocated),
            peak=max(0, after.peak - before.allocated),
            outside=max(0, taken),
        )

    def graph_estimate(self, num_graphs: int, largest_tokens: int) -> Mapping[str, int]:
        return {"bytes": 0}
