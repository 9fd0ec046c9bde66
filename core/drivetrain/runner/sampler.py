"""Sampling: from hidden states of chosen query tokens to tokens, the rows' new state, and one copy to the
host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from drivetrain.params import MAX_LOGPROBS
from drivetrain.runner.batch import every_row
from drivetrain.runner.drafter import DraftContext, Drafter
from drivetrain.runner.drawing import Drawer
from drivetrain.runner.rows import (
    ADJUSTED,
    BAD_WORDS,
    BIAS,
    DRAFTS,
    HELD,
    LOGPROBS,
    MIN_P,
    NON_GREEDY,
    PENALTY,
    TOP_K,
    TOP_P,
    RowTables,
)
from drivetrain.runner.staging import Pack
from drivetrain_api.v1 import AdjustInputs, CountSpec, KeepSpec, SamplingInputs, VerifySpec

if TYPE_CHECKING:
    from drivetrain.ops import Ops
    from drivetrain.runner.batch import SampleArrays
    from drivetrain.sched.plan import LateInput
    from drivetrain_api.v1 import HostCopy, Prepared


@dataclass(slots=True)
class SampleSet:
    """Rows of one plan that sample together, host arrays and device views. ``hidden`` is set by the forward
    pass."""

    arrays: SampleArrays
    facts: int
    generation: np.ndarray | None  # [n] of late rows: the tables' generation when the plan was submitted
    wants_logprobs: np.ndarray | None  # [n] -1 or how many alternatives; None where no row asked
    views: dict[str, torch.Tensor]
    hidden: torch.Tensor | None = None  # [N', hidden]
    positions: torch.Tensor | None = None  # [N'] index of each drawn token, of the slot dtype like lengths
    lengths: torch.Tensor | None = None  # [n']
    copy: HostCopy | None = None
    copied: tuple[str, ...] = ()
    given_up: np.ndarray | None = None  # [n] rows whose request ended before their late input came

    @classmethod
    def of_whole(cls, num_rows: int, rows: np.ndarray) -> SampleSet:
        """A set of all rows of a step, greedy and without extras. ``rows`` [B]: padded."""
        arrays = every_row(np.arange(len(rows), dtype=np.int32), num_rows, rows)
        return cls(arrays=arrays, facts=0, generation=None, wants_logprobs=None, views={})

    @property
    def verify(self) -> bool:
        """Whether some row of the set has drafts to verify."""
        return self.arrays.spread is not None

    def pack(self, prefix: str, pack: Pack, tables: RowTables) -> None:
        """Add the set's index arrays to the step's upload."""
        a = self.arrays
        if self.facts & ADJUSTED:
            pack.add(prefix + "slots", tables.slots_of(a.logit_rows))
        if a.whole:
            return
        for name, array in (
            ("rows", a.rows),
            ("batch_rows", a.batch_rows),
            ("tokens", a.tokens),
            ("logit_rows", a.logit_rows),
            ("spread", a.spread),
            ("num_drafts", a.num_drafts),
        ):
            if array is not None:
                pack.add(prefix + name, array)

    def adopt(self, prefix: str, views: dict[str, torch.Tensor]) -> None:
        """Take the set's own views from the step's upload."""
        if self.arrays.whole:
            self.see(views["rows"], views.get(prefix + "slots"))
            return
        self.views = {name[len(prefix) :]: view for name, view in views.items() if name.startswith(prefix)}

    def see(self, rows: torch.Tensor, slots: torch.Tensor | None) -> None:
        """Let a set of all rows of a step have these views."""
        self.views = {"rows": rows, "logit_rows": rows} | ({} if slots is None else {"slots": slots})

    def take(self, prepared: Prepared, hidden: torch.Tensor) -> None:
        """Take the hidden states of the set's tokens, [N', hidden], and what was prepared for their rows."""
        self.hidden = hidden
        self.positions = prepared.positions.index_select(0, self.views["tokens"]) + 1
        self.lengths = prepared.lengths.index_select(0, self.views["batch_rows"])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUpdate:
    """What sampling changed in the tables; a pipeline's last stage sends it to the first."""

    rows: torch.Tensor  # [n'] table rows, the padding row for padded entries
    computed: torch.Tensor  # [n'] integers
    last_tokens: torch.Tensor  # [n', k + 1] int32


