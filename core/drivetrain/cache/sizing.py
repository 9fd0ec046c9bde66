"""How the cache's bytes are cut: slab size, block strides, block counts. Exact; no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drivetrain.errors import ConfigError

MAX_PADDING = 0.03
LITTLE_PADDING = 0.005
FEWEST_SLABS = 64
MAX_SIZES = 3
MAX_OPTIONS = 8
MAX_MULTIPLE = 64
MANY_SLABS = 1024
MAX_SLAB_BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNeed:
    """What one group of equal layers asks for. ``layer_bytes``: one layer's bytes a block, as its layout says."""

    kind: str
    layer_bytes: int
    num_layers: int
    block_tokens: int
    alignment: int = 64
    window: int | None = None
    checkpoint_alignment: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.layer_bytes * self.num_layers

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Return the most blocks that a sequence of that length holds at once when computed in such chunks."""
        return most_held(self, num_tokens, chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One group's share. Block i of layer l begins at byte i * stride + layer_offsets[l] of a shared pool.

    ``num_blocks`` counts block 0, the null block.
    """

    kind: str
    block_tokens: int
    block_bytes: int
    stride: int
    blocks_per_slab: int
    num_blocks: int
    layer_offsets: tuple[int, ...]
    window: int | None = None
    checkpoint_alignment: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The whole cache. ``shared``: groups take slabs from one pool; else each has a fixed number of blocks.

    ``padding``: the largest part of a stride that no block uses.
    """

    shared: bool
    num_slabs: int
    slab_bytes: int
    groups: tuple[GroupPlan, ...]
    padding: float

    @property
    def total_bytes(self) -> int:
        """Device bytes allocated for blocks."""
        if self.shared:
            return self.num_slabs * self.slab_bytes
        return sum(group.num_blocks * group.block_bytes for group in self.groups)

    @property
    def padding_too_large(self) -> bool:
        """Whether ``plan`` should warn."""
        return self.padding > MAX_PADDING


def most_held(group: GroupNeed | GroupPlan, num_tokens: int, chunk: int) -> int:
    """Return the most blocks of a group that a sequence of that length holds at once when computed in such chunks."""
    if group.kind == "recurrent":
        return 1
    if group.window is not None:
        num_tokens = min(num_tokens, group.window + chunk + 2 * group.block_tokens)
    return -(-num_tokens // group.block_tokens)


def cut(plan: CachePlan, nbytes: int) -> tuple[int, ...]:
    """Return how many blocks of each group lie in a cache of so many bytes less than planned: whole slabs, or, where
    groups share none, the same part of each."""
    if plan.shared:
        return tuple(nbytes // plan.slab_bytes * group.blocks_per_slab for group in plan.groups)
    return tuple(group.num_blocks * nbytes // plan.total_bytes for group in plan.groups)


def bytes_of(plan: CachePlan, blocks: Sequence[int]) -> int:
    """Return the device bytes of so many blocks of each group (see ``cut``)."""
    if plan.shared:
        slabs = [count // group.blocks_per_slab for count, group in zip(blocks, plan.groups, strict=True)]
        return max(slabs, default=0) * plan.slab_bytes
    return sum(count * group.block_bytes for count, group in zip(blocks, plan.groups, strict=True))


def holds_longest(plan: CachePlan, blocks: Sequence[int], max_tokens: int, chunk: int) -> bool:
    """Return whether one sequence of the longest length fits in so many blocks of each group (see ``cut``)."""
    needed = [most_held(group, max_tokens, min(chunk, max_tokens)) for group in plan.groups]
    if not plan.shared:
        return all(count < most for count, most in zip(needed, blocks, strict=True))
    slabs = sum(-(-count // group.blocks_per_slab) for count, group in zip(needed, plan.groups, strict=True))
    return all(slabs < most // group.blocks_per_slab for most, group in zip(blocks, plan.groups, strict=True))


def plan_cache(needs: Sequence[GroupNeed], budget: int, *, shared: bool, max_tokens: int, chunk: int) -> CachePlan:
    """Cut ``budget`` bytes. ConfigError when it can't hold one sequence of ``max_tokens`` tokens."""
    if not needs:
        return CachePlan(shared=shared, num_slabs=0, slab_bytes=0, groups=(), padding=0.0)
    plan = _shared(needs, budget) if shared else _partitioned(needs, budget, max_tokens, chunk)
    least = smallest_budget(needs, plan, max_tokens, chunk)
    if budget < least:
        raise ConfigError(
            f"the cache has {budget / 2**20:.1f} MiB, "
            f"one sequence of {max_tokens} tokens needs {least / 2**20:.1f} MiB",
            fix="lower --max-model-len or --max-num-batched-tokens, or give more memory (--cache-bytes)",
        )
    return plan


