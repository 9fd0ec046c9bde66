"""sample.logprobs of which a row's bits are its own: the sum under the softmax in one order, whatever the row's place.

A library's softmax may read rows by wide loads from where these can begin, so that a row of an odd vocabulary is summed
in an order that hangs on its address. Ranks and the sort compare values; no sum is in them.
"""

from __future__ import annotations

import torch
import triton
from triton import language as tl

from drivetrain_api.v1 import LogprobsSpec

from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier
from .target import Target

TILE = 4096
WARPS = 8
Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@kernel
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["logits"])
def _log_softmax(logits, out, stride, V: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr):
    """One row a program: logits [N, V], rows ``stride`` apart -> out [N, V] float32.

    Nothing is said of where rows begin, so that every row is laid out over threads alike.
    """
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    out += row * V
    tops = tl.full((TILE,), float("-inf"), tl.float32)
    for first in range(0, V, TILE):
        index = first + tl.arange(0, TILE)
        tops = tl.maximum(tops, tl.load(logits + index, mask=index < V, other=float("-inf")).to(tl.float32))
    top = tl.max(tops, axis=0)
    sums = tl.zeros((TILE,), tl.float32)
    for first in range(0, V, TILE):
        index = first + tl.arange(0, TILE)
        value = tl.load(logits + index, mask=index < V, other=float("-inf")).to(tl.float32)
        sums += tl.exp(value - top)
    whole = tl.log(tl.sum(sums, axis=0))
    for first in range(0, V, TILE):
        index = first + tl.arange(0, TILE)
        value = tl.load(logits + index, mask=index < V, other=0.0).to(tl.float32)
        tl.store(out + index, value - top - whole, mask=index < V)


class InvariantLogprobs:
    """``fn(logits [N, vocabulary], tokens [N], k)``; see ``LogprobsSpec``."""

    def __init__(self, spec: LogprobsSpec, target: Target) -> None:
        self._vocabulary = spec.vocabulary
        self._settings = {
            "TILE": min(TILE, triton.next_power_of_2(spec.vocabulary)),
            "OVERLAPS": target.overlaps,
            "num_warps": WARPS,
        } | target.options

    def __call__(self, logits: torch.Tensor, tokens: torch.Tensor, k: int) -> Logprobs:
        """-> logprob [N], rank [N], top_ids [N, k], top_logprobs [N, k]."""
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        rows, size = logits.shape
        logs = torch.empty((rows, size), dtype=torch.float32, device=logits.device)
        if rows:
            _log_softmax[(rows,)](logits, logs, logits.stride(0), V=size, **self._settings)
        ids = tokens.to(torch.int64).unsqueeze(-1)
        own = logs.gather(-1, ids)
        earlier = torch.arange(size, device=logs.device) < ids
        rank = 1 + (logs > own).sum(-1) + ((logs == own) & earlier).sum(-1)
        values, order = logs.sort(dim=-1, descending=True, stable=True) if k else (logs, ids)
        return own.squeeze(-1), rank.to(torch.int32), order[:, :k].to(torch.int32), values[:, :k]
