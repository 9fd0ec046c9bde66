"""What must hold of the books of a pool and of its manager at any time, checked block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.cache.manager import CacheManager, Held
    from drivetrain.cache.pool import GroupBlocks, Pool

NO_OWNER = -1


def check_pool(pool: Pool) -> None:
    """AssertionError naming the first block or slab whose books do not agree."""
    for number, blocks in enumerate(pool.groups):
        free = {block for part in blocks.open.values() for block in part}
        assert len(free) == sum(map(len, blocks.open.values())) == blocks.num_free, f"group {number}: free count"
        assert all(blocks.open.values()), f"group {number}: an empty slab counts as open"
        if blocks.num_blocks:
            null = blocks.refs[0] or blocks.names[0] or 0 in free or 0 in blocks.cached
            assert not null, f"group {number}: the null block is in use"
        queue = [pair for pair in blocks.queue if blocks.cached.get(pair[0]) == pair[1]]
        assert queue == list(blocks.cached.items()), f"group {number}: queue of cached blocks"
        assert queue == sorted(queue, key=lambda pair: pair[1]), f"group {number}: order of eviction"
        held = sum(_check_block(pool, number, block, free) for block in range(1, blocks.num_blocks))
        assert held == blocks.num_held, f"group {number}: {held} held, {blocks.num_held} counted"
        assert all(blocks.names[b] == n for n, b in blocks.index.items()), f"group {number}: index"
    if pool.shared:
        _check_slabs(pool)


def _check_block(pool: Pool, number: int, block: int, free: set[int]) -> bool:
    blocks: GroupBlocks = pool.groups[number]
    refs, name, what = blocks.refs[block], blocks.names[block], f"group {number} block {block}"
    cached = block in blocks.cached
    assert refs >= 0, f"{what}: {refs} holders"
    assert (refs > 0) + (block in free) + cached <= 1, f"{what}: in two states at once"
    assert name is None or blocks.index.get(name) == block, f"{what}: its name leads elsewhere"
    assert cached == (name is not None and not refs), f"{what}: cached without name, or named without being found"
    used = refs > 0 or cached or block in free
    if block >= blocks.limit:
        assert used == (refs > 0), f"{what}: retired, but free or cached"
        return refs > 0
    mine = not pool.shared or pool.owner[block // blocks.per_slab] == number
    assert used == mine, f"{what}: lost, or in another group's slab"
    return refs > 0


def _check_slabs(pool: Pool) -> None:
    unowned = [slab for slab in range(1, pool.kept_slabs) if pool.owner[slab] == NO_OWNER]
    assert sorted(pool.free_slabs) == unowned, "free slabs"
    assert list(pool.idle.values()) == sorted(pool.idle.values()), "order of idle slabs"
    for number, blocks in enumerate(pool.groups):
        idle = sum(pool.owner[slab] == number for slab in pool.idle)
        assert idle == blocks.num_idle, f"group {number}: {idle} idle slabs, {blocks.num_idle} counted"
    for slab in range(1, pool.num_slabs):
        if pool.owner[slab] == NO_OWNER:
            assert slab not in pool.idle and not pool.held_in[slab], f"slab {slab}: free but in use"
            continue
        blocks = pool.groups[pool.owner[slab]]
        held = sum(blocks.refs[b] > 0 for b in range(slab * blocks.per_slab, (slab + 1) * blocks.per_slab))
        assert held == pool.held_in[slab], f"slab {slab}: {held} held, {pool.held_in[slab]} counted"
        assert held or slab < pool.kept_slabs, f"slab {slab}: retired, but somebody's"
        assert (slab in pool.idle) == (held == 0), f"slab {slab}: idle"


def check_tables(manager: CacheManager, others: Sequence[Held]) -> None:
    """AssertionError naming the first disagreement between tables and holders; ``others`` hold blocks too."""
    for number, table in enumerate(manager.tables):
        counted: dict[int, int] = {}
        size = manager.plan.groups[number].block_tokens
        for row in range(len(table)):
            first, end = int(manager.firsts[number, row]), int(manager.ends[number][row])
            where = f"group {number} row {row}"
            assert first <= end, f"{where}: first {first} beyond end {end}"
            assert not table[row, :first].any() and not table[row, end:].any(), f"{where}: stray blocks"
            recurrent = manager.groups[number] in manager.recurrent
            assert recurrent or manager.horizon[row] <= end * size, f"{where}: horizon"
            for block in table[row, first:end].tolist():
                assert block, f"{where}: a hole"
                counted[block] = counted.get(block, 0) + 1
        for held_in, block in others:
            if held_in == number:
                counted[block] = counted.get(block, 0) + 1
        for block, refs in enumerate(manager.pool.groups[number].refs):
            found = counted.get(block, 0)
            assert refs == found, f"group {number} block {block}: {refs} holders, {found} found"
