"""Caches: an arena for each layer, K and V apart, an inner layout of the device's own."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NoReturn

import torch

from drivetrain_api.v1 import CacheHandle, CacheLayout, CachePart, CacheSpec, SlabPool, dtype_bytes, torch_dtype

from .allowed import DECLARED_DTYPES
from .arenas import Arenas
from .device import POISON, MirageDevice
from .rules import RuleError
from .tensors import MirageTensor, new_dense, on_device

BLOCK_TOKENS = 128
ALIGNMENT = 128
IN_ORDER = ("full", "window")  # kinds whose blocks are filled from their first slot on


class MirageStorage:
    """``Storage`` without a pool."""

    block_tokens = (BLOCK_TOKENS,)

    def __init__(self, owner: MirageDevice) -> None:
        self._owner = owner

    def layout(self, spec: CacheSpec, block_tokens: int) -> CacheLayout:
        if block_tokens != BLOCK_TOKENS:
            raise RuleError("block-size", f"blocks of {block_tokens} tokens", f"give a block size of {BLOCK_TOKENS}")
        for part in spec.parts:
            if torch_dtype(part.dtype) not in DECLARED_DTYPES:
                raise RuleError("declared-dtypes", f"a cache of {part.dtype}", "use float32 or bfloat16")
        exact = sum(_part_bytes(part, slots_in(spec)) for part in spec.parts)
        return CacheLayout(
            spec=spec,
            block_tokens=block_tokens,
            bytes_per_block=-(-exact // ALIGNMENT) * ALIGNMENT,
            alignment=ALIGNMENT,
            strided=False,
            slot_dtype="int32",
        )

    def allocate_pool(self, num_bytes: int) -> SlabPool:
        _no_pool(f"a pool of {num_bytes} bytes")

    def view(self, pool: SlabPool, layout: CacheLayout, block_stride: int, offset: int) -> CacheHandle:
        _no_pool("a view of a pool")

    def allocate(self, layout: CacheLayout, num_blocks: int) -> CacheHandle:
        """Allocate an arena full of garbage: a block is valid only where something was written."""
        if layout.strided or layout.slot_dtype != "int32":
            raise RuleError("no-pool", "a layout that this storage did not make", "ask Storage.layout")
        return MirageCache(self._owner, layout, num_blocks)


def _no_pool(what: str) -> NoReturn:
    raise RuleError("no-pool", f"{what} was asked for", "call allocate for each layer: CacheLayout.strided is False")


def slots_in(spec: CacheSpec) -> int:
    """Return the slots in a block."""
    return 1 if spec.kind == "recurrent" else BLOCK_TOKENS


def _part_bytes(part: CachePart, slots: int) -> int:
    return slots * prod(part.shape) * dtype_bytes(part.dtype)


class MirageCache:
    """One layer's blocks. A part [head, size] of a slot lies in an arena [block, head, slot, size]: neither the
    order nor the distance of slots is what a strided layout would give."""

    def __init__(self, owner: MirageDevice, layout: CacheLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.nbytes = num_blocks * layout.bytes_per_block
        self._owner = owner
        self._slots = slots_in(layout.spec)
        shapes = [(num_blocks, *p.shape[:1], self._slots, *p.shape[1:]) for p in layout.spec.parts]
        dtypes = [torch_dtype(p.dtype) for p in layout.spec.parts]
        self._held = [new_dense(owner, shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        used = sum(t.raw.numel() * t.raw.element_size() for t in self._held)
        self._rest = owner.ledger.take(self.nbytes - used)
        self.arenas = Arenas(tuple(t.raw for t in self._held), num_blocks)
        self.piece_bytes = layout.bytes_per_block

    def shrink(self, nbytes: int) -> int:
        """Give back the blocks that ``nbytes`` do not hold. What is left of a buffer there is garbage."""
        before, kept = self.nbytes, -(-nbytes // self.piece_bytes)
        if kept >= self.arenas.kept:
            return 0
        self.arenas.leave(kept)
        self.nbytes = rest = kept * self.piece_bytes
        for tensor in self._held:
            part = kept * tensor.raw[0].numel() * tensor.raw.element_size()
            assert tensor.slab is not None, "an arena has bytes of its own"
            tensor.slab.leave(part)
            rest -= part
        self._rest.leave(rest)
        return before - self.nbytes

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raw = self._ids(slots, "slots")
        parts = self.layout.spec.parts
        outs = tuple(new_dense(self._owner, (raw.shape[0], *p.shape), torch_dtype(p.dtype)) for p in parts)
        self._owner.launch(_read, (raw, self._slots, self.arenas), tuple(out.raw for out in outs))
        return outs

    def write(self, slots: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        raw = self._ids(slots, "slots")
        parts = self.layout.spec.parts
        raws = []
        for part, value in zip(parts, values, strict=True):
            if tuple(value.shape) != (raw.shape[0], *part.shape):
                raise ValueError(f"part {part.name}: {tuple(value.shape)} for {raw.shape[0]} slots of {part.shape}")
            raws.append(on_device(value, f"part {part.name} of a cache write").raw)
        restarts = self._owner.options.poison_freed and self.layout.spec.kind in IN_ORDER
        self._owner.launch(_write, (raw, (self._slots, restarts), self.arenas, tuple(raws)), None)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        ids = self._watched("a copy of blocks", source), self._ids(target, "block ids")
        self._owner.launch(_copy, (*ids, self.arenas), None)

    def zero_blocks(self, blocks: torch.Tensor) -> None:
        self._owner.launch(_fill, (self._watched("zeros in blocks", blocks), self.arenas, False), None)

    def freed(self, blocks: torch.Tensor) -> None:
        """Fill blocks [n] with garbage, in the stream's order: nobody owns them any more. Block 0 may be named."""
        ids = self._watched("garbage in freed blocks", blocks)
        if self._owner.options.poison_freed:
            self._owner.launch(_fill, (ids, self.arenas, True), None)

    def export_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        raw = self._ids(blocks, "block ids")
        out = new_dense(self._owner, (raw.shape[0], self.layout.bytes_per_block), torch.uint8)
        self._owner.launch(_export, (raw, self.arenas, self.layout.bytes_per_block), out.raw)
        return out

    def import_blocks(self, blocks: torch.Tensor, data: torch.Tensor) -> None:
        raw = self._ids(blocks, "block ids")
        if tuple(data.shape) != (raw.shape[0], self.layout.bytes_per_block):
            raise ValueError(f"data {tuple(data.shape)} for {raw.shape[0]} blocks of {self.layout.bytes_per_block}")
        self._owner.launch(_import, (raw, self.arenas, on_device(data, "block data").raw), None)

    def _watched(self, what: str, blocks: torch.Tensor) -> torch.Tensor:
        """As ``_ids``; how many there are is a shape like any other."""
        ids = self._ids(blocks, "block ids")
        if self._owner.watch is not None:
            self._owner.watch((what, len(ids)))
        return ids

    def _ids(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        wrapped: MirageTensor = on_device(tensor, what)
        if wrapped.dtype != torch.int32 or wrapped.dim() != 1:
            raise RuleError(
                "int32-slots",
                f"{what} are {wrapped.dtype} of shape {tuple(wrapped.shape)}",
                "make them of CacheLayout.slot_dtype, one-dimensional",
            )
        return wrapped.raw


# Kernels: they run on the stream, over buffers.


def _read(slots: torch.Tensor, size: int, arenas: Arenas) -> tuple[torch.Tensor, ...]:
    block, offset = slots // size, slots % size
    arenas.there(block)
    return tuple(_places(arena, block, offset) for arena in arenas)


def _places(arena: torch.Tensor, block: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return a copy of the slots' values [n, *part.shape]."""
    if arena.dim() <= 2:
        return arena[block, offset]
    heads = arena.shape[1]
    rows = block.unsqueeze(1) * heads + torch.arange(heads, dtype=torch.int32)
    flat = (rows * arena.shape[2] + offset.unsqueeze(1)).flatten()
    values: torch.Tensor = arena.flatten(0, 2).index_select(0, flat).unflatten(0, (-1, heads))
    return values


def _write(slots: torch.Tensor, rule: tuple[int, bool], arenas: Arenas, values: tuple[torch.Tensor, ...]) -> None:
    """``rule``: slots a block, and whether a block that begins anew loses what it held: a write of its first slot
    means that it has a new owner, or that its owner starts over."""
    size, restarts = rule
    block, offset = slots // size, slots % size
    arenas.there(block)
    begun = block[offset == 0]
    if restarts and len(begun):
        _fill(begun, arenas, True)
    padded = bool((block == 0).any())
    for arena, value in zip(arenas, values, strict=True):
        if arena.dim() <= 2:
            arena[block, offset] = value.to(arena.dtype)
        else:
            arena[block, :, offset] = value.to(arena.dtype)
        if padded:
            arena[0] = POISON[arena.dtype]  # the null block is never read: it keeps garbage


def _copy(source: torch.Tensor, target: torch.Tensor, arenas: Arenas) -> None:
    arenas.there(source)
    arenas.there(target)
    for arena in arenas:
        arena[target] = arena[source]


def _fill(blocks: torch.Tensor, arenas: Arenas, poison: bool) -> None:
    arenas.there(blocks)
    for arena in arenas:
        arena[blocks] = torch.scalar_tensor(POISON[arena.dtype] if poison else 0, dtype=arena.dtype)


def _export(blocks: torch.Tensor, arenas: Arenas, size: int) -> torch.Tensor:
    arenas.there(blocks)
    out = torch.zeros((len(blocks), size), dtype=torch.uint8)
    at = 0
    for arena in arenas:
        data = arena[blocks].flatten(1).view(torch.uint8)
        out[:, at : at + data.shape[1]] = data
        at += data.shape[1]
    return out


def _import(blocks: torch.Tensor, arenas: Arenas, data: torch.Tensor) -> None:
    arenas.there(blocks)
    at = 0
    for arena in arenas:
        width = arena[0].numel() * arena.element_size()
        part = data[:, at : at + width].clone().view(arena.dtype)
        arena[blocks] = part.unflatten(1, arena.shape[1:])
        at += width
