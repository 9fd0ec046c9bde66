"""The cache manager: the only owner of blocks. It knows rows, positions and digests, never tensors or requests.

Tables mirror what the runner holds on the device: table[g][row, i] is the block of positions i * block_tokens ..,
0 where nothing is held. Every change is recorded and handed out once, for the next plan (``take_changes``).
A block's life: allocated (``extend``) -> written (by the plan that follows) -> named (``publish``) -> free (``close``).
``horizon[row]`` is the number of tokens up to which the row has blocks in every group: below it a step needs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drivetrain.cache.books import check_tables
from drivetrain.cache.groups import Group, PagedGroup, RecurrentGroup, make_group
from drivetrain.cache.pool import Pool
from drivetrain.cache.sizing import CachePlan, bytes_of
from drivetrain.sched.plan import NO_BLOCKS, BlockCopy

Held = tuple[int, int]  # group, block


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What the next plan must tell the runner: see the fields of ``StepPlan`` of the same names."""

    freed: tuple[tuple[int, np.ndarray], ...]
    blocks: np.ndarray
    zeroed: tuple[Held, ...]
    copies: tuple[BlockCopy, ...]


class CacheManager:
    """Blocks of ``max_rows`` rows over all groups. ``unit``: tokens a digest covers; ``announce_freed``: plans name the
    blocks whose content has become void."""

    def __init__(
        self, plan: CachePlan, *, max_rows: int, max_tokens: int, unit: int, announce_freed: bool = False
    ) -> None:
        self.plan, self.unit, self.max_tokens = plan, unit, max_tokens
        self.pool = Pool(plan, recording=announce_freed)
        self.groups: tuple[Group, ...] = tuple(make_group(self.pool, n, g, unit) for n, g in enumerate(plan.groups))
        self.paged = tuple(group for group in self.groups if isinstance(group, PagedGroup))
        self.sliding = tuple(group for group in self.paged if group.plan.window is not None)
        self.recurrent = tuple(group for group in self.groups if isinstance(group, RecurrentGroup))
        self.granule = max([unit, *(group.granule for group in self.groups)])
        widths = [1 if g.plan.kind == "recurrent" else -(-max_tokens // g.plan.block_tokens) for g in self.groups]
        self.tables = [np.zeros((max_rows, width), np.int32) for width in widths]
        sizes = sorted({group.plan.block_tokens for group in self.paged})
        self._by_size = tuple(tuple(g for g in self.paged if g.plan.block_tokens == size) for size in sizes)
        # table indices in use; groups of equal blocks always use as many, so that they share one array
        self.ends = [np.zeros(max_rows, np.int32) for _ in self.groups]
        for equals in self._by_size:
            for group in equals:
                self.ends[group.number] = self.ends[equals[0].number]
        self.firsts = np.zeros((len(self.groups), max_rows), np.int32)  # first table index still held
        self.horizon = np.zeros(max_rows, np.int32)
        self._parts: list[np.ndarray] = []
        self._zeroed: list[Held] = []
        self._copies: list[BlockCopy] = []
        self._lent: list[Held] = []  # checkpoints to be let go once the plan that copies or writes them is out

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

    def rewritable(self, digests: Sequence[bytes], length: int) -> bool:
        """Return whether all of a prefix is cached and nobody holds its last blocks, so that a row that has them may
        write their last token again: with plain tables only, and where no cache takes a block for one writer's."""
        if length % self.granule or not self.paged or self.sliding or self.recurrent or self.pool.freed is not None:
            return False
        if any(group.longest(digests, length) < length for group in self.paged):
            return False
        return all(self.pool.unheld(number, block) for number, block in self.last_blocks(digests, length))

    def last_blocks(self, digests: Sequence[bytes], length: int) -> list[Held]:
        """Return in each paged group the cached block of the last token of a prefix that is cached."""
        indices = [(group, length // group.plan.block_tokens - 1) for group in self.paged]
        return [(g.number, self.pool.groups[g.number].index[g.name_of(digests, index)]) for g, index in indices]

    def open(self, row: int, digests: Sequence[bytes], length: int) -> list[Sequence[int]] | None:
        """Give a row the cached blocks of a prefix that ``longest`` returned, and working blocks for states.

        Returns the shared blocks it builds on, by group; None, and nothing held, when a working block lacks.
        """
        found = [group.blocks_at(digests, length) for group in self.groups]
        shared: list[Sequence[int]] = [blocks for _, blocks in found]
        for number, blocks in enumerate(shared):
            self.pool.hold_many(number, blocks)
        working = [self.pool.take(group.number) for group in self.recurrent]
        if not all(working):
            for number, blocks in enumerate(shared):
                self.pool.drop_many(number, blocks)
            for group, block in zip(self.recurrent, working, strict=True):
                if block:
                    self.pool.drop(group.number, block)
            return None
        for group, block in zip(self.recurrent, working, strict=True):
            self._start_state(group, row, block, found[group.number][1])
        for paged in self.paged:
            number, count = paged.number, length // paged.plan.block_tokens
            first, blocks = found[number]
            first = first if blocks else count
            self._record(number, row, first, blocks)
            self.firsts[number, row] = first
            self.ends[number][row] = count
        self._see_row(row)
        return shared

    def _start_state(self, group: Group, row: int, working: int, found: Sequence[int]) -> None:
        if found:
            self._copies.append(BlockCopy(group=group.number, source=found[0], target=working))
            self._lent.append((group.number, found[0]))
        else:
            self._zeroed.append((group.number, working))
        self._record(group.number, row, 0, [working])
        self.firsts[group.number, row], self.ends[group.number][row] = 0, 1

    def plenty(self, num: int) -> bool:
        """Return whether every group could have so many blocks and more."""
        return all(self.pool.available(group.number) > num for group in self.paged)

    def extend(self, row: int, upto: int) -> bool:
        """Allocate so that the row holds ``upto`` tokens in every group: all of it, or nothing and False."""
        got: list[tuple[int, list[int]]] = []
        for group in self.paged:
            number = group.number
            lacking = -(-upto // group.plan.block_tokens) - int(self.ends[number][row])
            blocks = self.pool.take_many(number, lacking) if 0 < lacking <= self.pool.available(number) else []
            got.append((number, blocks))
            if len(blocks) < lacking:
                for held_in, held in got:
                    self.pool.drop_many(held_in, held)
                return False
        for number, blocks in got:
            if blocks:
                self._record(number, row, int(self.ends[number][row]), blocks)
        for number, _ in got:
            self.ends[number][row] = max(int(self.ends[number][row]), -(-upto // self.plan.groups[number].block_tokens))
        self._see_row(row)
        return True

    def extend_rows(self, rows: np.ndarray, upto: np.ndarray) -> int | None:
        """Let rows hold ``upto`` tokens each, a block after the other. Returns the first row that lacks a block, None
        when all have theirs; what was allocated before it stays allocated."""
        for groups in self._by_size:
            ends, size = self.ends[groups[0].number], groups[0].plan.block_tokens
            left = (upto + (size - 1)) // size - ends[rows]
            chosen = (left > 0).nonzero()[0]
            while len(chosen):
                short = rows[chosen]
                taken = [self.pool.take_many(group.number, len(short)) for group in groups]
                got = min(len(blocks) for blocks in taken)
                self._record_blocks(groups, short[:got], taken)
                if got < len(short):
                    for group, blocks in zip(groups, taken, strict=True):
                        self.pool.drop_many(group.number, blocks[got:])
                    self._see_horizon(rows)
                    return int(short[got])
                left -= 1
                chosen = (left > 0).nonzero()[0]
        self._see_horizon(rows)
        return None

    def _record_blocks(self, groups: Sequence[Group], rows: np.ndarray, taken: Sequence[Sequence[int]]) -> None:
        """Each row gets one more block in each of these groups, which have blocks of one size."""
        ends, num = self.ends[groups[0].number], len(rows)
        indices = ends[rows]
        part = np.empty((len(groups), num, 4), np.int32)
        part[:, :, 0], part[:, :, 2] = rows, indices
        for place, (group, blocks) in enumerate(zip(groups, taken, strict=True)):
            part[place, :, 1], part[place, :, 3] = group.number, blocks[:num]
            self.tables[group.number][rows, indices] = part[place, :, 3]
        ends[rows] = indices + 1
        self._parts.append(part.reshape(-1, 4))

    def _see_horizon(self, rows: np.ndarray) -> None:
        """Bring ``horizon`` up to date for rows whose blocks changed."""
        if not self.paged:
            self.horizon[rows] = self.max_tokens
            return
        horizon = self.ends[self._by_size[0][0].number][rows] * self._by_size[0][0].plan.block_tokens
        for groups in self._by_size[1:]:
            horizon = np.minimum(horizon, self.ends[groups[0].number][rows] * groups[0].plan.block_tokens)
        self.horizon[rows] = horizon

    def _see_row(self, row: int) -> None:
        """The same for one row."""
        upto = [int(self.ends[groups[0].number][row]) * groups[0].plan.block_tokens for groups in self._by_size]
        self.horizon[row] = min(upto, default=self.max_tokens)

    def _record_many(self, number: int, rows: np.ndarray, indices: np.ndarray, blocks: Sequence[int]) -> None:
        """One table entry of each row changes."""
        part = np.empty((len(blocks), 4), np.int32)
        part[:, 0], part[:, 1], part[:, 2], part[:, 3] = rows, number, indices, blocks
        self.tables[number][rows, indices] = part[:, 3]
        self._parts.append(part)

    def _record(self, number: int, row: int, first: int, blocks: Sequence[int]) -> None:
        """Entries of one row change, from index ``first`` on."""
        if not blocks:
            return
        end = first + len(blocks)
        part = np.empty((len(blocks), 4), np.int32)
        part[:, 0], part[:, 1], part[:, 2], part[:, 3] = row, number, np.arange(first, end, dtype=np.int32), blocks
        self.tables[number][row, first:end] = part[:, 3]
        self._parts.append(part)

    def slide(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Let go of blocks that no query at ``positions`` or later can read (sliding windows)."""
        for group in self.sliding:
            firsts, size, window = self.firsts[group.number], group.plan.block_tokens, group.plan.window
            assert window is not None, "a sliding group has a window"
            left = (positions - (window - 1)) // size - firsts[rows]
            chosen = (left > 0).nonzero()[0]
            while len(chosen):
                which = rows[chosen]
                indices = firsts[which]
                blocks = self.tables[group.number][which, indices].tolist()
                self._record_many(group.number, which, indices, [0] * len(blocks))
                self.pool.drop_many(group.number, blocks)
                firsts[which] = indices + 1
                left -= 1
                chosen = (left > 0).nonzero()[0]

    def publish(self, row: int, digests: Sequence[bytes], begin: int, end: int) -> list[Held]:
        """Name the row's blocks that tokens ``begin`` .. ``end`` - 1, whole units, complete; returns those new."""
        new: list[Held] = []
        for group in self.paged:
            number = group.number
            first, last = group.named_upto(begin), group.named_upto(end)
            blocks = self.tables[number][row, first:last].tolist()
            named = [
                (number, block)
                for index, block in enumerate(blocks, first)
                if block and self.pool.name(number, block, group.name_of(digests, index))
            ]
            if len(named) == len(blocks):
                group.named(digests, first, blocks)
            new += named
        return new

    def publish_units(self, rows: np.ndarray, units: np.ndarray, digests: Sequence[bytes]) -> None:
        """Name the blocks that one unit of each row, with that digest, completes (``publish`` over many rows)."""
        for groups in self._by_size:
            chosen, places = groups[0].completed(units)
            which, ends = (rows, digests) if chosen is None else (rows[chosen], [digests[i] for i in chosen.tolist()])
            keys = [digest + suffix for digest in ends for suffix in groups[0].suffixes]
            for group in groups:
                blocks = self.pool.groups[group.number]
                names, index = blocks.names, blocks.index
                held = self.tables[group.number][which[:, None], places].ravel().tolist()
                for key, block in zip(keys, held, strict=True):
                    if block and names[block] is None and index.setdefault(key, block) == block:
                        names[block] = key

    def withdraw(self, digests: Sequence[bytes]) -> None:
        """Forget all names that come from these digests, whichever blocks have them."""
        length = len(digests) * self.unit
        for group in self.groups:
            index = self.pool.groups[group.number].index
            recurrent = isinstance(group, RecurrentGroup)
            names = digests if recurrent else [group.name_of(digests, i) for i in range(group.named_upto(length))]
            for block in [index[name] for name in names if name in index]:
                self.pool.unname(group.number, block)

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
            first, end = int(self.firsts[number, row]), int(self.ends[number][row])
            # last blocks first: a chain is evicted from its end, so that what is left of it can still be found
            self.pool.drop_many(number, table[row, first:end][::-1].tolist())
            table[row, :end] = 0
        for ends in self.ends:
            ends[row] = 0
        self.firsts[:, row] = 0
        self.horizon[row] = 0
        self.hold_back(row)

    def hold_back(self, row: int) -> None:
        """Do not tell the runner of this row's blocks yet (see ``tell``)."""
        if self._parts:
            self._parts = [part[part[:, 0] != row] for part in self._parts]

    def tell(self, row: int) -> None:
        """Tell the runner of all the row's blocks with the next plan."""
        self.hold_back(row)
        for number, table in enumerate(self.tables):
            first, end = int(self.firsts[number, row]), int(self.ends[number][row])
            self._record(number, row, first, table[row, first:end].tolist())

    def filled_elsewhere(self, row: int, begin: int) -> list[tuple[int, int, int]]:
        """Return ``places`` of a row's tokens from ``begin`` on, which somebody begins to fill now, not a plan; the
        runner is not told of the row yet."""
        self.hold_back(row)
        found = self.places(row, begin)
        for group in self.groups:
            self.pool.overwritten(group.number, [block for number, _, block in found if number == group.number])
        return found

    def unfilled(self, row: int, begin: int) -> None:
        """What was to be filled from token ``begin`` on, where blocks of all groups begin, is not: it is void."""
        if self.pool.freed is not None:
            for group, _, block in self.places(row, begin):
                self.pool.freed[group].append(block)

    def held(self, row: int) -> list[Held]:
        """Return (group, block) of all that a row holds."""
        return [(group, block) for group, _, block in self.places(row)]

    def places(self, row: int, begin: int = 0) -> list[tuple[int, int, int]]:
        """Return (group, table index, block) of all that a row holds for tokens from ``begin`` on."""
        found = []
        for number, table in enumerate(self.tables):
            size = self.plan.groups[number].block_tokens if self.groups[number] in self.paged else 1
            first, end = max(int(self.firsts[number, row]), begin // size), int(self.ends[number][row])
            found += [(number, i, block) for i, block in enumerate(table[row, first:end].tolist(), first)]
        return found

    def take_changes(self) -> Changes:
        """Return and forget what changed since the last call.

        What is let go of here may still be read by the next plan: it can become void only for the one after it.
        """
        blocks = np.concatenate(self._parts) if self._parts else NO_BLOCKS
        freed = [(n, np.unique(np.array(void, np.int32))) for n, void in enumerate(self.pool.take_freed()) if void]
        changes = Changes(freed=tuple(freed), blocks=blocks, zeroed=tuple(self._zeroed), copies=tuple(self._copies))
        self._parts, self._zeroed, self._copies = [], [], []
        if self._lent:
            for number, block in self._lent:
                self.pool.drop(number, block)
            self._lent = []
        return changes

    def retire(self, limits: Sequence[int]) -> None:
        """Hand out no block from each group's limit on any more (``sizing.cut``); rows keep those that they hold."""
        self.pool.retire(limits)

    def retired(self) -> bool:
        """Return whether nobody holds a retired block: no later plan names one."""
        return self.pool.retired()

    @property
    def num_held(self) -> int:
        """Blocks held by rows, over all groups."""
        return sum(group.num_held for group in self.pool.groups)

    @property
    def num_blocks(self) -> int:
        """Blocks that could be held at once if all slabs went to the group of largest blocks; without retired ones."""
        if self.plan.shared:
            return max(0, self.pool.kept_slabs - 1) * min((g.blocks_per_slab for g in self.plan.groups), default=0)
        return sum(max(0, g.limit - 1) for g in self.pool.groups)

    @property
    def kept_bytes(self) -> int:
        """Device bytes of the blocks that are not retired."""
        return bytes_of(self.plan, [group.limit for group in self.pool.groups])

    @property
    def use(self) -> float:
        """The part of the cache's bytes that rows hold."""
        held = sum(g.num_held * p.stride for g, p in zip(self.pool.groups, self.plan.groups, strict=True))
        return held / self.kept_bytes if self.kept_bytes else 0.0

    def check_integrity(self, pinned: Sequence[Held] = ()) -> None:
        """AssertionError naming the first disagreement between tables, holders (``pinned`` ones too), slabs, index."""
        self.pool.check_integrity()
        check_tables(self, [*self._lent, *pinned])
