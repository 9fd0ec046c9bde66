"""One step as a value: the plan that the scheduler makes, and the result that the runner returns.

Both are frozen, small and serializable; arrays are numpy. A plan is a delta: it names what changed since the plan
before it. Results are keyed by (row, epoch) through the plan's own arrays: an epoch ends at preemption or abort.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

EMPTY = np.zeros(0, np.int32)
NO_BLOCKS = np.zeros((0, 4), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdjustStart:
    """What a request's slot holds when its row starts: see ``AdjustInputs`` of the contract.

    ``tokens`` int32 [known]: prompt and what was generated before; ``prompt``: how many are the prompt's;
    ``prompt_end``: position of the first generated token; ``first_stop``: the first at which ``held`` may be drawn.
    """

    slot: int
    tokens: np.ndarray
    prompt: int
    prompt_end: int
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    held: tuple[int, ...] = ()
    first_stop: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def first_position(self) -> int:
        """Position of the first token that the row will draw."""
        return self.prompt_end + len(self.tokens) - self.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStart:
    """A request takes a row. ``computed``: tokens already valid in the cache when it starts.

    ``logprobs`` -1: none. ``late``: its sampling waits for late input. ``position_delta``: what is added to a
    generated token's index to get its position (only with positions of three rows). ``max_drafts``: draft tokens a
    step at most, 0 without speculation. ``last_token``: what the row's first step feeds where that is a decode row,
    with all tokens before it computed; -1 where it is a prompt's chunk.
    """

    row: int
    request_id: int
    epoch: int
    computed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    sample_index: int
    logprobs: int = -1
    late: bool = False
    pooling: str | None = None
    position_delta: int = 0
    max_drafts: int = 0
    last_token: int = -1
    adjust: AdjustStart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy one block of a group before the step runs (a checkpointed state to a working block)."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateExport:
    """Store the recurrent state of batch row ``index`` after ``offset`` tokens of this step in ``block``."""

    group: int
    index: int
    offset: int
    block: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbedRun:
    """Embeddings in place of ids for query tokens ``offset`` .. of the step: float32 [n, hidden]."""

    offset: int
    values: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PositionRun:
    """Positions of three rows for query tokens ``offset`` .. of the step: int32 [3, n]."""

    offset: int
    values: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """B batch rows in order: one-token decode, verification, prefill. T = sum(num_new) query tokens.

    ``start``: first position of a prefill row's chunk, exact; -1 for decode and verify rows, whose exact place is
    known to the device. ``bounds``: upper bound of each row's length after the step. ``sample``: rows that draw a
    token (all decode and verify rows, prefill rows whose chunk ends the prompt).
    ``blocks`` [n, 4]: (row, group, index in the block table, block id), applied before the step; id 0 = dropped.
    ``freed``: (group, block ids [n] int32) of blocks that became void since the plan before, to be announced before
    all else of this plan, which may use them anew; never the null block, and empty where no cache wants to know.
    ``late_rows``: batch indices whose sampling waits for ``LateInput``.
    """

    plan_id: int
    rows: np.ndarray  # [B] int32
    epochs: np.ndarray  # [B] int32
    num_new: np.ndarray  # [B] int32
    start: np.ndarray  # [B] int32
    bounds: np.ndarray  # [B] int32
    sample: np.ndarray  # [B] bool
    num_decode: int
    num_verify: int = 0
    prompt_ids: np.ndarray = field(default_factory=lambda: EMPTY)  # [sum of prefill rows' num_new] int32
    starts: tuple[RowStart, ...] = ()
    ends: tuple[int, ...] = ()
    blocks: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    freed: tuple[tuple[int, np.ndarray], ...] = ()
    zeroed: tuple[tuple[int, int], ...] = ()  # (group, block) to be filled with zeros first
    copies: tuple[BlockCopy, ...] = ()
    exports: tuple[StateExport, ...] = ()
    late_rows: tuple[int, ...] = ()
    embeds: tuple[EmbedRun, ...] = ()
    positions: tuple[PositionRun, ...] = ()
    connector: bytes | None = None
    dummy: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return int(self.num_new.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LateInput:
    """What sampling of a plan's late rows waited for. ``indices``: batch indices, in the plan's order.

    ``mask`` int32 [len(indices), ceil(vocabulary / 32)]: bit i of word w allows token 32 w + i.
    With verification rows there is one mask row for each of a row's query tokens, in order.
    """

    indices: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogprobRows:
    """Log-probabilities of sampled tokens, M of them, K alternatives (the largest asked for)."""

    index: np.ndarray  # [M] int32 batch row
    place: np.ndarray  # [M] int32 which of the row's tokens in this step
    logprob: np.ndarray  # [M] float32
    rank: np.ndarray  # [M] int32
    top_ids: np.ndarray  # [M, K] int32
    top_logprobs: np.ndarray  # [M, K] float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What a step produced, in the plan's row order. Row b drew tokens[b, :counts[b]] (0: it did not sample)."""

    plan_id: int
    tokens: np.ndarray  # [B, m] int32
    counts: np.ndarray  # [B] int32
    non_finite: np.ndarray = field(default_factory=lambda: EMPTY)  # batch rows whose logits were not finite
    logprobs: LogprobRows | None = None
    pooled: tuple[tuple[int, np.ndarray], ...] = ()  # (batch row, float32 [hidden])
    transfers_done: tuple[int, ...] = ()  # request ids
    invalid_blocks: tuple[tuple[int, int], ...] = ()  # (group, block)
    failure: str = ""
    failure_class: str = ""
