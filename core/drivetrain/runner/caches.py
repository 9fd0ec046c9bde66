"""Device caches from a cache plan: views of one shared pool, or one arena for each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from drivetrain.cache.sizing import bytes_of
from drivetrain.errors import DeviceError
from drivetrain_api.v1 import BlockRecycler, Shrinkable, torch_dtype

if TYPE_CHECKING:
    import torch

    from drivetrain.cache.sizing import CachePlan
    from drivetrain.models.decoder import Decoder
    from drivetrain.runner.forward import GroupPlace
    from drivetrain.runner.staging import Pack
    from drivetrain.sched.plan import StepPlan
    from drivetrain_api.v1 import Backend, CacheHandle, DeviceRuntime, SlabPool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMemory:
    """What holds the blocks. ``handles``: one a layer, None for layers without a cache; ``pool``: what they are views
    of, None where each has an arena of its own."""

    handles: tuple[CacheHandle | None, ...]
    pool: SlabPool | None

    @property
    def shrinkable(self) -> bool:
        """Whether all of it can give memory of its last blocks back."""
        parts = self._parts()
        return bool(parts) and all(isinstance(part, Shrinkable) for part in parts)

    @property
    def piece_bytes(self) -> int:
        """What goes back of a pool ends at multiples of this; of arenas it is some of each. ValueError where one of
        them says what can't be."""
        pieces = [_piece_bytes(part) for part in self._parts() if isinstance(part, Shrinkable)]
        return pieces[0] if self.pool is not None and pieces else 1

    def shrink(
        self, plan: CachePlan, before: Sequence[int], blocks: Sequence[int], places: Iterable[GroupPlace]
    ) -> int:
        """Give back all but so many blocks of each of the plan's groups, of which there were ``before``; returns the
        bytes that went back. ValueError where what is said to have gone back can't be."""
        if self.pool is not None:
            assert isinstance(self.pool, Shrinkable), "see shrinkable"
            return _shrink(self.pool, bytes_of(plan, before), bytes_of(plan, blocks))
        given = 0
        for place in places:
            for layer in place.layers:
                handle = self.handles[layer]
                if isinstance(handle, Shrinkable):
                    size, group = handle.layout.bytes_per_block, place.plan_group
                    given += _shrink(handle, before[group] * size, blocks[group] * size)
        return given

    def _parts(self) -> list[object]:
        return [self.pool] if self.pool is not None else [handle for handle in self.handles if handle is not None]


def _piece_bytes(part: Shrinkable) -> int:
    piece = part.piece_bytes
    if type(piece) is not int or piece <= 0:
        from drivetrain.ops.provided import brief  # where nothing is wrong, this module loads without torch

        raise ValueError(f"piece_bytes of {type(part).__name__} is {brief(piece)}, expected a number of bytes above 0")
    return piece


def _shrink(part: Shrinkable, before: int, nbytes: int) -> int:
    """Shrink to ``nbytes`` what had ``before``. A piece more may go: the rest of one that was kept in part."""
    most = max(0, before - nbytes) + _piece_bytes(part)
    given = part.shrink(nbytes)
    if type(given) is not int or not 0 <= given <= most:
        from drivetrain.ops.provided import brief

        raise ValueError(f"shrink of {type(part).__name__} returned {brief(given)}, expected 0 to {most} bytes")
    return given


def allocate_caches(
    backend: Backend, decoder: Decoder, plan: CachePlan, group_ids: Sequence[int] | None = None
) -> tuple[CacheHandle | None, ...]:
    """Allocate as ``allocate_memory`` and return the handles."""
    return allocate_memory(backend, decoder, plan, group_ids).handles