def smallest_budget(needs: Sequence[GroupNeed], plan: CachePlan, max_tokens: int, chunk: int) -> int:
    """Return the bytes in which one sequence of the longest length fits, null blocks included."""
    blocks = [need.blocks_for(max_tokens, min(chunk, max_tokens)) for need in needs]
    if not plan.shared:
        return sum((count + 1) * need.block_bytes for need, count in zip(needs, blocks, strict=True))
    slabs = sum(-(-count // group.blocks_per_slab) for group, count in zip(plan.groups, blocks, strict=True))
    return (slabs + 1) * plan.slab_bytes


def _shared(needs: Sequence[GroupNeed], budget: int) -> CachePlan:
    best: tuple[float, int, list[int]] | None = None
    for slab in _slab_sizes(needs, budget):
        counts = [_most_blocks(slab, need) for need in needs]
        padding = max(1 - n * need.block_bytes / slab for n, need in zip(counts, needs, strict=True))
        if best is None or padding < best[0] - 1e-9:
            best = (padding, slab, counts)
        if padding <= LITTLE_PADDING:
            break
    assert best is not None, "there is at least one size"
    padding, slab, counts = best
    larger = max(1, min(budget // slab // MANY_SLABS, MAX_SLAB_BLOCKS // min(counts)))  # fewer slabs cost less to keep
    slab, counts = slab * larger, [n * larger for n in counts]
    num_slabs = budget // slab
    groups = tuple(_group(need, slab // n, n, num_slabs * n) for need, n in zip(needs, counts, strict=True))
    return CachePlan(shared=True, num_slabs=num_slabs, slab_bytes=slab, groups=groups, padding=padding)


def _slab_sizes(needs: Sequence[GroupNeed], budget: int) -> Iterator[int]:
    """Yield sizes that hold 1, 2, .. of the largest block, and that about as many of the others as fit divide exactly;
    small ones first, since a sequence leaves one slab a group partly empty."""
    largest = max(need.block_bytes for need in needs)
    align = max(need.alignment for need in needs)
    sizes = sorted({need.block_bytes for need in needs} - {largest})[:MAX_SIZES]
    for multiple in range(1, MAX_MULTIPLE + 1):
        least = multiple * largest
        if multiple > 1 and least > budget // FEWEST_SLABS:
            return
        yield -(-least // (multiple * align)) * multiple * align
        most = [least // size for size in sizes]
        options = [range(n, max(0, n - 1 - int(n * MAX_PADDING)), -1)[:MAX_OPTIONS] for n in most]
        for counts in itertools.product(*options):
            step = math.lcm(multiple, *counts) * align
            slab = -(-least // step) * step
            if slab <= least * (1 + MAX_PADDING):
                yield slab


def _most_blocks(slab: int, need: GroupNeed) -> int:
    """Return the most blocks whose equal, aligned strides fill the slab exactly."""
    units, most = slab // need.alignment, slab // need.block_bytes
    divisors = (d for i in range(1, math.isqrt(units) + 1) if units % i == 0 for d in (i, units // i))
    return max(d for d in divisors if d <= most)


def _partitioned(needs: Sequence[GroupNeed], budget: int, max_tokens: int, chunk: int) -> CachePlan:
    """Give each group what one sequence needs, and the rest in the same proportions."""
    least = [need.blocks_for(max_tokens, min(chunk, max_tokens)) for need in needs]
    weights = [count * need.block_bytes for need, count in zip(needs, least, strict=True)]
    rest = max(0, budget - sum(weights) - sum(need.block_bytes for need in needs))
    groups = []
    for need, count, weight in zip(needs, least, weights, strict=True):
        blocks = 1 + count + rest * weight // sum(weights) // need.block_bytes
        groups.append(_group(need, need.block_bytes, 1, blocks))
    return CachePlan(shared=False, num_slabs=0, slab_bytes=0, groups=tuple(groups), padding=0.0)


def _group(need: GroupNeed, stride: int, blocks_per_slab: int, num_blocks: int) -> GroupPlan:
    return GroupPlan(
        kind=need.kind,
        block_tokens=need.block_tokens,
        block_bytes=need.block_bytes,
        stride=stride,
        blocks_per_slab=blocks_per_slab,
        num_blocks=num_blocks,
        layer_offsets=tuple(i * need.layer_bytes for i in range(need.num_layers)),
        window=need.window,
        checkpoint_alignment=need.checkpoint_alignment,
    )
