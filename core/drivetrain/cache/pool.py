"""The pool: slabs belong to one group at a time and are cut into blocks; blocks are counted, named and reused.

A block is in exactly one state: free (no name, no holder), cached (named in the index, no holder, evictable), or held
(``refs`` > 0). Slab 0 is never handed out: block 0 of every group, the null block, lies in it.
"""

from __future__ import annotations

from drivetrain.cache.sizing import CachePlan

NO_OWNER = -1


class GroupBlocks:
    """One group's blocks: holders, names, the slabs that have free blocks, and cached blocks, oldest first."""

    def __init__(self, num_blocks: int, per_slab: int) -> None:
        self.per_slab = per_slab
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.names: list[bytes | None] = [None] * num_blocks
        self.index: dict[bytes, int] = {}
        self.cached: dict[int, None] = {}
        self.open: dict[int, list[int]] = {}
        self.num_free = 0
        self.num_held = 0


class Pool:
    """All groups' blocks over the shared slabs, or over a fixed set of slabs for each group."""

    def __init__(self, plan: CachePlan) -> None:
        self.shared = plan.shared
        self.groups = [GroupBlocks(group.num_blocks, group.blocks_per_slab) for group in plan.groups]
        self.num_slabs = plan.num_slabs
        self.owner = [NO_OWNER] * plan.num_slabs
        self.held_in = [0] * plan.num_slabs
        self.free_slabs = list(range(plan.num_slabs - 1, 0, -1)) if plan.shared else []
        self.idle: dict[int, None] = {}  # slabs with an owner and no held block, least recently used first
        if not plan.shared:
            for group in self.groups:
                group.open = {0: list(range(group.num_blocks - 1, 0, -1))}
                group.num_free = max(0, group.num_blocks - 1)

    def available(self, group: int) -> int:
        """Return how many blocks could be taken now for one group, were all of them for it."""
        blocks = self.groups[group]
        if not self.shared:
            return blocks.num_free + len(blocks.cached)
        others = sum(1 for slab in self.idle if self.owner[slab] != group)
        return blocks.num_free + len(blocks.cached) + (len(self.free_slabs) + others) * blocks.per_slab

    def take(self, group: int) -> int:
        """Hand out a block with one holder; 0 when none can be had. Free first, then the oldest cached."""
        blocks = self.groups[group]
        if not blocks.open and not self._open_slab(group):
            return 0
        slab = next(iter(blocks.open))
        free = blocks.open[slab]
        block = free.pop()
        if not free:
            del blocks.open[slab]
        blocks.num_free -= 1
        self._first_hold(group, block)
        return block

    def hold(self, group: int, block: int) -> None:
        """Add a holder to a held or cached block."""
        blocks = self.groups[group]
        if blocks.refs[block]:
            blocks.refs[block] += 1
            return
        del blocks.cached[block]
        self._first_hold(group, block)

    def drop(self, group: int, block: int) -> None:
        """Take a holder away; the last one leaves the block cached if it has a name, else free."""
        blocks = self.groups[group]
        refs = blocks.refs[block] - 1
        blocks.refs[block] = refs
        if refs:
            return
        blocks.num_held -= 1
        if self.shared:
            slab = block // blocks.per_slab
            self.held_in[slab] -= 1
            if not self.held_in[slab]:
                self.idle[slab] = None
        if blocks.names[block] is None:
            self._free(group, block)
        else:
            blocks.cached[block] = None

    def name(self, group: int, block: int, name: bytes) -> bool:
        """Publish a held block under a name; False when another block has the name already."""
        blocks = self.groups[group]
        if blocks.names[block] is not None or blocks.index.setdefault(name, block) != block:
            return False
        blocks.names[block] = name
        return True

    def unname(self, group: int, block: int) -> None:
        """Withdraw a block from the index; a cached one becomes free."""
        blocks = self.groups[group]
        name = blocks.names[block]
        if name is None:
            return
        del blocks.index[name]
        blocks.names[block] = None
        if block in blocks.cached:
            del blocks.cached[block]
            self._free(group, block)

    def clear_index(self) -> None:
        """Forget every name, so that nothing cached is found again."""
        for group, blocks in enumerate(self.groups):
            for block in list(blocks.index.values()):
                self.unname(group, block)

    def _first_hold(self, group: int, block: int) -> None:
        blocks = self.groups[group]
        blocks.refs[block] = 1
        blocks.num_held += 1
        if self.shared:
            slab = block // blocks.per_slab
            if not self.held_in[slab]:
                self.idle.pop(slab, None)
            self.held_in[slab] += 1

    def _free(self, group: int, block: int) -> None:
        blocks = self.groups[group]
        slab = block // blocks.per_slab if self.shared else 0
        free = blocks.open.setdefault(slab, [])
        free.append(block)
        blocks.num_free += 1
        if self.shared and len(free) == blocks.per_slab:
            self._release(slab)

    def _release(self, slab: int) -> None:
        """Give a slab of free blocks back to all groups."""
        blocks = self.groups[self.owner[slab]]
        del blocks.open[slab]
        blocks.num_free -= blocks.per_slab
        self.owner[slab] = NO_OWNER
        self.idle.pop(slab, None)
        self.free_slabs.append(slab)

    def _open_slab(self, group: int) -> bool:
        """Make at least one block of the group free: a free slab, its own oldest cached block, or another's slab."""
        blocks = self.groups[group]
        if self.free_slabs:
            self._own(self.free_slabs.pop(), group)
            return True
        if blocks.cached:
            block = next(iter(blocks.cached))
            self._evict_keeping(group, block)
            return True
        for slab in self.idle:
            if self.owner[slab] != group:
                self._empty(slab)
                self._own(self.free_slabs.pop(), group)
                return True
        return False

    def _evict_keeping(self, group: int, block: int) -> None:
        """Free one cached block but keep its slab, which is about to be used."""
        blocks = self.groups[group]
        name = blocks.names[block]
        assert name is not None
        del blocks.index[name]
        blocks.names[block] = None
        del blocks.cached[block]
        slab = block // blocks.per_slab if self.shared else 0
        blocks.open.setdefault(slab, []).append(block)
        blocks.num_free += 1

    def _own(self, slab: int, group: int) -> None:
        blocks = self.groups[group]
        self.owner[slab] = group
        first = slab * blocks.per_slab
        blocks.open[slab] = list(range(first + blocks.per_slab - 1, first - 1, -1))
        blocks.num_free += blocks.per_slab
        self.idle[slab] = None

    def _empty(self, slab: int) -> None:
        """Evict every cached block of an idle slab; the last one releases it."""
        group = self.owner[slab]
        per_slab = self.groups[group].per_slab
        for block in range(slab * per_slab, (slab + 1) * per_slab):
            if self.owner[slab] == group:
                self.unname(group, block)

    def check_integrity(self) -> None:
        """AssertionError naming the first block or slab whose books do not agree."""
        for number, blocks in enumerate(self.groups):
            free = {block for part in blocks.open.values() for block in part}
            assert len(free) == sum(map(len, blocks.open.values())) == blocks.num_free, f"group {number}: free count"
            assert 0 not in free and 0 not in blocks.cached and not blocks.refs[:1].count(1), "the null block is in use"
            assert not free & set(blocks.cached), f"group {number}: blocks both free and cached"
            held = 0
            for block in range(1, blocks.num_blocks):
                refs, name = blocks.refs[block], blocks.names[block]
                assert refs >= 0, f"group {number} block {block}: {refs} holders"
                held += refs > 0
                assert not (refs and (block in free or block in blocks.cached)), f"group {number} block {block}: held"
                assert (name is None) or blocks.index.get(name) == block, f"group {number} block {block}: name lost"
                assert (block in blocks.cached) == (name is not None and not refs), (
                    f"group {number} block {block}: cached"
                )
                if self.shared:
                    mine = self.owner[block // blocks.per_slab] == number
                    assert mine or not (refs or name or block in free), f"group {number} block {block}: foreign slab"
                    assert not mine or refs or name or block in free, f"group {number} block {block}: lost"
                else:
                    assert refs or name or block in free, f"group {number} block {block}: lost"
            assert held == blocks.num_held, f"group {number}: {held} held, {blocks.num_held} counted"
            assert all(blocks.names[b] == n for n, b in blocks.index.items()), f"group {number}: index"
        self._check_slabs()

    def _check_slabs(self) -> None:
        if not self.shared:
            return
        assert sorted(self.free_slabs) == [s for s in range(1, self.num_slabs) if self.owner[s] == NO_OWNER], (
            "free slabs"
        )
        for slab in range(1, self.num_slabs):
            if self.owner[slab] == NO_OWNER:
                assert slab not in self.idle and not self.held_in[slab], f"slab {slab}: free but in use"
                continue
            blocks = self.groups[self.owner[slab]]
            held = sum(blocks.refs[b] > 0 for b in range(slab * blocks.per_slab, (slab + 1) * blocks.per_slab))
            assert held == self.held_in[slab], f"slab {slab}: {held} held, {self.held_in[slab]} counted"
            assert (slab in self.idle) == (held == 0), f"slab {slab}: idle"
