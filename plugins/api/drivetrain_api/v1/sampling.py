"""Sampling and the preparation of a step's inputs from rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .ops import OpSpec

if TYPE_CHECKING:
    import torch

STREAM_TARGET, STREAM_DRAFT, STREAM_ACCEPT, STREAM_RESIDUAL = 0, 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """One entry for each logits row, N of them. Host facts tell which work no row needs."""

    temperature: torch.Tensor  # [N] float32; 0 = greedy
    top_k: torch.Tensor  # [N] int32; 0 = off
    top_p: torch.Tensor  # [N] float32; 1 = off
    min_p: torch.Tensor  # [N] float32; 0 = off
    seed: torch.Tensor  # [N] int64, the request's 64-bit seed as a signed number
    position: torch.Tensor  # [N] int32, the position of the token drawn (its index in the sequence)
    sample: torch.Tensor  # [N] int32, sample index
    mask: torch.Tensor | None  # [N, ceil(vocabulary / 32)] int32, bit i of word w allows token 32 w + i; None = all
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawSpec(OpSpec):
    """``fn(logits [N, vocabulary], inputs: SamplingInputs, stream: int) -> tokens [N] int32``.

    Order: mask, temperature, top-k, top-p, min-p, then the draw. Greedy rows take the largest logit. Others the
    largest logit/T - log(-log1p(-u)) with u = (x + 1/2) 2^-32 and x from Philox4x32-10 (Salmon et al. 2011):
    key = seed (low word first), counter = (token // 4, position, sample, stream), word token mod 4.
    Ties go to the lowest token id. ``vocabulary_offset`` is the id of the first logit (sharded vocabularies).
    """

    op: ClassVar[str] = "sample.draw/1"
    vocabulary: int
    vocabulary_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsSpec(OpSpec):
    """``fn(logits [N, vocabulary], tokens [N], k) -> (logprob [N], rank [N], top_ids [N, k], top_logprobs [N, k])``.

    Natural log of the softmax of the raw logits in float32; rank 1 is the likeliest; ties: lowest id first.
    """

    op: ClassVar[str] = "sample.logprobs/1"
    vocabulary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareInputs:
    """Device inputs of ``input.prepare/1``, int32 and contiguous. B rows, T tokens; block tables are those of one cache
    group each, of the slot dtype."""

    rows: torch.Tensor  # [B] row of the table; the last row of the table is the padding row
    start: torch.Tensor  # [B] first position of this step, or -1: take the row's own count of computed tokens
    token_row: torch.Tensor  # [T] row b of each token
    token_offset: torch.Tensor  # [T] its offset inside the row's query
    host_ids: torch.Tensor  # [T] token ids of prefill rows; others are taken from the row's last tokens
    num_new: torch.Tensor  # [B] query tokens of each row; 0 = padded row
    computed: torch.Tensor  # [R] table: tokens computed; the op advances the step's rows to their new lengths
    last_tokens: torch.Tensor  # [R, k + 1] table: last token, then drafts
    block_tables: tuple[torch.Tensor, ...]  # each [R, W_g] table


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What ``input.prepare/1`` returns, on the device."""

    ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    base: torch.Tensor  # [B] first position of each row in this step
    lengths: torch.Tensor  # [B] base + num_new; 0 for padded rows
    tables: tuple[torch.Tensor, ...]  # each [B, width_g]
    slots: tuple[torch.Tensor, ...]  # each [T]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSpec(OpSpec):
    """``fn(inputs: PrepareInputs, widths: tuple[int, ...]) -> Prepared``. ``dtype`` is the slot dtype.

    ``block_tokens``: one for each group. A padded token's slot is 0.
    """

    op: ClassVar[str] = "input.prepare/1"
    block_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySpec(OpSpec):
    """``fn(draws [B, k + 1], drafts [B, k], num_drafts [B]) -> accepted [B] int32`` in 1 .. k + 1.

    A draft is accepted while it equals the target's own draw at its place; the first draw that differs (or the one
    after the last draft) is kept too.
    """

    op: ClassVar[str] = "sample.verify/1"
    max_drafts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSpec(OpSpec):
    """``fn(tokens [N], witness [N], rows [N], last_tokens [R, k + 1]) -> packed [2 N]``; int32, the witness float32.

    last_tokens[rows[n], 0] becomes tokens[n] (a row named twice: either); packed: the tokens, then the witnesses' bits.
    """

    op: ClassVar[str] = "sample.keep/1"


PROMPT_BIT = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjustInputs:
    """What changes the logits of N rows; tables have S slots, one for each request that asks for any of it. An id of -1
    is none. Host facts tell which work no row needs."""

    slots: torch.Tensor  # [N] int32 slot of each logits row
    position: torch.Tensor  # [N] int32, the position of the token drawn (its index in the sequence)
    repetition: torch.Tensor  # [S] float32; 1 = off
    presence: torch.Tensor  # [S] float32; 0 = off
    frequency: torch.Tensor  # [S] float32; 0 = off
    first_stop: torch.Tensor  # [S] int32, the first position at which tokens of ``held_ids`` may be drawn
    counts: torch.Tensor  # [S, vocabulary] int32: how often the row drew the token, + 2^30 where the prompt has it
    recent: torch.Tensor  # [S, W] int32: the token that the row drew at position p lies at p mod W; -1: none
    bias_ids: torch.Tensor  # [S, E] int32, no id twice in a slot
    bias_values: torch.Tensor  # [S, E] float32
    held_ids: torch.Tensor  # [S, H] int32
    bad_words: (
        torch.Tensor
    )  # [S, B, L] int32, L <= W + 1: the last id can't follow those before it; -1 there: any token
    any_penalty: bool
    any_bias: bool
    any_held: bool
    any_bad_words: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjustSpec(OpSpec):
    """``fn(logits [N, vocabulary], inputs: AdjustInputs) -> [N, vocabulary] float32``, a new tensor.

    With x = logits in float32 and s = slots[n], in this order: x[bias_ids[s]] += bias_values[s]. Where the prompt or
    the row's draws have the token: x / repetition[s] where x > 0, else x * repetition[s] (Keskar et al. 2019). Then
    x -= frequency[s] * draws of the token, x -= presence[s] where there is one. Last, -inf: tokens of held_ids[s]
    while position < first_stop[s], and the last id of each of bad_words[s] whose ids before it equal the last draws.
    """

    op: ClassVar[str] = "sample.adjust/1"
    vocabulary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CountSpec(OpSpec):
    """``fn(tokens [N], slots [N], position [N], counts [S, vocabulary], recent [S, W]) -> None``; all int32.

    counts[slots[n], tokens[n]] += 1 and recent[slots[n], position[n] mod W] = tokens[n]. Of slots that several rows
    name, nobody reads what comes out.
    """

    op: ClassVar[str] = "sample.count/1"
    vocabulary: int
