"""Device caches from a cache plan: views of one shared pool, or one arena for each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from drivetrain.cache.sizing import CachePlan
    from drivetrain.models.decoder import Decoder
    from drivetrain.runner.forward import GroupPlace
    from drivetrain.sched.plan import StepPlan
    from drivetrain_api.v1 import Backend, CacheHandle, DeviceRuntime


def allocate_caches(
    backend: Backend, decoder: Decoder, plan: CachePlan, group_ids: Sequence[int] | None = None
) -> tuple[CacheHandle | None, ...]:
    """Allocate the device memory of every layer's cache, zeroed: one handle a layer, None for layers without
    one.

    ``plan.shared``: all layers are views of one pool. Otherwise, and for a decoder that holds only some
    layers of the model (``group_ids``: the plan's group of each of its groups), each layer gets an arena of
    its own.
    """
    caches: list[CacheHandle | None] = [None] * len(decoder.cache_specs)
    partial = group_ids is not None
    pool = backend.storage.allocate_pool(plan.num_slabs * plan.slab_bytes) if plan.shared and not partial else None
    for group, plan_group in zip(decoder.groups, group_ids or range(len(decoder.groups)), strict=True):
        sized = plan.groups[plan_group]
        for i, layer in enumerate(group.layers):
            if pool is not None:
                offset = sized.layer_offsets[i]
                caches[layer] = backend.storage.view(pool, group.layout, sized.stride, offset)
            else:
                caches[layer] = backend.storage.allocate(group.layout, sized.num_blocks)
    return tuple(caches)


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
