"""Rows: what the device knows of every running request, and the few facts the host keeps beside it.

Row r < max_num_seqs belongs to one request from its ``RowStart`` on; row max_num_seqs is the padding row,
whose block table is all zeros (the null block) and whose sampling is greedy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from drivetrain.runner.adjusting import AdjustTables
from drivetrain.runner.staging import Pack
from drivetrain_api.v1 import torch_dtype

if TYPE_CHECKING:
    from drivetrain.sched.plan import AdjustStart, RowStart, StepPlan
    from drivetrain_api.v1 import DeviceRuntime

NON_GREEDY, TOP_K, TOP_P, MIN_P, LOGPROBS, DRAFTS, POOLING, DELTA = (1 << i for i in range(8))
PENALTY, BIAS, HELD, BAD_WORDS = (1 << i for i in range(8, 12))
ADJUSTED = PENALTY | BIAS | HELD | BAD_WORDS
# What a start sets: computed, temperature, top_p, min_p (bits), top_k, sample, delta, seed low, seed high, last token.
START_FIELDS = 10
START = struct.Struct("=i3f3iQi")
FEW = 8  # starts and blocks of a plan
LINE = 128  # words: every part of the tables' words begins where an allocation of its own would
NO_STARTS = np.zeros(0, np.int32), np.zeros((START_FIELDS, 0), np.int32)
NO_COLUMNS = np.zeros((2, 0), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """Sizes of the tables. ``widths``: blocks a row for each group; ``slot_dtype``: of block tables, torch's
    name.

    ``chunk`` 0: deltas are applied in one piece of their exact size; else in pieces of exactly this many
    entries, filled up with writes to the padding row, so that a backend of fixed shapes sees one shape.
    ``adjusted``: slots of rows whose logits are changed, of ``vocabulary`` tokens each.
    """

    num_rows: int
    max_drafts: int
    widths: tuple[int, ...]
    slot_dtype: str
    chunk: int = 0
    adjusted: int = 0
    vocabulary: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Where the row state lies in one int32 tensor, so that a row starts by one scatter. ``places`` [START_FIELDS] and
    ``strides``: word of row 0's field and from a row to the next; ``seeds``, ``last``: first words; ``size``: in all.
    """

    rows: int
    places: np.ndarray
    strides: np.ndarray
    seeds: int
    last: int
    size: int

    @staticmethod
    def of(shape: TableShape) -> Words:
        """Lay the fields out: counts, three reals, three integers, seeds as pairs of words, last tokens and drafts."""
        rows, width = shape.num_rows + 1, shape.max_drafts + 1
        seeds = aligned(7 * rows)
        last = seeds + aligned(2 * rows)
        fields = [field * rows for field in range(7)]
        return Words(
            rows=rows,
            places=np.array([*fields, seeds, seeds + 1, last], np.int32),
            strides=np.array([1] * 7 + [2, 2, width], np.int32),
            seeds=seeds,
            last=last,
            size=last + aligned(rows * width),
        )

    def of_starts(self, rows: np.ndarray) -> np.ndarray:
        """Return the words [START_FIELDS, n] that rows [n] set."""
        places: np.ndarray = self.places[:, None] + self.strides[:, None] * rows
        return places