def allocate_memory(
    backend: Backend, decoder: Decoder, plan: CachePlan, group_ids: Sequence[int] | None = None
) -> CacheMemory:
    """Allocate the device memory of every layer's cache. What lies in it at first is up to the storage; nothing reads
    a slot that was not written.

    ``plan.shared``: all layers are views of one pool. Otherwise, and for a decoder that holds only some
    layers of the model (``group_ids``: the plan's group of each of its groups), each layer gets an arena of
    its own.
    """
    caches: list[CacheHandle | None] = [None] * len(decoder.cache_specs)
    partial = group_ids is not None
    pool = _allocate_pool(backend, plan.num_slabs * plan.slab_bytes) if plan.shared and not partial else None
    for group, plan_group in zip(decoder.groups, group_ids or range(len(decoder.groups)), strict=True):
        sized = plan.groups[plan_group]
        for i, layer in enumerate(group.layers):
            if pool is not None:
                offset = sized.layer_offsets[i]
                caches[layer] = backend.storage.view(pool, group.layout, sized.stride, offset)
            else:
                caches[layer] = backend.storage.allocate(group.layout, sized.num_blocks)
    return CacheMemory(handles=tuple(caches), pool=pool)


def _allocate_pool(backend: Backend, num_bytes: int) -> SlabPool:
    """DeviceError where the backend's parts do not fit together; that memory ran out is left as it is."""
    try:
        return backend.storage.allocate_pool(num_bytes)
    except (TypeError, ValueError) as error:
        from drivetrain.ops.provided import FIX, raised, wheel_of

        what = f"{wheel_of(backend)}: storage.allocate_pool raised {raised(error)}; asked for {num_bytes} bytes"
        raise DeviceError(what, fix=FIX) from error


def recycles(caches: Sequence[CacheHandle | None]) -> bool:
    """Return whether any cache wants to know which blocks are void."""
    return any(isinstance(cache, BlockRecycler) for cache in caches)


def pack_freed(plan: StepPlan, places: Sequence[GroupPlace], chunk: int, pack: Pack) -> None:
    """Add the plan's freed blocks to the step's upload, in pieces as for ``change_blocks``."""
    for g, place in enumerate(places if plan.freed else ()):
        for group, blocks in plan.freed:
            if group == place.plan_group:
                for number, piece in enumerate(_pieces(blocks.reshape(-1, 1), chunk)):
                    pack.add(f"freed{g}.{number}", piece[:, 0])


def announce_freed(
    caches: Sequence[CacheHandle | None], places: Sequence[GroupPlace], plan: StepPlan, views: dict[str, torch.Tensor]
) -> None:
    """Queue the news of freed blocks to every cache that wants to know, before all else that the plan does."""
    for g, place in enumerate(places if plan.freed else ()):
        handles = [cache for layer in place.layers if (cache := caches[layer]) is not None]
        number = 0
        while handles and (piece := views.get(f"freed{g}.{number}")) is not None:
            blocks = piece.to(torch_dtype(handles[0].layout.slot_dtype))
            for cache in handles:
                if isinstance(cache, BlockRecycler):
                    cache.freed(blocks)
            number += 1


def change_blocks(
    runtime: DeviceRuntime,
    caches: Sequence[CacheHandle | None],
    places: Iterable[GroupPlace],
    plan: StepPlan,
    chunk: int,
) -> None:
    """Queue the plan's zeroed blocks and copies, before its forward pass.

    ``chunk`` 0: lists of their exact length; else of this length, filled up with the null block.
    """
    if not plan.zeroed and not plan.copies:
        return
    for place in places:
        zeroed = [block for group, block in plan.zeroed if group == place.plan_group]
        copies = [(c.source, c.target) for c in plan.copies if c.group == place.plan_group]
        handles = [cache for layer in place.layers if (cache := caches[layer]) is not None]
        if not handles:
            continue
        dtype = handles[0].layout.slot_dtype
        for piece in _pieces(np.array(zeroed, dtype).reshape(-1, 1), chunk):
            blocks = runtime.from_host(piece[:, 0].copy())
            for cache in handles:
                cache.zero_blocks(blocks)
        for piece in _pieces(np.array(copies, dtype).reshape(-1, 2), chunk):
            pairs = runtime.from_host(piece.T.copy())
            for cache in handles:
                cache.copy_blocks(pairs[0], pairs[1])


def _pieces(ids: np.ndarray, chunk: int) -> list[np.ndarray]:
    if len(ids) == 0:
        return []
    if chunk == 0:
        return [ids]
    padded = np.pad(ids, ((0, -len(ids) % chunk), (0, 0)))
    return [padded[a : a + chunk] for a in range(0, len(padded), chunk)]
