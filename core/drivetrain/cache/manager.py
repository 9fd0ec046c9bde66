"""The cache manager: the only owner of blocks. It knows rows, positions and digests, never tensors or requests.

Tables mirror what the runner holds on the device: table[g][row, i] is the block of positions i * block_tokens ..,
0 where nothing is held. Every change is recorded and handed out once, for the next plan (``take_changes``).
A block's life: allocated (``extend``) -> written (by the plan that follows) -> named (``publish``) -> free (``close``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drivetrain.cache.groups import Group, RecurrentGroup, make_group
from drivetrain.cache.pool import Pool
from drivetrain.cache.sizing import CachePlan
from drivetrain.sched.plan import NO_BLOCKS, BlockCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What the next plan must tell the runner: see the fields of ``StepPlan`` of the same names."""

    blocks: np.ndarray
    zeroed: tuple[tuple[int, int], ...]
    copies: tuple[BlockCopy, ...]


class CacheManager:
    """Blocks of ``max_rows`` rows over all groups. ``unit``: tokens a digest covers."""

    def __init__(self, plan: CachePlan, *, max_rows: int, max_tokens: int, unit: int) -> None:
        self.plan, self.unit, self.max_tokens = plan, unit, max_tokens
        self.pool = Pool(plan)
        self.groups: tuple[Group, ...] = tuple(make_group(self.pool, n, g, unit) for n, g in enumerate(plan.groups))
        self.paged = tuple(group for group in self.groups if group.plan.kind != "recurrent")
        self.recurrent = tuple(group for group in self.groups if isinstance(group, RecurrentGroup))
        self.granule = max([unit, *(group.granule for group in self.groups)])
        widths = [1 if g.plan.kind == "recurrent" else -(-max_tokens // g.plan.block_tokens) for g in self.groups]
        self.tables = [np.zeros((max_rows, width), np.int32) for width in widths]
        self.ends = np.zeros((len(self.groups), max_rows), np.int32)  # table indices in use
        self.firsts = np.zeros((len(self.groups), max_rows), np.int32)  # first table index still held
        self.named = np.zeros((len(self.groups), max_rows), np.int32)  # table indices below it were offered a name
        self._parts: list[np.ndarray] = []
        self._zeroed: list[tuple[int, int]] = []
        self._copies: list[BlockCopy] = []
        self._lent: list[tuple[int, int]] = []  # checkpoints to be let go once the plan that copies them is out

    def longest(self, digests: Sequence[bytes], limit: int, multiple: int = 0) -> int:
        """Return the longest prefix <= limit that every group can serve, a multiple of ``multiple`` if one is given."""
        step = multiple or self.granule
        length = limit // step * step
        while length > 0 and self.groups:
            served = min(group.longest(digests, length) for group in self.groups) // step * step
            if served == length:
                return length
            length = served
        return 0

    def open(self, row: int, digests: Sequence[bytes], length: int) -> bool:
        """Give a row the cached blocks of a prefix that ``longest`` returned; False when a state block lacks."""
        taken: list[tuple[int, int]] = []
        for group in self.groups:
            found = group.blocks_at(digests, length)
            for _, block in found:
                self.pool.hold(group.number, block)
                taken.append((group.number, block))
            if isinstance(group, RecurrentGroup):
                working = self.pool.take(group.number)
                if not working:
                    for number, block in taken:
                        self.pool.drop(number, block)
                    self._forget(row)
                    return False
                taken.append((group.number, working))
                self._start_state(group, row, working, found)
            elif found:
                self._record(group.number, row, [i for i, _ in found], [block for _, block in found])
                self.firsts[group.number, row] = found[0][0]
                self.ends[group.number, row] = found[-1][0] + 1
            if not isinstance(group, RecurrentGroup):
                count = length // group.plan.block_tokens
                self.ends[group.number, row] = self.named[group.number, row] = count
                if not found:
                    self.firsts[group.number, row] = count
        return True

    def _start_state(self, group: Group, row: int, working: int, found: list[tuple[int, int]]) -> None:
        if found:
            self._copies.append(BlockCopy(group=group.number, source=found[0][1], target=working))
            self._lent.append((group.number, found[0][1]))
        else:
            self._zeroed.append((group.number, working))
        self._record(group.number, row, [0], [working])
        self.ends[group.number, row] = 1

    def _forget(self, row: int) -> None:
        """Undo the records of a row that could not be opened."""
        for number, table in enumerate(self.tables):
            table[row] = 0
            self.ends[number, row] = self.firsts[number, row] = self.named[number, row] = 0
        self._parts = [part[part[:, 0] != row] for part in self._parts]

    def shortage(self, row: int, upto: int) -> bool:
        """Return whether any group lacks blocks for the row to hold ``upto`` tokens."""
        for group in self.paged:
            needed = -(-upto // group.plan.block_tokens) - int(self.ends[group.number, row])
            if needed > 0 and needed > self.pool.available(group.number):
                return True
        return False

    def extend(self, row: int, upto: int) -> bool:
        """Allocate so that the row holds ``upto`` tokens in every group: all of it, or nothing and False."""
        if self.pool.shared and len(self.paged) > 1:
            return self._extend_carefully(row, upto)
        if self.shortage(row, upto):
            return False
        return self._extend_carefully(row, upto)

    def _extend_carefully(self, row: int, upto: int) -> bool:
        done: list[tuple[int, list[int]]] = []
        for group in self.paged:
            number = group.number
            begin, end = int(self.ends[number, row]), -(-upto // group.plan.block_tokens)
            blocks: list[int] = []
            done.append((number, blocks))
            for _ in range(begin, end):
                block = self.pool.take(number)
                if not block:
                    for held_in, held in done:
                        for one in held:
                            self.pool.drop(held_in, one)
                    return False
                blocks.append(block)
        for number, blocks in done:
            if blocks:
                begin = int(self.ends[number, row])
                self._record(number, row, range(begin, begin + len(blocks)), blocks)
                self.ends[number, row] = begin + len(blocks)
        return True

    def extend_rows(self, rows: np.ndarray, upto: np.ndarray) -> int | None:
        """Let many rows hold ``upto`` tokens each (at most one block more a group). Returns the first row that lacks a
        block, None when all have theirs; what was allocated before it stays allocated."""
        for group in self.paged:
            number = group.number
            ends = self.ends[number]
            short = np.flatnonzero(upto > ends[rows] * group.plan.block_tokens)
            if not len(short):
                continue
            chosen = rows[short]
            blocks, take = [], self.pool.take
            for _ in range(len(chosen)):
                block = take(number)
                if not block:
                    break
                blocks.append(block)
            got = len(blocks)
            self._record_many(number, chosen[:got], blocks)
            if got < len(chosen):
                return int(chosen[got])
            if np.any(upto[short] > ends[chosen] * group.plan.block_tokens):
                return self.extend_rows(rows, upto)
        return None

    def _record_many(self, number: int, rows: np.ndarray, blocks: list[int]) -> None:
        if not blocks:
            return
        part = np.empty((len(blocks), 4), np.int32)
        part[:, 0] = rows
        part[:, 1] = number
        part[:, 2] = self.ends[number, rows]
        part[:, 3] = blocks
        self.tables[number][rows, part[:, 2]] = part[:, 3]
        self.ends[number, rows] += 1
        self._parts.append(part)

    def _record(self, number: int, row: int, indices: Sequence[int], blocks: Sequence[int]) -> None:
        part = np.empty((len(blocks), 4), np.int32)
        part[:, 0], part[:, 1], part[:, 2], part[:, 3] = row, number, indices, blocks
        self.tables[number][row, part[:, 2]] = part[:, 3]
        self._parts.append(part)

    def slide(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Let go of blocks that no query at ``positions`` or later can read (sliding windows)."""
        for group in self.paged:
            if group.plan.window is None:
                continue
            number, size, window = group.number, group.plan.block_tokens, group.plan.window
            needed = np.maximum(positions - window + 1, 0) // size
            needed = np.minimum(needed, self.ends[number, rows])
            firsts = self.firsts[number]
            for i in np.flatnonzero(needed > firsts[rows]):
                row, end = int(rows[i]), int(needed[i])
                self._let_go(number, row, int(firsts[row]), end)
                firsts[row] = end

    def _let_go(self, number: int, row: int, begin: int, end: int) -> None:
        table = self.tables[number]
        held = table[row, begin:end].tolist()
        indices = [begin + i for i, block in enumerate(held) if block]
        for block in held:
            if block:
                self.pool.drop(number, block)
        self._record(number, row, indices, [0] * len(indices))

    def publish(self, row: int, digests: Sequence[bytes], upto: int) -> list[tuple[int, int]]:
        """Name the row's blocks whose tokens are all below ``upto`` and known; returns those newly named."""
        new = []
        for group in self.paged:
            number = group.number
            begin, end = int(self.named[number, row]), group.named_upto(upto)
            if end <= begin:
                continue
            blocks = self.tables[number][row, begin:end].tolist()
            for index, block in enumerate(blocks, begin):
                if block and self.pool.name(number, block, group.name_of(digests, index)):
                    new.append((number, block))
            self.named[number, row] = end
        return new

    def checkpoint(self, group: Group, digests: Sequence[bytes], length: int) -> int:
        """Allocate and name a checkpoint of the state after ``length`` tokens; 0 when there is one or no block.

        It is let go with the next ``take_changes``: cached, and evictable by later plans only.
        """
        name = digests[length // self.unit - 1]
        if name in self.pool.groups[group.number].index:
            return 0
        block = self.pool.take(group.number)
        if block:
            self.pool.name(group.number, block, name)
            self._lent.append((group.number, block))
        return block

    def close(self, row: int) -> None:
        """Let go of all that a row holds, and of what the next plan was to do with it."""
        for group in self.recurrent:
            working = int(self.tables[group.number][row, 0])
            self._zeroed = [one for one in self._zeroed if one != (group.number, working)]
            self._copies = [c for c in self._copies if (c.group, c.target) != (group.number, working)]
        for number, table in enumerate(self.tables):
            first, end = int(self.firsts[number, row]), int(self.ends[number, row])
            # last blocks first: a chain is evicted from its end, so that what is left of it can still be found
            for block in table[row, first:end][::-1].tolist():
                if block:
                    self.pool.drop(number, block)
            table[row, :end] = 0
            self.ends[number, row] = self.firsts[number, row] = self.named[number, row] = 0
        if self._parts:
            self._parts = [part[part[:, 0] != row] for part in self._parts]

    def held(self, row: int) -> list[tuple[int, int]]:
        """Return (group, block) of all that a row holds."""
        return [
            (number, block)
            for number, table in enumerate(self.tables)
            for block in table[row, self.firsts[number, row] : self.ends[number, row]].tolist()
            if block
        ]

    def take_changes(self) -> Changes:
        """Return and forget what changed since the last call."""
        blocks = np.concatenate(self._parts) if self._parts else NO_BLOCKS
        changes = Changes(blocks=blocks, zeroed=tuple(self._zeroed), copies=tuple(self._copies))
        self._parts, self._zeroed, self._copies = [], [], []
        for number, block in self._lent:
            self.pool.drop(number, block)
        self._lent = []
        return changes

    @property
    def num_held(self) -> int:
        """Blocks held by rows, over all groups."""
        return sum(group.num_held for group in self.pool.groups)

    @property
    def num_blocks(self) -> int:
        """Blocks that could be held at once if all slabs went to the group of largest blocks."""
        if self.plan.shared:
            return max(0, self.plan.num_slabs - 1) * min((g.blocks_per_slab for g in self.plan.groups), default=0)
        return sum(max(0, g.num_blocks - 1) for g in self.plan.groups)

    @property
    def use(self) -> float:
        """The part of the cache's bytes that rows hold."""
        held = sum(g.num_held * p.stride for g, p in zip(self.pool.groups, self.plan.groups, strict=True))
        return held / self.plan.total_bytes if self.plan.total_bytes else 0.0

    def check_integrity(self) -> None:
        """AssertionError naming the first disagreement between tables, holders, slabs and index."""
        self.pool.check_integrity()
        for number, table in enumerate(self.tables):
            counted: dict[int, int] = {}
            for row in range(len(table)):
                first, end = int(self.firsts[number, row]), int(self.ends[number, row])
                assert first <= end, f"group {number} row {row}: first {first} beyond end {end}"
                assert not table[row, :first].any() and not table[row, end:].any(), f"group {number} row {row}: stray"
                for block in table[row, first:end].tolist():
                    assert block, f"group {number} row {row}: a hole"
                    counted[block] = counted.get(block, 0) + 1
            for lent_in, block in self._lent:
                if lent_in == number:
                    counted[block] = counted.get(block, 0) + 1
            for block, refs in enumerate(self.pool.groups[number].refs):
                assert refs == counted.get(block, 0), (
                    f"group {number} block {block}: {refs} holders, {counted.get(block, 0)} found"
                )