def aligned(words: int) -> int:
    """Return the next multiple of ``LINE``."""
    return -(-words // LINE) * LINE


class RowTables:
    """The device tables, [num_rows + 1, ...] each, and their host shadows (flags and generations only)."""

    def __init__(self, runtime: DeviceRuntime, shape: TableShape) -> None:
        rows = shape.num_rows + 1
        self.shape = shape
        self.padding_row = shape.num_rows
        self._runtime = runtime
        self._slot_dtype = torch_dtype(shape.slot_dtype)
        self._place = place = Words.of(shape)
        neutral = np.zeros(place.size, np.int32)
        neutral[2 * rows : 3 * rows] = np.float32(1.0).view(np.int32)
        sizes = [rows * width for width in shape.widths]
        self._offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        self._bases = [place.size + offset for offset in self._offsets[:-1].tolist()]  # words before each table
        self._pairs = list(zip(place.places.tolist(), place.strides.tolist(), strict=True))
        self._memory = self._one_memory(place.size + int(self._offsets[-1]))
        if self._memory is None:
            words, flat = runtime.from_host(neutral), runtime.zeros((int(self._offsets[-1]),), self._slot_dtype)
        else:
            words, flat = self._memory[: place.size], self._memory[place.size :]
            words.copy_(runtime.from_host(neutral))
        self._words, self._flat = words, flat
        self.computed = words[:rows]
        self.floats = words[rows : 4 * rows].view(3, rows).view(torch.float32)  # temperature, top_p, min_p
        self.ints = words[4 * rows : 7 * rows].view(3, rows)  # top_k, sample index, position delta
        self.seeds = words[place.seeds : place.seeds + 2 * rows].view(torch.int64)
        self.last_tokens = words[place.last : place.last + rows * (shape.max_drafts + 1)].view(rows, -1)
        self.tables = tuple(
            self._flat[int(a) : int(a) + size].view(rows, width)
            for a, size, width in zip(self._offsets[:-1], sizes, shape.widths, strict=True)
        )
        self._constants = self._steady_constants(rows)
        self._count = runtime.from_host(np.arange(rows + 1).astype(shape.slot_dtype))
        self._steady: dict[int, dict[str, torch.Tensor]] = {}
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.flags = np.zeros(rows, np.uint16)  # set by ``mark`` alone
        self._plain: bool | None = None  # what ``plain`` found, None when it has to look again
        self.logprobs = np.full(rows, -1, np.int32)
        self.adjusting = AdjustTables(runtime, rows, shape) if shape.adjusted else None
        self.generation = np.zeros(rows, np.int64)
        self.pooling: dict[int, str] = {}

    def _one_memory(self, words: int) -> torch.Tensor | None:
        """Make one tensor for row state and block tables, so that all of a plan's changes are one scatter. None where
        they differ in type, or changes come in pieces."""
        if self.shape.chunk or self._slot_dtype != torch.int32:
            return None
        return self._runtime.zeros((words,), torch.int32)

    def steady_inputs(self, rows: int) -> dict[str, torch.Tensor]:
        """Return, as views of constants, what a step of ``rows`` one-token decode rows feeds beside the rows."""
        found = self._steady.get(rows)
        if found is None:
            own = rows <= self.padding_row + 1  # a bucket of fixed shapes may be larger than the tables
            minus, ones, count, zeros = self._constants if own else self._steady_constants(rows)
            found = self._steady[rows] = {
                "start": minus[:rows],
                "num_new": ones[:rows],
                "query_start": count[: rows + 1],
                "token_row": count[:rows],
                "token_offset": zeros[:rows],
                "host_ids": zeros[:rows],
            }
        return found

    def _steady_constants(self, rows: int) -> tuple[torch.Tensor, ...]:
        values = (np.full(rows, -1), np.ones(rows), np.arange(rows + 1), np.zeros(rows))
        return tuple(self._runtime.from_host(v.astype(np.int32)) for v in values)

    def steady_places(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return such a step's query starts [rows + 1] and the row of each token [rows], of the slot dtype."""
        found = self._places.get(rows)
        if found is None:
            found = self._places[rows] = self._count[: rows + 1], self._count[:rows]
        return found

    @property
    def nbytes(self) -> int:
        """Device bytes of all tables."""
        own = sum(t.numel() * t.element_size() for t in (self._words, self._flat, self._count, *self._constants))
        return own + (self.adjusting.nbytes if self.adjusting is not None else 0)

    def reset_padding(self) -> None:
        """Set the padding row's count back to 0: dummy decode steps advance it."""
        self.computed[self.padding_row :].zero_()

    def plain(self) -> bool:
        """Return whether no row at all has a flag: the common case of greedy requests without extras."""
        if self._plain is None:
            self._plain = not self.flags.any()
        return self._plain

    def mark(self, row: int, flags: int) -> None:
        """Set a row's flags."""
        self.flags[row], self._plain = flags, None

    def row_flags(self, rows: np.ndarray) -> np.ndarray:
        """Return each row's flags: which work it needs."""
        flags: np.ndarray = self.flags[rows]
        return flags

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the slot of each row [n] int32, the spare one where it has none."""
        assert self.adjusting is not None, "some row has a slot"
        slots: np.ndarray = self.adjusting.slot_of[rows]
        return slots

    # -- deltas ----------------------------------------------------------------------------------------------

    def note(self, plan: StepPlan) -> None:
        """Apply the plan's ends and starts to the host's facts."""
        for row in plan.ends:
            self._forget(row)
        for start in plan.starts:
            self._forget(start.row)
            self.mark(start.row, flags_of(start))
            if start.adjust is not None and self.adjusting is not None:
                self.adjusting.note(start.row, start.adjust.slot)
            self.logprobs[start.row] = start.logprobs
            if start.pooling is not None:
                self.pooling[start.row] = start.pooling

    def _forget(self, row: int) -> None:
        self.generation[row] += 1
        self.mark(row, 0)
        self.logprobs[row] = -1
        self.pooling.pop(row, None)
        if self.adjusting is not None:
            self.adjusting.forget(row)

    def pack(self, plan: StepPlan, groups: Sequence[int], pack: Pack) -> int:
        """Add the plan's starts and block changes to the upload. ``groups``: the plan's group of each table.

        Returns how many pieces ``apply`` has to expect, starts and blocks together.
        """
        if self.adjusting is not None:
            self.adjusting.pack(plan, pack)
        if self._memory is not None:
            return self._pack_whole(plan, groups, pack)
        count = 0
        if plan.starts:
            rows, values = self._start_columns(plan.starts)
            for piece in self._pieces(np.concatenate((rows[None], values)), self._neutral_start()):
                pack.add(f"starts{count}", np.stack((self._place.of_starts(piece[0]), piece[1:])).reshape(2, -1))
                count += 1
        if len(plan.blocks):
            columns = self._block_columns(plan.blocks, groups).astype(np.int32)
            for number, piece in enumerate(self._pieces(columns, self._null_write())):
                pack.add(f"blocks{number}", piece)
                count += 1
        return count

    def _pack_whole(self, plan: StepPlan, groups: Sequence[int], pack: Pack) -> int:
        """``pack`` where all is one memory: places of starts, then of blocks, [n] int64 as pairs of words, which a
        scatter takes without converting, and their values [n]."""
        if len(plan.starts) + len(plan.blocks) <= FEW:
            return self._pack_few(plan, groups, pack)
        rows, values = self._start_columns(plan.starts) if plan.starts else NO_STARTS
        columns = self._block_columns(plan.blocks, groups) if len(plan.blocks) else NO_COLUMNS
        starts = START_FIELDS * len(rows)
        count = starts + columns.shape[1]
        if not count:
            return 0
        whole = np.empty(3 * count, np.int32)
        places, new = whole[: 2 * count].view(np.int64), whole[2 * count :]
        if starts:
            places[:starts], new[:starts] = self._place.of_starts(rows).ravel(), values.ravel()
        if count > starts:
            np.add(columns[0], self._place.size, out=places[starts:])
            new[starts:] = columns[1]
        pack.add("changes", whole)
        return 1

    def _pack_few(self, plan: StepPlan, groups: Sequence[int], pack: Pack) -> int:
        """The same where little changes: one by one, which then takes less than arrays do."""
        places: list[int] = []
        values = []
        for start in {start.row: start for start in plan.starts}.values():
            places += [place + stride * start.row for place, stride in self._pairs]
            values.append(start_words(start))
        blocks: dict[int, int] = {}  # by place: the last write wins
        for row, group, index, block in plan.blocks.tolist() if len(plan.blocks) else ():
            for one, base, width in zip(groups, self._bases, self.shape.widths, strict=True):
                if one == group:
                    blocks[base + row * width + index] = block
        if not places and not blocks:
            return 0
        words = struct.pack(f"={len(places) + len(blocks)}q", *places, *blocks)
        words += b"".join(values) + struct.pack(f"={len(blocks)}i", *blocks.values())
        pack.add("changes", np.frombuffer(words, np.int32))
        return 1

    def apply(self, views: dict[str, torch.Tensor]) -> None:
        """Queue what ``pack`` added."""
        if self.adjusting is not None:
            self.adjusting.apply(views)
        if self._memory is not None:
            changes = views.get("changes")
            if changes is not None:
                count = len(changes) // 3
                self._memory.scatter_(0, changes[: 2 * count].view(torch.int64), changes[2 * count :])
            return
        i = 0
        while (columns := views.get(f"starts{i}")) is not None:
            self._words[columns[0]] = columns[1]
            i += 1
        i = 0
        while (columns := views.get(f"blocks{i}")) is not None:
            self._flat[columns[0]] = columns[1].to(self._slot_dtype)
            i += 1

    def _pieces(self, columns: np.ndarray, neutral: np.ndarray) -> list[np.ndarray]:
        """Cut [fields, n] into pieces of the chunk's size, the last one filled up with ``neutral`` [fields,
        1]."""
        count, chunk = columns.shape[1], self.shape.chunk
        if count == 0:
            return []
        if chunk == 0:
            return [columns]
        missing = -count % chunk
        if missing:
            columns = np.concatenate((columns, np.repeat(neutral, missing, axis=1)), axis=1)
        return [np.ascontiguousarray(columns[:, a : a + chunk]) for a in range(0, count, chunk)]

    def _null_write(self) -> np.ndarray:
        """The write of the null block to the padding row, [2, 1]: place, block."""
        width = self.shape.widths[0] if self.shape.widths else 0
        return np.array([[self.padding_row * width], [0]], np.int32)

    def _neutral_start(self) -> np.ndarray:
        column = np.zeros((1 + START_FIELDS, 1), np.int32)
        column[0], column[3] = self.padding_row, np.float32(1.0).view(np.int32)
        return column

    def _start_columns(self, starts: Sequence[RowStart]) -> tuple[np.ndarray, np.ndarray]:
        """Return rows [n] and the values of their fields [START_FIELDS, n]. Of one row's starts the last counts."""
        chosen = list({start.row: start for start in starts}.values()) if len(starts) > 1 else starts
        columns = np.frombuffer(b"".join(map(start_words, chosen)), np.int32).reshape(-1, START_FIELDS).T
        return np.array([s.row for s in chosen], np.int32), columns

    def _block_columns(self, blocks: np.ndarray, groups: Sequence[int]) -> np.ndarray:
        """Turn (row, group, index, block) into [2, n] int64: place in the flat table, block id. The last write wins."""
        parts = []
        for table, (group, width) in enumerate(zip(groups, self.shape.widths, strict=True)):
            which = blocks[:, 1] == group
            mine = blocks if which.all() else blocks[which]
            part = np.empty((2, len(mine)), np.int64)
            np.multiply(mine[:, 0], width, out=part[0], dtype=np.int64)
            part[0] += mine[:, 2]
            if table:
                part[0] += self._offsets[table]
            part[1] = mine[:, 3]
            parts.append(part)
        columns = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        if not (columns[0, 1:] > columns[0, :-1]).all():  # else nothing is written twice
            _, first_from_the_end = np.unique(columns[0, ::-1], return_index=True)
            if len(first_from_the_end) < columns.shape[1]:
                columns = columns[:, columns.shape[1] - 1 - first_from_the_end]
        return columns


def start_words(start: RowStart) -> bytes:
    """Return the ``START_FIELDS`` words that a start sets, in order."""
    return START.pack(
        start.computed,
        *(start.temperature, start.top_p, start.min_p),
        *(start.top_k, start.sample_index, start.position_delta),
        start.seed & 0xFFFFFFFFFFFFFFFF,
        max(start.last_token, 0),
    )


def flags_of(start: RowStart) -> int:
    """Return the facts that steps with this row must know."""
    return (
        (NON_GREEDY if start.temperature > 0 else 0)
        | (TOP_K if start.top_k > 0 else 0)
        | (TOP_P if start.top_p < 1 else 0)
        | (MIN_P if start.min_p > 0 else 0)
        | (LOGPROBS if start.logprobs >= 0 else 0)
        | (DRAFTS if start.max_drafts > 0 else 0)
        | (POOLING if start.pooling is not None else 0)
        | (DELTA if start.position_delta else 0)
        | (0 if start.adjust is None else adjust_flags(start.adjust))
    )


def adjust_flags(start: AdjustStart) -> int:
    """Return which changes of its logits a row asks for."""
    penalties = (start.repetition, start.presence, start.frequency) != (1.0, 0.0, 0.0)
    found = (PENALTY if penalties else 0) | (BIAS if start.bias else 0)
    return found | (HELD if start.held else 0) | (BAD_WORDS if start.bad_words else 0)