class Sampler:
    """Bound sampling ops over the row tables."""

    def __init__(self, ops: Ops, tables: RowTables, drawer: Drawer, drafter: Drafter | None) -> None:
        self._tables = tables
        self._drafter = drafter
        self._fixed, self._vocabulary = drawer.fixed, drawer.vocabulary
        self._greedy: dict[int, SamplingInputs] = {}  # views of the padding row by number of rows
        self._drawer = drawer
        k = tables.shape.max_drafts
        self._keep: Any = ops.bind(KeepSpec(dtype="int32"))
        self._verify: Any = ops.bind(VerifySpec(dtype="int32", max_drafts=k)) if k else None
        counting = CountSpec(dtype="int32", vocabulary=drawer.vocabulary)
        self._count: Any = ops.bind(counting) if tables.adjusting is not None else None

    def skips_logits(self, rows: int) -> bool:
        """Return whether so many greedy rows are drawn without their logits."""
        return self._drawer.skips_logits(rows)

    def run(self, part: SampleSet, mask: torch.Tensor | None) -> tuple[RowUpdate, list[torch.Tensor]]:
        """Queue the sampling of one set: draw, verify, update the tables, draft. Never waits.

        Returns the update and the device tensors that the host needs, named by ``part.copied``.
        """
        assert part.hidden is not None and part.positions is not None and part.lengths is not None
        adjust = self._adjust(part)
        drawn = self._drawer.run(part.hidden, self._inputs(part, mask), self._alternatives(part), adjust)
        draws, finite, outputs = drawn.tokens, drawn.witness, drawn.logprobs
        if adjust is not None:
            self._count(draws, adjust.slots, adjust.position, adjust.counts, adjust.recent)
        part.hidden = None
        if part.verify:
            update, packed = self._verified(part, draws, finite)
        else:
            update, packed = self._plain(part, draws, finite)
        part.copied = ("packed", *outputs)
        return update, [packed, *outputs.values()]

    def _adjust(self, part: SampleSet) -> AdjustInputs | None:
        """What changes the logits of the set; a row with a slot has one logits row, so that its draw is its token."""
        slots, tables = part.views.get("slots"), self._tables.adjusting
        if slots is None or tables is None:
            return None
        assert part.positions is not None
        penalty, bias, held, bad_words = (bool(part.facts & one) for one in (PENALTY, BIAS, HELD, BAD_WORDS))
        return tables.inputs(slots, part.positions.to(torch.int32), (penalty, bias, held, bad_words))

    def _inputs(self, part: SampleSet, mask: torch.Tensor | None) -> SamplingInputs:
        rows = part.views["logit_rows"]
        if not part.facts & NON_GREEDY:
            return self._greedy_inputs(part, mask)
        temperature, top_p, min_p = self._tables.floats.index_select(1, rows).unbind(0)
        top_k, sample, _ = self._tables.ints.index_select(1, rows).unbind(0)
        assert part.positions is not None
        return SamplingInputs(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=self._tables.seeds.index_select(0, rows),
            position=part.positions.to(torch.int32),
            sample=sample,
            mask=mask,
            all_greedy=False,
            any_top_k=bool(part.facts & TOP_K),
            any_top_p=bool(part.facts & TOP_P),
            any_min_p=bool(part.facts & MIN_P),
        )

    def _greedy_inputs(self, part: SampleSet, mask: torch.Tensor | None) -> SamplingInputs:
        """Inputs when no row draws at random: those of the padding row, which is greedy, seen N times."""
        assert part.positions is not None
        count, row = part.positions.shape[0], self._tables.padding_row
        known = self._greedy.get(count)
        if known is None:
            temperature, top_p, min_p = self._tables.floats[:, row : row + 1].expand(3, count).unbind(0)
            top_k, sample, _ = self._tables.ints[:, row : row + 1].expand(3, count).unbind(0)
            seed = self._tables.seeds[row : row + 1].expand(count)
            position = self._tables.computed[row : row + 1].expand(count)
            known = self._greedy[count] = SamplingInputs(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
                position=position,
                sample=sample,
                mask=None,
                all_greedy=True,
                any_top_k=False,
                any_top_p=False,
                any_min_p=False,
            )
        return known if mask is None else replace(known, mask=mask)

    def _alternatives(self, part: SampleSet) -> int | None:
        """How many alternatives log-probabilities are reported with; None for no report."""
        if not part.facts & LOGPROBS:
            return None
        k = MAX_LOGPROBS if self._fixed else int(part.wants_logprobs.max()) if part.wants_logprobs is not None else 0
        return min(k, self._vocabulary)

    def _plain(self, part: SampleSet, tokens: torch.Tensor, finite: torch.Tensor) -> tuple[RowUpdate, torch.Tensor]:
        assert part.positions is not None and part.lengths is not None
        rows, table = part.views["rows"], self._tables.last_tokens
        packed = self._keep(tokens, finite, rows, table)
        last = self._followed(part, tokens, part.positions)
        if last.shape[1] > 1:
            table[rows] = last
        return RowUpdate(rows=rows, computed=part.lengths, last_tokens=last), packed

    def _verified(self, part: SampleSet, draws: torch.Tensor, finite: torch.Tensor) -> tuple[RowUpdate, torch.Tensor]:
        tables, rows, num_drafts = self._tables, part.views["rows"], part.views["num_drafts"]
        assert part.lengths is not None
        places = draws[part.views["spread"]]  # [n', k + 1]
        accepted = self._verify(places, tables.last_tokens[rows, 1:], num_drafts).to(torch.int32)
        computed = part.lengths.to(torch.int32) - num_drafts - 1 + accepted
        token = places.gather(1, (accepted - 1).to(torch.int64).unsqueeze(1)).squeeze(1)
        last = self._followed(part, token, computed)
        tables.computed[rows] = computed
        tables.last_tokens[rows] = last
        packed = torch.cat((places.flatten(), accepted, finite.view(torch.int32)))
        return RowUpdate(rows=rows, computed=computed, last_tokens=last), packed

    def _followed(self, part: SampleSet, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return [n', k + 1]: the last token and the drafts after it (zeros where no row of the set
        drafts)."""
        tables, rows = self._tables, part.views["rows"]
        k = tables.shape.max_drafts
        if k == 0:
            return token.unsqueeze(1)
        if self._drafter is None or not part.facts & DRAFTS:
            return torch.nn.functional.pad(token.unsqueeze(1), (0, k))
        context = DraftContext(
            rows=rows,
            last_token=token,
            position=position.to(torch.int32),
            seed=tables.seeds.index_select(0, rows),
            sample=tables.ints[1].index_select(0, rows),
        )
        drafts = self._drafter.propose(context).to(torch.int32)
        return torch.cat((token.unsqueeze(1), drafts), dim=1)


def late_mask(part: SampleSet, late: LateInput, vocabulary: int) -> np.ndarray:
    """Return one mask row for each logits row of a set, [N', words] int32; rows without input allow
    everything.

    ValueError when the input's shape does not fit the vocabulary or the rows' query tokens.
    """
    a = part.arrays
    words = -(-vocabulary // 32)
    mask = np.full((len(a.tokens), words), -1, np.int32)
    per_row = np.ones(a.count, np.int32) if a.num_drafts is None else a.num_drafts[: a.count] + 1
    owner = np.repeat(a.index, per_row)
    place = np.flatnonzero(np.isin(owner, late.indices))
    if late.mask.shape != (len(place), words):
        raise ValueError(f"late input has masks {late.mask.shape}; {len(place)} rows of {words} words are needed")
    mask[place] = late.mask
    return mask


def late_pack(part: SampleSet, late: LateInput, given_up: np.ndarray, tables: RowTables, vocabulary: int) -> Pack:
    """Return the upload of a late set: its masks, and its rows anew, since some may have ended (``given_up`` [n])."""
    pack, rows = Pack(), part.arrays.rows.copy()
    rows[: len(given_up)][given_up] = tables.padding_row
    pack.add("rows", rows)
    pack.add("mask", late_mask(part, late, vocabulary))
    if part.facts & ADJUSTED:
        lost = np.isin(part.arrays.logit_rows, part.arrays.rows[: len(given_up)][given_up])
        pack.add("slots", tables.slots_of(np.where(lost, tables.padding_row, part.arrays.logit_rows)))
    return pack
