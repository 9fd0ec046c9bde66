"""sample.logprobs, sample.verify, sample.keep and input.prepare: what surrounds a model's forward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drivetrain.ops.cases.sampling import keep_cases, logprobs_cases, verify_cases
from drivetrain.ops.cases.steps import prepare_cases
from drivetrain.ops.reference.kinds import Cost, ReferenceOp, Tolerance, count_up, equal
from drivetrain_api.v1 import (
    BatchFacts,
    KeepSpec,
    LogprobsSpec,
    Prepared,
    PrepareInputs,
    PrepareSpec,
    VerifySpec,
    dtype_bytes,
    torch_dtype,
)

Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_logprobs(spec: LogprobsSpec) -> Callable[[torch.Tensor, torch.Tensor, int], Logprobs]:
    """sample.logprobs/1: ``fn(logits [N, vocabulary], tokens [N], k) -> (logprob [N], rank [N], top_ids [N,
    k], top_logprobs [N, k])``; float32 and int32.

    Natural log of the softmax of the raw logits. rank: 1 + the tokens that are likelier, or as likely with
    a lower id. The k likeliest in falling order, ties: the lowest id first.
    """

    def logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> Logprobs:
        logs = logits.to(torch.float32).log_softmax(-1)
        ids = tokens.to(torch.int64).unsqueeze(-1)
        own = logs.gather(-1, ids)
        earlier = count_up(ids, logs.shape[-1]) < ids
        rank = 1 + (logs > own).sum(-1) + ((logs == own) & earlier).sum(-1)
        values, order = logs.sort(dim=-1, descending=True, stable=True) if k else (logs, ids)
        return own.squeeze(-1), rank.to(torch.int32), order[:, :k].to(torch.int32), values[:, :k]

    return logprobs


def make_verify(
    spec: VerifySpec,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """sample.verify/1: ``fn(draws [B, k + 1], drafts [B, k], num_drafts [B]) -> accepted [B] int32`` in 1
    .. k + 1.

    accepted[b] = 1 + the drafts that equal the draw at their place, counted up to the first that does not,
    among the first num_drafts[b].
    """

    def verify(draws: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
        places = drafts.shape[1]
        used = count_up(num_drafts, places) < num_drafts.unsqueeze(-1)
        same = (draws[:, :places] == drafts) & used
        return (1 + same.to(torch.int32).cumprod(-1).sum(-1)).to(torch.int32)

    return verify


def make_keep(
    spec: KeepSpec,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """sample.keep/1: ``fn(tokens [N], witness [N], rows [N], last_tokens [R, k + 1]) -> packed [2 N]``; all int32 but
    the witness, float32.

    last_tokens[rows[n], 0] becomes tokens[n]. packed holds the tokens, then the bits of the witnesses: what the host
    copies.
    """

    def keep(
        tokens: torch.Tensor, witness: torch.Tensor, rows: torch.Tensor, last_tokens: torch.Tensor
    ) -> torch.Tensor:
        last_tokens[rows, 0] = tokens
        return torch.cat((tokens, witness.view(torch.int32)))

    return keep


def make_prepare(spec: PrepareSpec) -> Callable[[PrepareInputs, tuple[int, ...]], Prepared]:
    """input.prepare/1: ``fn(inputs: PrepareInputs, widths) -> Prepared``, all of the slot dtype.

    base[b] = start[b], or computed[rows[b]] where start is -1. lengths[b] = base + num_new, 0 for padded
    rows (num_new 0). Token t of batch row b = token_row[t] has position base[b] + token_offset[t]; its id
    is host_ids[t] in a row with a start, else last_tokens[rows[b], token_offset[t]]. A token whose offset
    is not below its row's num_new is padding: id, position and slot 0. tables[g] = block_tables[g][rows,
    :widths[g]]; slots[g][t] = tables[g][b, position // block_tokens[g]] * block_tokens[g] + position mod
    block_tokens[g]. At the end computed[rows[b]] becomes lengths[b].
    """
    dtype = torch_dtype(spec.dtype)

    def prepare(inputs: PrepareInputs, widths: tuple[int, ...]) -> Prepared:
        computed = inputs.computed[inputs.rows].to(dtype)
        start, num_new = inputs.start.to(dtype), inputs.num_new.to(dtype)
        base = torch.where(start >= 0, start, computed)
        lengths = torch.where(num_new > 0, base + num_new, 0).to(dtype)
        offset, row = inputs.token_offset.to(dtype), inputs.token_row
        real = offset < num_new[row]
        positions = torch.where(real, base[row] + offset, 0).to(dtype)
        ids = torch.where(real, _ids(inputs, start[row]).to(dtype), 0).to(dtype)
        tables, slots = [], []
        for table, width, size in zip(inputs.block_tables, widths, spec.block_tokens, strict=True):
            rows = table[inputs.rows, :width].to(dtype)
            column = (positions // size).clamp(max=width - 1)
            slot = rows[row, column] * size + positions % size
            tables.append(rows)
            slots.append(torch.where(real, slot, 0).to(dtype))
        inputs.computed[inputs.rows] = lengths.to(torch.int32)
        return Prepared(
            ids=ids,
            positions=positions,
            base=base,
            lengths=lengths,
            tables=tuple(tables),
            slots=tuple(slots),
        )

    return prepare


def _ids(inputs: PrepareInputs, start: torch.Tensor) -> torch.Tensor:
    """``start`` [T]: of each token's row."""
    place = inputs.token_offset.clamp(max=inputs.last_tokens.shape[1] - 1)
    last = inputs.last_tokens[inputs.rows[inputs.token_row], place]
    return torch.where(start >= 0, inputs.host_ids, last)


def logprobs_tolerance(dtype: str) -> Tolerance:
    """A float32 log-softmax over a large vocabulary."""
    return Tolerance(rtol=2e-6, atol=2e-5)


def logprobs_cost(spec: LogprobsSpec, facts: BatchFacts) -> Cost:
    """Read the logits once."""
    elements = facts.num_rows * spec.vocabulary
    return Cost(bytes=elements * 4, operations=elements * 12)


def verify_cost(spec: VerifySpec, facts: BatchFacts) -> Cost:
    """Read draws and drafts."""
    elements = facts.num_rows * (2 * spec.max_drafts + 1)
    return Cost(bytes=elements * 4, operations=elements)


def keep_cost(spec: KeepSpec, facts: BatchFacts) -> Cost:
    """Read tokens, witnesses and rows; write the tokens twice and the witnesses."""
    return Cost(bytes=facts.num_rows * 24, operations=facts.num_rows)


def prepare_cost(spec: PrepareSpec, facts: BatchFacts) -> Cost:
    """Write ids, positions and slots of a token; read and write a row's place."""
    size = dtype_bytes(spec.dtype)
    groups = len(spec.block_tokens)
    tokens, rows = facts.num_tokens * (2 + groups), facts.num_rows * 4
    return Cost(bytes=(tokens + rows) * size * 2, operations=(tokens + rows) * 4)


LOGPROBS = ReferenceOp(
    op=LogprobsSpec.op,
    make=make_logprobs,
    invariant=make_logprobs,
    cases=logprobs_cases,
    tolerance=logprobs_tolerance,
    cost=logprobs_cost,
)
VERIFY = ReferenceOp(
    op=VerifySpec.op,
    make=make_verify,
    invariant=make_verify,
    cases=verify_cases,
    tolerance=equal,
    cost=verify_cost,
)
KEEP = ReferenceOp(
    op=KeepSpec.op,
    make=make_keep,
    invariant=make_keep,
    cases=keep_cases,
    tolerance=equal,
    cost=keep_cost,
)
PREPARE = ReferenceOp(
    op=PrepareSpec.op,
    make=make_prepare,
    invariant=make_prepare,
    cases=prepare_cases,
    tolerance=equal,
    cost=prepare_cost,
)
