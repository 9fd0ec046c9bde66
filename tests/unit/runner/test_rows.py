"""What the host knows of the rows: who has flags, and the constants of steady steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from drivetrain.runner.batch import BatchShape
from drivetrain.runner.graphs import DECODE_FED, NOTHING, Captured
from drivetrain.runner.rows import (
    DELTA,
    DRAFTS,
    LOGPROBS,
    MIN_P,
    NON_GREEDY,
    POOLING,
    START_FIELDS,
    TOP_K,
    TOP_P,
    RowTables,
    TableShape,
)
from drivetrain.runner.staging import Pack, StagingRing
from drivetrain.sched.plan import RowStart, StepPlan
from tests.unit.runner.devices import host

SHAPE = TableShape(num_rows=4, max_drafts=0, widths=(3,), slot_dtype="int64")
GREEDY = RowStart(
    row=0, request_id=0, epoch=0, computed=0, late=False, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1,
    sample_index=0,
)  # fmt: skip
EXTRAS = (
    {"temperature": 0.5},
    {"logprobs": 0},
    {"max_drafts": 2},
    {"pooling": "mean"},
    {"position_delta": 3},
    {"temperature": 1.0, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "logprobs": 3},
)


def tables(**more) -> RowTables:
    return RowTables(host().device, replace(SHAPE, **more))


def plan(*starts: RowStart, ends: tuple[int, ...] = ()) -> StepPlan:
    none = np.zeros(0, np.int32)
    columns = {name: none for name in ("rows", "epochs", "num_new", "start", "bounds")}
    return StepPlan(plan_id=0, **columns, sample=none.astype(bool), num_decode=0, starts=starts, ends=ends)


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: "+".join(extra))
def test_plain_follows_starts_and_ends(extra) -> None:
    made = tables()
    assert made.plain()
    made.note(plan(GREEDY))
    assert made.plain(), "greedy without extras has no flag"
    made.note(plan(replace(GREEDY, row=1, **extra)))
    assert not made.plain()
    made.note(plan(ends=(0,)))
    assert not made.plain()
    made.note(plan(ends=(1,)))
    assert made.plain()
    made.note(plan(ends=(1,)))
    assert made.plain(), "a row that has ended does not count twice"


@pytest.mark.parametrize("ends", [(), (2,)], ids=["taken over", "ended first"])
def test_plain_follows_a_row_that_is_used_again(ends) -> None:
    made = tables()
    flagged = replace(GREEDY, row=2, temperature=0.7, logprobs=1)
    made.note(plan(flagged))
    made.note(plan(flagged, ends=ends))
    assert not made.plain()
    made.note(plan(replace(GREEDY, row=2), ends=ends))
    assert made.plain() and made.flags[2] == 0
    made.note(plan(flagged, replace(flagged, row=3), ends=ends))
    made.note(plan(replace(GREEDY, row=2), ends=ends))
    assert not made.plain(), "row 3 still has its flags"
    made.note(plan(ends=(3,)))
    assert made.plain()


def test_random_rows_are_counted_as_their_flags_say() -> None:
    random, made = np.random.default_rng(4), tables(num_rows=12)
    seen = set()
    for _ in range(300):
        rows = random.permutation(12)[: random.integers(0, 5)].tolist()
        starts = [replace(GREEDY, row=r, temperature=float(random.integers(0, 4) == 0)) for r in rows]
        ends = tuple(random.permutation(12)[: random.integers(0, 9)].tolist())
        made.note(plan(*starts, ends=ends))
        assert made.plain() == (not made.flags.any())
        seen.add(made.plain())
    assert seen == {True, False}


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_steady_places_are_one_token_a_row_in_the_slot_dtype(dtype: str, rows: int) -> None:
    made = tables(slot_dtype=dtype)
    starts, token_rows = made.steady_places(rows)
    assert starts.dtype == token_rows.dtype == getattr(torch, dtype)
    assert starts.tolist() == list(range(rows + 1)) and token_rows.tolist() == list(range(rows))
    again = made.steady_places(rows)
    assert again[0] is starts and again[1] is token_rows, "the addresses stay: graphs hold them"
    inputs = made.steady_inputs(rows)
    assert inputs["query_start"].tolist() == starts.tolist() and inputs["token_row"].tolist() == token_rows.tolist()
    assert {tensor.dtype for tensor in inputs.values()} == {torch.int32}


def captured(drawing) -> Captured:
    shape = BatchShape(rows=2, tokens=2, widths=(3,))
    nothing = {name: None for name in ("graph", "fed", "rows", "prepared", "hidden")}
    return Captured(shape=shape, names=DECODE_FED, sent=NOTHING, drawing=drawing, **nothing)


def test_the_second_graph_draws_for_greedy_rows_only() -> None:
    with_graph = captured(object())
    for facts in (0, DELTA, TOP_K, TOP_P | MIN_P):  # filters alone choose nothing: the row is greedy
        assert with_graph.draws(facts)
    for facts in (NON_GREEDY, LOGPROBS, DRAFTS, NON_GREEDY | LOGPROBS, LOGPROBS | DELTA, DRAFTS | POOLING):
        assert not with_graph.draws(facts)
    assert not captured(None).draws(0)


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_start_sets_every_field_of_its_row_and_of_no_other(chunk: int, drafts: int, dtype: str) -> None:
    made = tables(max_drafts=drafts, chunk=chunk, slot_dtype=dtype)
    first = replace(
        GREEDY, row=1, computed=7, temperature=0.5, top_p=0.25, min_p=0.125, top_k=3, sample_index=2,
        position_delta=-4, seed=-(1 << 62) + 5, last_token=9,
    )  # fmt: skip
    pack = Pack()
    made.pack(plan(replace(first, seed=1, computed=1), first, replace(GREEDY, row=3, seed=1 << 40)), (0,), pack)
    ring = StagingRing(host().device, 2, 256)
    made.apply(pack.upload(ring, host().device))
    assert made.computed.tolist() == [0, 7, 0, 0, 0]
    assert made.floats.tolist() == [[0, 0.5, 0, 0, 0], [1, 0.25, 1, 1, 1], [0, 0.125, 0, 0, 0]]
    assert made.ints.tolist() == [[0, 3, 0, 0, 0], [0, 2, 0, 0, 0], [0, -4, 0, 0, 0]]
    assert made.seeds.tolist() == [0, -(1 << 62) + 5, 0, 1 << 40, 0]
    assert made.last_tokens[:, 0].tolist() == [0, 9, 0, 0, 0] and not made.last_tokens[:, 1:].any()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("started", [False, True])
def test_blocks_come_to_their_places_and_the_last_write_wins(chunk: int, dtype: str, started: bool) -> None:
    made = tables(slot_dtype=dtype, chunk=chunk, widths=(3, 2))
    assert {table.dtype for table in made.tables} == {getattr(torch, dtype)}
    blocks = [(0, 7, 0, 5), (0, 7, 1, 6), (2, 9, 1, 8), (0, 7, 1, 4), (1, 7, 2, 3), (2, 9, 0, 2), (2, 9, 1, 1)]
    pack = Pack()
    starts = (replace(GREEDY, row=2, computed=3),) if started else ()
    made.pack(replace(plan(*starts), blocks=np.array(blocks, np.int32)), (7, 9), pack)
    made.apply(pack.upload(StagingRing(host().device, 2, 256), host().device))
    assert made.tables[0].tolist() == [[5, 4, 0], [0, 0, 3], [0] * 3, [0] * 3, [0] * 3]
    assert made.tables[1].tolist() == [[0, 0], [0, 0], [2, 1], [0, 0], [0, 0]]
    assert made.computed.tolist() == [0, 0, 3 * started, 0, 0]
    assert made.floats.tolist() == [[0] * 5, [1] * 5, [0] * 5] and made.ints.eq(0).all()


def test_all_changes_of_a_plan_are_one_scatter_where_slots_are_words() -> None:
    blocks = np.array([(0, 0, 0, 5)], np.int32)
    for dtype, names in (("int32", ["changes"]), ("int64", ["starts0", "blocks0"])):
        pack = Pack()
        tables(slot_dtype=dtype).pack(replace(plan(GREEDY), blocks=blocks), (0,), pack)
        assert pack.names == names


def test_a_row_that_starts_twice_in_a_plan_is_written_once() -> None:
    """Places that come twice have no order on a device."""
    made = tables(slot_dtype="int32", chunk=0, widths=(3,))
    pack = Pack()
    starts = (
        replace(GREEDY, row=1, computed=3),
        replace(GREEDY, row=2, computed=4),
        replace(GREEDY, row=1, computed=9),
    )
    made.pack(plan(*starts), (0,), pack)
    (changes,) = pack.arrays
    places = changes[: 2 * (len(changes) // 3)].view(np.int64)
    assert len(places) == 2 * START_FIELDS and len(set(places.tolist())) == len(places)
    made.apply(pack.upload(StagingRing(host().device, 2, 256), host().device))
    assert made.computed.tolist()[:4] == [0, 9, 4, 0]
