"""The pool: slabs belong to one group at a time and are cut into blocks; blocks are counted, named and reused.

A block is in exactly one state: free (no name, no holder), cached (named in the index, no holder, evictable), or held
(``refs`` > 0). Slab 0 is never handed out: block 0 of every group, the null block, lies in it. Where groups share
slabs, a slab whose blocks are all free goes back to all groups; what is evicted is the oldest, whosever it is.

The last blocks can be retired, so that their memory can go back to the device: they are not handed out any more, and
in no state once nobody holds them.

Where somebody wants to know (``recording``), blocks whose content has become void are noted: those that became free,
and cached ones that were evicted. What is cached can still be found, so it is not void.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from drivetrain.cache.books import NO_OWNER, check_pool
from drivetrain.cache.sizing import CachePlan


class GroupBlocks:
    """One group's blocks. ``open``: slab -> its free blocks (ordered: a plain dict is slow to find its first key once
    many are gone); ``cached``: block -> when it was let go; ``queue``: these pairs, oldest first, some of them out of
    date; ``num_idle``: slabs of this group that have no held block; ``limit``: blocks from here on are retired."""

    __slots__ = (
        "cached", "index", "limit", "names", "num_blocks", "num_free", "num_held", "num_idle",
        "open", "per_slab", "queue", "refs",
    )  # fmt: skip

    def __init__(self, num_blocks: int, per_slab: int) -> None:
        self.per_slab = per_slab
        self.num_blocks = self.limit = num_blocks
        self.refs = [0] * num_blocks
        self.names: list[bytes | None] = [None] * num_blocks
        self.index: dict[bytes, int] = {}
        self.cached: dict[int, int] = {}
        self.queue: deque[tuple[int, int]] = deque()
        self.open: OrderedDict[int, list[int]] = OrderedDict()
        self.num_free = 0
        self.num_held = 0
        self.num_idle = 0

    def oldest(self) -> tuple[int, int] | None:
        """Return the cached block that was let go first, and when; None when there is none."""
        queue, cached = self.queue, self.cached
        while queue:
            first = queue[0]
            if cached.get(first[0]) == first[1]:
                return first
            queue.popleft()
        return None


class Pool:
    """All groups' blocks over the shared slabs, or over a fixed set of blocks for each group."""

    def __init__(self, plan: CachePlan, *, recording: bool = False) -> None:
        self.shared = plan.shared
        self.freed: list[list[int]] | None = [[] for _ in plan.groups] if recording else None
        self.groups = [GroupBlocks(group.num_blocks, group.blocks_per_slab) for group in plan.groups]
        self.num_slabs = self.kept_slabs = plan.num_slabs
        self.owner = [NO_OWNER] * plan.num_slabs
        self.held_in = [0] * plan.num_slabs
        self.free_slabs = list(range(plan.num_slabs - 1, 0, -1)) if plan.shared else []
        self.idle: OrderedDict[int, int] = (
            OrderedDict()
        )  # slab with an owner and no held block -> when it became idle, oldest first
        self._clock = 0
        if not plan.shared:
            for group in self.groups:
                group.per_slab = max(1, group.num_blocks)
                if group.num_blocks > 1:
                    group.open[0] = list(range(group.num_blocks - 1, 0, -1))
                    group.num_free = group.num_blocks - 1

    def available(self, group: int) -> int:
        """Return how many blocks could be taken now for one group, were all of them for it."""
        blocks = self.groups[group]
        slabs = len(self.free_slabs) + len(self.idle) - blocks.num_idle
        return blocks.num_free + len(blocks.cached) + slabs * blocks.per_slab

    def take(self, group: int) -> int:
        """Hand out a block with one holder; 0 when none can be had."""
        taken = self.take_many(group, 1)
        return taken[0] if taken else 0

    def take_many(self, group: int, count: int) -> list[int]:
        """Hand out blocks with one holder each, fewer than asked when no more can be had. Free ones first."""
        blocks = self.groups[group]
        opened, taken = blocks.open, list[int]()
        while count:
            if opened:
                part = self._take_open(blocks, count)
            elif self.free_slabs:
                self._open_slab(group, blocks)
                continue
            else:
                part = self._take_cached(group, blocks, count)
                if not part:
                    break
            taken += part
            count -= len(part)
        refs = blocks.refs
        for block in taken:
            refs[block] = 1
        blocks.num_held += len(taken)
        return taken

    def _take_open(self, blocks: GroupBlocks, count: int) -> list[int]:
        """Take free blocks of one slab."""
        slab = next(iter(blocks.open))
        free = blocks.open[slab]
        if len(free) > count:
            part = free[-count:]
            del free[-count:]
        else:
            part = free
            del blocks.open[slab]
        blocks.num_free -= len(part)
        if self.shared:
            if not self.held_in[slab]:
                self._busy(slab, blocks)
            self.held_in[slab] += len(part)
        part.reverse()
        return part

    def _take_cached(self, group: int, blocks: GroupBlocks, count: int) -> list[int]:
        """Evict the group's oldest cached blocks, or first what another group has let go of for longer."""
        slab = next(iter(self.idle), None)
        foreign = slab is not None and self.owner[slab] != group
        own = blocks.oldest()
        if slab is not None and foreign and (own is None or self.idle[slab] < own[1]):
            self._empty(slab)
            self._open_slab(group, blocks)
            return self._take_open(blocks, count)
        bar = self.idle[slab] if slab is not None and foreign else self._clock
        names, index, cached, part = blocks.names, blocks.index, blocks.cached, list[int]()
        queue, shared, held_in, per_slab = blocks.queue, self.shared, self.held_in, blocks.per_slab
        left = count
        while queue and left:
            block, since = queue[0]
            if cached.get(block) != since:
                queue.popleft()
                continue
            if since > bar:
                break
            queue.popleft()
            left -= 1
            part.append(block)
            name = names[block]
            assert name is not None, "a cached block has a name"
            del cached[block], index[name]
            names[block] = None
            if shared:
                slab = block // per_slab
                if not held_in[slab]:
                    self._busy(slab, blocks)
                held_in[slab] += 1
        if self.freed is not None:
            self.freed[group] += part
        return part

    def hold(self, group: int, block: int) -> None:
        """Add a holder to a held or cached block."""
        self.hold_many(group, (block,))

    def hold_many(self, group: int, held: Sequence[int]) -> None:
        """Add a holder to each of these held or cached blocks."""
        blocks = self.groups[group]
        refs, cached, shared, held_in, per_slab = (
            blocks.refs, blocks.cached, self.shared, self.held_in, blocks.per_slab,
        )  # fmt: skip
        for block in held:
            others = refs[block]
            refs[block] = others + 1
            if others:
                continue
            del cached[block]
            blocks.num_held += 1
            if shared:
                slab = block // per_slab
                if not held_in[slab]:
                    self._busy(slab, blocks)
                held_in[slab] += 1

    def unheld(self, group: int, block: int) -> bool:
        """Return whether nobody holds a block."""
        return not self.groups[group].refs[block]

    def drop(self, group: int, block: int) -> None:
        """Take a holder away; the last one leaves the block cached if it has a name, else free."""
        self.drop_many(group, (block,))

    def drop_many(self, group: int, dropped: Sequence[int]) -> None:
        """Take a holder of each block away, in order: what is dropped first is evicted first."""
        blocks = self.groups[group]
        refs, names, cached, per_slab = blocks.refs, blocks.names, blocks.cached, blocks.per_slab
        queue, shared, held_in, left, limit = blocks.queue, self.shared, self.held_in, 0, blocks.limit
        self._clock = clock = self._clock + 1
        for block in dropped:
            others = refs[block] - 1
            refs[block] = others
            if others:
                left += 1
                continue
            slab = block // per_slab
            if shared:
                held = held_in[slab] - 1
                held_in[slab] = held
                if not held:
                    self.idle[slab] = clock
                    blocks.num_idle += 1
            if block >= limit:
                self._lose(blocks, slab, block)
            elif names[block] is None:
                self._free(blocks, slab, block)
            else:
                cached[block] = clock
                queue.append((block, clock))
        if len(queue) > 64 + 2 * len(cached):
            blocks.queue = deque(cached.items())
        blocks.num_held -= len(dropped) - left
        if self.freed is not None:
            void = [block for block in dropped if not refs[block] and names[block] is None]
            self.freed[group] += [block for block in void if block < limit]

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
            self._free(blocks, block // blocks.per_slab, block)
            if self.freed is not None:
                self.freed[group].append(block)

    def retire(self, limits: Sequence[int]) -> None:
        """Hand out no block from each group's limit on any more: whole slabs where groups share them. Nobody finds them
        by their names; whoever holds one keeps it."""
        for blocks, limit in zip(self.groups, limits, strict=True):
            blocks.limit = min(blocks.limit, limit)
        if self.shared and self.groups:
            self.kept_slabs = self.groups[0].limit // self.groups[0].per_slab
            self.free_slabs = [slab for slab in self.free_slabs if slab < self.kept_slabs]
        if self.freed is not None:
            self.freed = [
                [b for b in void if b < blocks.limit] for void, blocks in zip(self.freed, self.groups, strict=True)
            ]
        self.retired()

    def retired(self) -> bool:
        """Return whether nobody holds a retired block. Names that such blocks have got meanwhile are forgotten."""
        if not self.shared:
            for blocks in self.groups:
                self._strip(blocks, 0, range(blocks.limit, blocks.num_blocks))
            return not any(any(blocks.refs[blocks.limit :]) for blocks in self.groups)
        left = [slab for slab in range(self.kept_slabs, self.num_slabs) if self.owner[slab] != NO_OWNER]
        for slab in left:
            blocks = self.groups[self.owner[slab]]
            self._strip(blocks, slab, range(slab * blocks.per_slab, (slab + 1) * blocks.per_slab))
            if not self.held_in[slab]:
                self._busy(slab, blocks)
                self.owner[slab] = NO_OWNER
        return not any(self.held_in[slab] for slab in left)

    def _strip(self, blocks: GroupBlocks, slab: int, span: range) -> None:
        """Take retired blocks, all of this slab, from the free and the cached ones."""
        names, index, cached = blocks.names, blocks.index, blocks.cached
        for block in span:
            name = names[block]
            if name is not None:
                del index[name]
                names[block] = None
                cached.pop(block, None)
        free = blocks.open.pop(slab, [])
        kept = [block for block in free if block < blocks.limit]
        blocks.num_free -= len(free) - len(kept)
        if kept:
            blocks.open[slab] = kept

    def _lose(self, blocks: GroupBlocks, slab: int, block: int) -> None:
        """A retired block has lost its last holder."""
        name = blocks.names[block]
        if name is not None:
            del blocks.index[name]
            blocks.names[block] = None
        if self.shared and not self.held_in[slab]:
            self._busy(slab, blocks)
            self.owner[slab] = NO_OWNER

    def clear_index(self) -> None:
        """Forget every name, so that nothing cached is found again."""
        for group, blocks in enumerate(self.groups):
            for block in list(blocks.index.values()):
                self.unname(group, block)

    def take_freed(self) -> list[list[int]]:
        """Return, by group, and forget the blocks that became void since the last call, some of them held anew by now.
        Nothing where they are not recorded."""
        if self.freed is None:
            return []
        freed, self.freed = self.freed, [[] for _ in self.groups]
        return freed

    def overwritten(self, group: int, held: Iterable[int]) -> None:
        """Forget that these held blocks were void: they get content at once, by somebody who waits for no plan."""
        if self.freed is None:
            return
        mine, per_slab = set(held), self.groups[group].per_slab
        self.freed[group] = [block for block in self.freed[group] if block not in mine]
        for number, blocks in enumerate(self.groups if self.shared else ()):
            if number != group:  # what other groups had in the same slabs: bytes of one are bytes of several
                theirs = blocks.per_slab
                self.freed[number] = [
                    block
                    for block in self.freed[number]
                    if mine.isdisjoint(range(block * per_slab // theirs, -(-(block + 1) * per_slab // theirs)))
                ]

    def _busy(self, slab: int, blocks: GroupBlocks) -> None:
        if self.idle.pop(slab, None) is not None:
            blocks.num_idle -= 1

    def _free(self, blocks: GroupBlocks, slab: int, block: int) -> None:
        free = blocks.open.get(slab)
        if free is None:
            free = blocks.open[slab] = []
        free.append(block)
        blocks.num_free += 1
        if self.shared and len(free) == blocks.per_slab:
            self._release(slab, blocks)

    def _release(self, slab: int, blocks: GroupBlocks) -> None:
        """Give a slab, none of whose blocks is held or named, back to all groups."""
        blocks.num_free -= len(blocks.open.pop(slab, ()))
        self._busy(slab, blocks)
        self.owner[slab] = NO_OWNER
        self.free_slabs.append(slab)

    def _open_slab(self, group: int, blocks: GroupBlocks) -> None:
        """Give a free slab to a group."""
        slab = self.free_slabs.pop()
        self.owner[slab] = group
        first = slab * blocks.per_slab
        blocks.open[slab] = list(range(first + blocks.per_slab - 1, first - 1, -1))
        blocks.num_free += blocks.per_slab
        self.idle[slab] = self._clock
        blocks.num_idle += 1

    def _empty(self, slab: int) -> None:
        """Evict every cached block of an idle slab, and release it."""
        blocks = self.groups[self.owner[slab]]
        names, index, cached = blocks.names, blocks.index, blocks.cached
        span = range(slab * blocks.per_slab, (slab + 1) * blocks.per_slab)
        if self.freed is not None:
            self.freed[self.owner[slab]] += [block for block in span if names[block] is not None]
        for block in span:
            name = names[block]
            if name is not None:
                del index[name], cached[block]
                names[block] = None
        self._release(slab, blocks)

    def check_integrity(self) -> None:
        """AssertionError naming the first block or slab whose books do not agree."""
        check_pool(self)
