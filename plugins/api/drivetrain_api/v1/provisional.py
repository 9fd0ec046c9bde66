"""Groups of the contract that have no user in the core yet. Provisional: they may change in any 0.x release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from .linear import QuantSpec
from .ops import OpSpec
from .storage import CacheHandle

if TYPE_CHECKING:
    import torch

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRule:
    """How router logits become expert choices: score function, groups, renormalisation, scale."""

    score: Literal["softmax", "sigmoid", "sqrt_softplus"]
    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = False
    scale: float = 1.0
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec(OpSpec):
    """A mixture-of-experts feed-forward. The implementation is a ``Moe``."""

    op: ClassVar[str] = "moe/1"
    hidden: int
    intermediate: int
    num_experts: int
    rule: RouteRule
    activation: Literal["silu", "gelu_tanh", "relu2"]
    gated: bool = True
    quant: QuantSpec | None = None


class Moe(Protocol):
    """Routing and experts of one spec."""

    def route(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [T, E] -> expert ids [T, k] and weights [T, k]; equal scores: the lowest expert first."""

    def pack(self, up: torch.Tensor, down: torch.Tensor) -> Any:
        """up [E, 2 * intermediate or intermediate, hidden], down [E, hidden, intermediate] -> packed."""

    def experts(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: Any) -> torch.Tensor:
        """x [T, hidden] -> the weighted sum of its experts' outputs [T, hidden]."""


class ExpertParallelMoe(Protocol):
    """Optional, beside ``Moe``: experts spread over ranks."""

    def prepare(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        """Send tokens to the ranks of their experts."""

    def compute(self, prepared: Any, packed: Any) -> torch.Tensor:
        """Run this rank's experts."""

    def finalize(self, prepared: Any, out: torch.Tensor) -> torch.Tensor:
        """Return outputs to the tokens' ranks and add them up."""

    def load_counts(self) -> torch.Tensor:
        """Tokens routed to each logical expert since the last call, [E]."""

    def set_map(self, logical_to_physical: torch.Tensor) -> None:
        """Place experts: [E, replicas] physical ids, -1 for none."""


class Collectives(Protocol):
    """Communication between the ranks of one group."""

    def supports(self, op: CollectiveOp, dtype: str, num_bytes: int, world: int) -> bool:
        """Return whether this provider does that call."""

    @property
    def capturable(self) -> bool:
        """Whether calls may be captured in a graph."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
        """Concatenate on dimension 0; sizes a rank where they differ."""

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
        """Sum, then keep this rank's part of dimension 0."""

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], recv: Sequence[int]) -> torch.Tensor:
        """Exchange runs of dimension 0."""

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """Copy from one rank to all."""

    def send(self, x: torch.Tensor, rank: int) -> None:
        """Send to the next stage, ordered on the stream."""

    def recv(self, out: torch.Tensor, rank: int) -> None:
        """Receive from a stage, ordered on the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec(OpSpec):
    """A gated linear recurrence: short convolution, chunk scan, decode step. Implementation: ``Recurrent``."""

    op: ClassVar[str] = "recurrent/1"
    rule: Literal["mamba2", "gated_delta", "kda"]
    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    checkpoint_alignment: int = 1


class Recurrent(Protocol):
    """State layers of one spec. States live in blocks of a recurrent cache group."""

    def scan(self, inputs: Sequence[torch.Tensor], cache: CacheHandle, plan: Any) -> torch.Tensor:
        """Run the step's tokens from each row's state block, leaving the new state there."""

    def export_state_at(self, cache: CacheHandle, plan: Any, exports: torch.Tensor) -> None:
        """In the same run, store the state after ``offset`` tokens of row b in ``block``: exports [n, 3] int."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec(OpSpec):
    """Low-rank adapters over a linear: y += (x @ A[a].T) @ B[a].T * scale[a] for each token's adapter slot a."""

    op: ClassVar[str] = "lora/1"
    in_features: int
    out_features: int
    max_rank: int
    max_adapters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Registrable device memory: address, bytes, and how blocks lie in it."""

    address: int
    num_bytes: int
    block_stride: int
    block_bytes: int


class Transfer(Protocol):
    """Direct transfer of cache blocks. Without it, blocks go through host copies."""

    def regions(self, cache: CacheHandle) -> tuple[Region, ...]:
        """Describe the memory behind a cache; empty where it can't be registered."""

    @property
    def needs_staging(self) -> bool:
        """Whether copies must pass through host memory."""


class Offload(Protocol):
    """Optional, beside ``Storage``: move weights or caches out and back."""

    def offload(self, handle: Any) -> Any:
        """Move to the host; returns a token."""

    def restore(self, token: Any) -> None:
        """Move back to the same place."""


class Program(Protocol):
    """A whole forward owned by the backend, called by the same runner."""

    def run(self, ids: torch.Tensor, positions: torch.Tensor, plans: Any) -> torch.Tensor:
        """Return hidden states [T, hidden]."""


class ProgramCompiler(Protocol):
    """Optional, beside ``Backend``: compile a whole forward for a bucket."""

    def compile(self, step: Any, weights: Any, num_tokens: int, num_rows: int) -> Program:
        """Build the program of one bucket."""
