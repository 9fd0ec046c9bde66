"""input.prepare: all of a step's inputs, from rows, in one launch; and sample.keep.

The launch reads the table of computed tokens and writes it. What makes that safe: a row that starts where the table
says (start < 0) has at most as many tokens as ``last_tokens`` has columns, so the program that holds its first token
does all of them and then advances the row. The tokens of other rows never read the table. The padding row, which
several batch rows may name, holds 0 and is set to 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton import language as tl

from drivetrain_api.v1 import KeepSpec, Prepared, PrepareInputs, PrepareSpec, torch_dtype

from .launch import kernel
from .overlap import let_next_begin, wait_for_earlier
from .target import Target

TOKENS = 128  # of a program that fills tokens
COLUMNS = 1024  # of a program that copies a part of one row of one table
KEPT = 256  # rows of a program of _keep
ALIGN = 32  # results begin at multiples of so many elements of the one tensor that holds them; as in ``_part``
WARPS = 4


@triton.jit
def _part(size):
    """Where the part after one of that size begins, relative to its own begin."""
    return (size + 31) // 32 * 32


@triton.jit
def _place_tokens(
    token, row, position, ids, written, out, tables, strides, odd_widths, tokens, rows,
    SIZES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write id, position and one slot a group for the tokens of the mask ``written``; tokens, rows: sizes of parts."""
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(out + token, ids.to(kind), mask=written)
    tl.store(out + tokens + token, position.to(kind), mask=written)
    for g in tl.static_range(GROUPS):
        column = tl.minimum(position // SIZES[g], odd_widths[g] // 2 - 1)
        block = tl.load(tables[g] + row.to(tl.int64) * strides[g] + column, mask=written, other=0).to(kind)
        slot = block * SIZES[g] + position % SIZES[g]
        tl.store(out + (2 + g) * tokens + 2 * rows + token, slot.to(kind), mask=written)


@triton.jit
def _fill_tokens(
    piece, rows_of, start, token_row, token_offset, host_ids, num_new, computed, last_tokens, out,
    tables, strides, odd_widths, num_tokens, tokens, rows,
    SIZES: tl.constexpr, GROUPS: tl.constexpr, PLACES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = out.dtype.element_ty
    token = piece * TOKENS + tl.arange(0, TOKENS)
    there = token < num_tokens
    b = tl.load(token_row + token, mask=there, other=0)
    offset = tl.load(token_offset + token, mask=there, other=0)
    count = tl.load(num_new + b, mask=there, other=0)
    begin = tl.load(start + b, mask=there, other=0)
    row = tl.load(rows_of + b, mask=there, other=0)
    real, follows = there & (offset < count), begin < 0
    # Tokens that the host gave, and padding: a lane does its own.
    given, padding = real & (begin >= 0), there & (offset >= count)
    position = tl.where(given, begin + offset, 0)
    ids = tl.load(host_ids + token, mask=given, other=0)
    _place_tokens(
        token, row, position, ids, given, out, tables, strides, odd_widths, tokens, rows, SIZES, GROUPS
    )  # fmt: skip
    zero = tl.zeros((TOKENS,), kind)
    tl.store(out + token, zero, mask=padding)
    tl.store(out + tokens + token, zero, mask=padding)
    for g in tl.static_range(GROUPS):
        tl.store(out + (2 + g) * tokens + 2 * rows + token, zero, mask=padding)
    # Rows that go on from the table: the lane of the first token does all, then advances the row.
    leads = real & (offset == 0)
    base = tl.where(follows, tl.load(computed + row, mask=leads & follows, other=0), begin)
    for place in tl.static_range(PLACES):
        mine = leads & follows & (place < count)
        last = tl.load(last_tokens + row.to(tl.int64) * PLACES + place, mask=mine, other=0)
        _place_tokens(
            token + place, row, base + place, last, mine, out, tables, strides, odd_widths, tokens, rows, SIZES, GROUPS
        )  # fmt: skip
    tl.store(out + 2 * tokens + b, base.to(kind), mask=leads)
    tl.store(out + 2 * tokens + rows + b, (base + count).to(kind), mask=leads)
    tl.store(computed + row, base + count, mask=leads)


@triton.jit
def _fill_row(
    b, piece, rows_of, start, num_new, computed, out, tables, strides, odd_widths, num_rows, tokens, rows,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy one piece of every group's table row; set a padded row's place, as no token does."""
    kind: tl.constexpr = out.dtype.element_ty
    row = tl.load(rows_of + b)
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    goal = out + (2 + GROUPS) * tokens + 2 * rows
    for g in tl.static_range(GROUPS):
        width = odd_widths[g] // 2
        block = tl.load(tables[g] + row.to(tl.int64) * strides[g] + column, mask=column < width, other=0)
        tl.store(goal + b * width + column, block.to(kind), mask=column < width)
        goal += _part(num_rows * width)
    if piece == 0:
        padded = tl.load(num_new + b) == 0
        begin = tl.load(start + b)
        base = tl.load(computed + row, mask=padded, other=0)
        tl.store(out + 2 * tokens + b, tl.where(begin >= 0, begin, base).to(kind), mask=padded)
        tl.store(out + 2 * tokens + rows + b, tl.zeros((), kind), mask=padded)
        tl.store(computed + row, 0, mask=padded)


@kernel
@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "token_pieces", "row_pieces"],
    do_not_specialize_on_alignment=[
        "rows_of", "start", "token_row", "token_offset", "host_ids", "num_new", "computed", "last_tokens",
    ],
)  # fmt: skip
def _prepare(
    rows_of,
    start,
    token_row,
    token_offset,
    host_ids,
    num_new,
    computed,
    last_tokens,
    out,  # parts: ids, positions, base, lengths, slots a group, a table a group; as ``layout`` has them
    tables,  # a tuple, one a group
    strides,
    odd_widths,  # 2 width + 1 each: neither 1 nor a multiple of 16, which would be compiled anew
    num_rows,
    num_tokens,
    token_pieces,
    row_pieces,
    SIZES: tl.constexpr,
    GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    program = tl.program_id(0)
    tokens, rows = _part(num_tokens), _part(num_rows)
    if program < token_pieces:
        _fill_tokens(
            program, rows_of, start, token_row, token_offset, host_ids, num_new, computed, last_tokens, out,
            tables, strides, odd_widths, num_tokens, tokens, rows, SIZES, GROUPS, PLACES, TOKENS,
        )  # fmt: skip
    else:
        index = program - token_pieces
        _fill_row(
            index // row_pieces, index % row_pieces, rows_of, start, num_new, computed, out,
            tables, strides, odd_widths, num_rows, tokens, rows, GROUPS, COLUMNS,
        )  # fmt: skip


@kernel
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["tokens", "witness", "rows", "packed"])
def _keep(
    tokens, witness, rows, last_tokens, packed, count, PLACES: tl.constexpr, KEPT: tl.constexpr, OVERLAPS: tl.constexpr
):
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    n = tl.program_id(0) * KEPT + tl.arange(0, KEPT)
    inside = n < count
    token = tl.load(tokens + n, mask=inside, other=0)
    row = tl.load(rows + n, mask=inside, other=0).to(tl.int64)
    bits = tl.load(witness + n, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    tl.store(last_tokens + row * PLACES, token, mask=inside)
    tl.store(packed + n, token, mask=inside)
    tl.store(packed + count + n, bits, mask=inside)


def make_prepare(spec: PrepareSpec, target: Target) -> Callable[[PrepareInputs, tuple[int, ...]], Prepared]:
    """input.prepare/1: ``fn(inputs, widths) -> Prepared``; the results are views of one new tensor.

    The tokens of a row follow each other. A row without a start has at most as many new tokens as ``last_tokens`` has
    columns; the padding row's entry in the table of computed tokens is 0.
    """
    dtype, groups = torch_dtype(spec.dtype), len(spec.block_tokens)
    settings = {
        "SIZES": tuple(spec.block_tokens),
        "GROUPS": groups,
        "TOKENS": TOKENS,
        "COLUMNS": COLUMNS,
        "OVERLAPS": target.overlaps,
    } | target.options

    def prepare(inputs: PrepareInputs, widths: tuple[int, ...]) -> Prepared:
        rows, tokens = inputs.rows.shape[0], inputs.token_row.shape[0]
        sizes = (tokens, tokens, rows, rows, *(tokens for _ in widths), *(rows * w for w in widths))
        parts = layout(sizes)
        out = torch.empty(sum(parts), dtype=dtype, device=inputs.rows.device)
        token_pieces = triton.cdiv(tokens, TOKENS)
        row_pieces = triton.cdiv(max(widths), COLUMNS)
        programs = token_pieces + rows * row_pieces
        if programs:
            _prepare[(programs,)](
                inputs.rows,
                inputs.start,
                inputs.token_row,
                inputs.token_offset,
                inputs.host_ids,
                inputs.num_new,
                inputs.computed,
                inputs.last_tokens,
                out,
                inputs.block_tables,
                tuple(t.stride(0) for t in inputs.block_tables),
                tuple(2 * w + 1 for w in widths),
                rows,
                tokens,
                token_pieces,
                row_pieces,
                PLACES=inputs.last_tokens.shape[1],
                num_warps=WARPS,
                **settings,
            )
        ids, positions, base, lengths, *rest = out.split_with_sizes(parts)[::2]
        return Prepared(
            ids=ids,
            positions=positions,
            base=base,
            lengths=lengths,
            tables=tuple(t.view(rows, w) for t, w in zip(rest[groups:], widths, strict=True)),
            slots=tuple(rest[:groups]),
        )

    return prepare


def layout(sizes: tuple[int, ...]) -> list[int]:
    """Sizes of the parts and of the gaps after them, in turn."""
    parts: list[int] = []
    for size in sizes:
        parts += (size, -size % ALIGN)
    return parts


def make_keep(
    spec: KeepSpec, target: Target
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """sample.keep/1: ``fn(tokens [N], witness [N], rows [N], last_tokens [R, k + 1]) -> packed [2 N]``."""
    settings = {"KEPT": KEPT, "OVERLAPS": target.overlaps} | target.options

    def keep(
        tokens: torch.Tensor, witness: torch.Tensor, rows: torch.Tensor, last_tokens: torch.Tensor
    ) -> torch.Tensor:
        count = tokens.shape[0]
        packed = torch.empty(2 * count, dtype=torch.int32, device=tokens.device)
        if count:
            grid = (triton.cdiv(count, KEPT),)
            places = last_tokens.shape[1]
            _keep[grid](tokens, witness, rows, last_tokens, packed, count, PLACES=places, num_warps=WARPS, **settings)
        return packed

    return keep
