"""How an op is named, described, asked for, provided or declined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Implementation = Callable[..., Any]
GraphSupport = Literal["never", "one_token", "uniform", "any"]
LengthsNeeded = Literal["device", "host_bound", "host_exact"]
RowOrder = Literal["any", "decode_first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """A frozen description of one case of an op. Subclasses name the op and its version, ``group.name/version``.

    Equal specs are the same case: an implementation bound for one serves every layer with an equal one.
    Dtypes are torch's names as text ("float32", "bfloat16"), so that specs load without torch.
    """

    op: ClassVar[str] = ""
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTraits:
    """What is true of an implementation. Conservative defaults: unknown means no."""

    batch_invariant: bool = False
    graph: GraphSupport = "never"
    waits_per_step: int = 0
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Provided:
    """An implementation of one spec. ``label`` is what ``engine explain`` prints, e.g. ``native`` or a kernel's name.

    ``implementation`` is a plain callable for pointwise ops and a provider object (``PagedAttention``, ``Linear``,
    ``Sampler`` ...) for the groups that need more than one call; each spec's docstring says which.
    """

    implementation: Any
    label: str
    traits: OpTraits = OpTraits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decline:
    """This backend has no implementation of that spec; the core serves it by the torch reference and says so."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A claim on a run of consecutive specs: ``count`` of them, from the first, done by one implementation.

    The core asks for these runs, and takes only a claim on all of one:

    - (LinearSpec, GatedActivationSpec): a ``Linear`` whose ``apply`` gives the activated [T, size]. It may have
      ``apart_tokens(most: int) -> int``: the largest T up to ``most`` for which the product [T, 2 size] lies in memory
      too; 0: none. Without it the memory plan counts it for every T. So may the run below that ends in one.
    - (RopeSpec, AttentionSpec), with an RmsNormSpec before them where heads are normed:
      ``fn(x [T, H + 2 K, D], weight [H + K, D] or None, cos, sin, cache, plan, sinks) -> out [T, H, D]``; x holds
      query, key and value heads; query and key heads are normed and rotated, keys and values stored at the plan's
      slots, and the queries attended as ``PagedAttention.forward`` does. ``plan`` is made by the attention bound by
      itself.
    - (AddRmsNormSpec, LinearSpec), with a GatedActivationSpec after them in a feed-forward: a ``Linear`` whose
      ``apply(x [T, size], residual [T, size] or None, weight [size], packed) -> (product, total)`` norms by ``weight``
      before it multiplies. A residual of None: total is x in float32.
    - (LinearSpec of the head, DrawSpec): an object with ``best(hidden [N, in], packed) -> (tokens [N] int32, logits [N]
      float32)``: of each row the token that a greedy draw without a mask takes, and its logit, which is NaN where any
      of the row's is. Logits of other tokens need not lie in memory. ``packed``: by the ``Linear`` that is bound by
      itself. ``takes(rows: int) -> bool`` says for which N it is called; the others are multiplied, then drawn.
    """

    count: int
    provided: Provided


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """Host values agreed before a step by every rank; what an implementation may choose by."""

    num_tokens: int
    num_rows: int
    decode_only: bool
    max_query_len: int
    max_length_bound: int
