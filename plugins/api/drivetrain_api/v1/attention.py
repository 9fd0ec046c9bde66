"""Paged attention: write to the cache, then attend to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from .ops import GraphSupport, LengthsNeeded, OpSpec, RowOrder
from .storage import CacheHandle, CacheLayout

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(OpSpec):
    """One kind of attention layer. The implementation is a ``PagedAttention``.

    out[t, h] = sum_s softmax_s(cap(scale * q[t, h] . k[s, h'])) v[s, h'],  h' = h // (num_heads / num_kv_heads),
    over cached positions s <= position of t (``causal``), and s > position - window where there is a window.
    cap(x) = soft_cap * tanh(x / soft_cap). ``sinks``: a learned logit a head joins the softmax's denominator only.
    An empty row gives zeros. ``selected_keys``, ``latent`` and ``cross`` are provisional.
    """

    op: ClassVar[str] = "attention.paged/1"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    layout: CacheLayout
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    causal: bool = True
    selected_keys: bool = False
    latent: bool = False
    cross: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTraits:
    """What a provider needs and allows. ``lengths`` = ``host_exact`` costs one wait a step on an asynchronous
    device."""

    lengths: LengthsNeeded = "device"
    row_order: RowOrder = "any"
    graph: GraphSupport = "never"
    workspace_bytes: int = 0
    common_prefix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """One step's rows for one cache group. T query tokens, B rows, row b's are query_start[b] .. query_start[b+1].

    ``*_dev`` tensors use the layout's slot dtype. A row's length counts its query tokens; a padded row has length 0.
    Host values are upper bounds; they are exact for prefill rows, and for all where ``host_lengths_exact``.
    Rows are ordered: one-token decode, then verification (k + 1 tokens), then prefill.
    """

    query_start_dev: torch.Tensor  # [B + 1]
    lengths_dev: torch.Tensor  # [B]
    block_table_dev: torch.Tensor  # [B, W]; block w holds positions w * block_tokens ..
    slots_dev: torch.Tensor  # [T] where each query token's own k and v are written
    token_row_dev: torch.Tensor  # [T] the row b of each query token
    positions_dev: torch.Tensor  # [T] the position of each query token in its request
    query_start_host: np.ndarray  # [B + 1] int32, always exact
    length_bounds_host: np.ndarray  # [B] int32
    host_lengths_exact: bool
    num_decode_rows: int
    num_verify_rows: int
    num_prefill_rows: int
    max_query_len: int
    max_length_bound: int
    common_prefix_blocks: int = 0
    adapter_ids_dev: torch.Tensor | None = None
    local_lengths_dev: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows, padded ones included."""
        return len(self.query_start_host) - 1

    @property
    def num_tokens(self) -> int:
        """Query tokens, padded ones included."""
        return int(self.query_start_host[-1])


class PagedAttention(Protocol):
    """Attention of one spec. ``plan`` runs once a step and group; its result serves every layer of the group."""

    @property
    def traits(self) -> AttentionTraits:
        """What it needs and allows."""

    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare a step. May allocate; waits at most once, and only where traits say ``host_exact``."""

    def write(self, cache: CacheHandle, k: torch.Tensor, v: torch.Tensor, plan: Any) -> None:
        """Store k [T, num_kv_heads, head_dim] and v [T, num_kv_heads, v_head_dim] at the plan's slots."""

    def forward(
        self, q: torch.Tensor, cache: CacheHandle, plan: Any, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend with q [T, num_heads, head_dim]; returns [T, num_heads, v_head_dim] of q's dtype."""


class GraphAttention(Protocol):
    """Optional, beside ``PagedAttention``: plans inside captured graphs. ``AttentionTraits.graph`` says of which steps:
    of one token a row, or any (rows and query tokens as captured, their division among rows as the device says)."""

    def plan_for_capture(self, batch: AttentionBatch) -> Any:
        """Make a plan while a graph is recorded: device work that is queued here is recorded and replayed too. All
        tensors of the batch are the graph's own; its host values are the most that can come."""


class LseAttention(Protocol):
    """Optional, beside ``PagedAttention``: the log-sum-exp too (natural log, float32, -inf for an empty row)."""

    def forward_with_lse(
        self, q: torch.Tensor, cache: CacheHandle, plan: Any, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``forward``; also returns lse [T, num_heads]."""
