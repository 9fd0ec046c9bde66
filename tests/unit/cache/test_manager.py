"""Tables, windows, prefixes: what rows hold, what groups can serve, and what the next plan is told."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain.cache.groups import make_group
from drivetrain.cache.manager import CacheManager
from drivetrain.cache.prefix import Chain
from drivetrain.cache.sizing import GroupNeed, plan_cache

FULL = {"kind": "full", "layer_bytes": 64, "num_layers": 1, "block_tokens": 4}
WINDOW = {**FULL, "kind": "window", "window": 10}
STATE = {**FULL, "kind": "recurrent"}
TOKENS = np.arange(100, dtype=np.int32)


def manager(*groups: dict, unit: int = 8, budget: int = 1 << 14, shared: bool = True, **more: bool) -> CacheManager:
    plan = plan_cache([GroupNeed(**g) for g in groups], budget, shared=shared, max_tokens=96, chunk=32)
    return CacheManager(plan, max_rows=4, max_tokens=96, unit=unit, **more)


def chain(upto: int, unit: int = 8) -> list[bytes]:
    one = Chain(b"root", unit)
    one.extend(TOKENS, upto)
    return one.digests


def filled(cache: CacheManager, row: int = 0, upto: int = 64) -> list[bytes]:
    """A row computes tokens 0 .. upto - 1, publishes them, and leaves."""
    digests = chain(upto, cache.unit)
    assert cache.open(row, digests, 0) == [[] for _ in cache.groups] and cache.extend(row, upto)
    cache.publish(row, digests, 0, upto)
    cache.take_changes()
    cache.close(row)
    cache.check_integrity()
    return digests


@pytest.mark.parametrize("size", [4, 8, 16, 32])
def test_full_attention_serves_the_unbroken_chain(size: int) -> None:
    cache = manager({**FULL, "block_tokens": size})
    digests = filled(cache)
    assert cache.longest(digests, 64) == 64
    assert cache.longest(digests, 63) == 63 // max(size, 8) * max(size, 8)
    cache.pool.unname(0, cache.groups[0].blocks_at(digests, 64)[1][32 // size])
    assert cache.longest(digests, 64) == 32


def test_a_window_serves_what_its_last_tokens_allow() -> None:
    cache = manager(WINDOW)
    digests = filled(cache)
    group = cache.groups[0]
    first, blocks = group.blocks_at(digests, 64)
    assert (first, len(blocks)) == (13, 3), "tokens 55 .. 63"
    for index in range(5):
        cache.pool.unname(0, cache.pool.groups[0].index[group.name_of(digests, index)])
    assert cache.longest(digests, 64) == 64, "early blocks are not needed"
    cache.pool.unname(0, cache.pool.groups[0].index[group.name_of(digests, 14)])
    assert cache.longest(digests, 64) == 56
    cache.pool.unname(0, cache.pool.groups[0].index[group.name_of(digests, 9)])
    assert cache.longest(digests, 48) == 32 and cache.longest(digests, 24) == 0


def test_the_manager_takes_the_longest_that_all_groups_serve() -> None:
    cache = manager(FULL, WINDOW, STATE)
    digests = chain(64)
    assert cache.open(0, digests, 0) == [[] for _ in cache.groups] and cache.extend(0, 64)
    cache.publish(0, digests, 0, 64)
    assert cache.longest(digests, 64) == 0, "no checkpoint yet"
    state = cache.recurrent[0]
    for length in (24, 48):
        assert cache.checkpoint(state, digests, length)
    assert cache.checkpoint(state, digests, 48) == 0, "there is one already"
    assert cache.longest(digests, 64) == 48 and cache.longest(digests, 40) == 24
    assert cache.longest(digests, 64, 16) == 48 and cache.longest(digests, 47, 16) == 0
    cache.take_changes()
    cache.close(0)
    cache.check_integrity()


def test_a_hit_copies_the_checkpoint_and_a_miss_zeroes_the_state() -> None:
    cache = manager(FULL, STATE)
    digests = chain(64)
    cache.open(0, digests, 0)
    cache.extend(0, 64)
    cache.publish(0, digests, 0, 64)
    kept = cache.checkpoint(cache.recurrent[0], digests, 32)
    first = cache.take_changes()
    assert first.zeroed == ((1, int(cache.tables[1][0, 0])),) and not first.copies
    shared = cache.open(1, digests, 32)
    second = cache.take_changes()
    assert shared[1] == [kept]
    assert [(c.group, c.source, c.target) for c in second.copies] == [(1, kept, int(cache.tables[1][1, 0]))]
    cache.check_integrity()


def test_opening_holds_nothing_when_a_state_lacks_a_block() -> None:
    plan = plan_cache(
        [GroupNeed(**FULL), GroupNeed(**STATE), GroupNeed(**{**STATE, "layer_bytes": 640})],
        64 * 1024,
        shared=False,
        max_tokens=96,
        chunk=32,
    )
    cache = CacheManager(plan, max_rows=99, max_tokens=96, unit=8)
    digests = chain(64)
    rows = 0
    while cache.open(rows, digests, 0) is not None:
        rows += 1
    assert rows == min(group.num_blocks for group in plan.groups[1:]) - 1
    cache.check_integrity()
    assert cache.take_changes().blocks[:, 0].max() == rows - 1


def test_extending_is_all_or_nothing_over_groups() -> None:
    cache = manager(FULL, WINDOW, budget=64 * 40)
    digests = chain(64)
    rows = [row for row in range(4) if cache.open(row, digests, 0) is not None]
    before = cache.num_held
    done = [cache.extend(row, 60) for row in rows]
    assert done == [True, False, False, False] and cache.num_held == before + 30
    assert [int(h) for h in cache.horizon] == [60, 0, 0, 0]
    cache.check_integrity()


def test_many_rows_are_extended_until_one_lacks_a_block() -> None:
    cache = manager(FULL, budget=64 * 26)
    for row in range(4):
        cache.open(row, [], 0)
    rows = np.arange(4)
    assert cache.extend_rows(rows, np.full(4, 22)) is None
    assert cache.horizon.tolist() == [24] * 4
    assert cache.extend_rows(rows, np.full(4, 25)) == 1
    assert cache.horizon.tolist() == [28, 24, 24, 24]
    cache.check_integrity()
    blocks = cache.take_changes().blocks
    assert len(blocks) == 25 and len({(row, index) for row, _, index, _ in blocks.tolist()}) == 25


def test_windows_let_go_of_what_no_later_query_reads() -> None:
    cache = manager(FULL, WINDOW)
    cache.open(0, [], 0)
    cache.extend(0, 40)
    cache.take_changes()
    cache.slide(np.array([0]), np.array([32]))  # reads 23 .. 32
    assert cache.take_changes().blocks.tolist() == [[0, 1, index, 0] for index in range(5)]
    assert cache.firsts[:, 0].tolist() == [0, 5] and not cache.tables[1][0, :5].any() and cache.tables[1][0, 5]
    cache.slide(np.array([0]), np.array([32]))
    assert not len(cache.take_changes().blocks)
    cache.check_integrity()


@pytest.mark.parametrize("size", [4, 8, 16])
def test_one_unit_of_many_rows_is_published_like_one_after_the_other(size: int) -> None:
    many, single = (manager({**FULL, "block_tokens": size}, {**WINDOW, "block_tokens": size}) for _ in range(2))
    chains = [Chain(bytes([row]), 8) for row in range(3)]
    for cache in (many, single):
        for row in range(3):
            cache.open(row, [], 0)
            cache.extend(row, 48)
    for unit in range(6):
        digests = [one.push(TOKENS[unit * 8 : unit * 8 + 8].tobytes()) for one in chains]
        many.publish_units(np.arange(3), np.full(3, unit), digests)
        for row in range(3):
            single.publish(row, chains[row].digests, unit * 8, unit * 8 + 8)
        for group in range(2):
            assert many.pool.groups[group].index == single.pool.groups[group].index
    assert len(many.pool.groups[0].index) == 3 * 48 // size
    many.check_integrity()


def test_withdrawn_digests_are_not_found_and_others_are() -> None:
    cache = manager(FULL, STATE)
    digests = chain(32)
    cache.open(0, digests, 0)
    cache.extend(0, 32)
    cache.publish(0, digests, 0, 32)
    cache.checkpoint(cache.recurrent[0], digests, 32)
    cache.take_changes()
    assert cache.longest(digests, 32) == 32
    cache.withdraw(digests[2:])
    assert cache.longest(digests, 32) == 0 and len(cache.pool.groups[0].index) == 4
    assert not cache.pool.groups[1].index
    cache.check_integrity()


def test_a_row_can_be_kept_from_the_runner_and_told_later() -> None:
    cache = manager(FULL, WINDOW)
    cache.open(2, [], 0)
    cache.extend(2, 16)
    cache.hold_back(2)
    assert not len(cache.take_changes().blocks)
    cache.tell(2)
    told = cache.take_changes().blocks
    assert {(g, i): b for _, g, i, b in told.tolist()} == {(g, i): b for g, i, b in cache.places(2)}
    assert cache.places(2, 8) == [place for place in cache.places(2) if place[1] >= 2]


def test_closing_undoes_what_the_next_plan_was_to_do() -> None:
    cache = manager(FULL, STATE)
    cache.open(0, [], 0)
    cache.extend(0, 16)
    cache.close(0)
    changes = cache.take_changes()
    assert not len(changes.blocks) and not changes.zeroed and not changes.copies and cache.num_held == 0
    cache.check_integrity()


def freed_in(changes) -> dict[int, list[int]]:
    assert all(blocks.dtype == np.int32 for _, blocks in changes.freed)
    return {group: blocks.tolist() for group, blocks in changes.freed}


def test_the_next_plan_tells_which_blocks_are_void() -> None:
    cache = manager(FULL, WINDOW, STATE, announce_freed=True)
    digests = chain(40)
    cache.open(0, digests, 0)
    cache.extend(0, 42)
    cache.publish(0, digests, 0, 40)
    assert not cache.take_changes().freed
    tables = [table[0].tolist() for table in cache.tables]
    cache.close(0)
    assert freed_in(cache.take_changes()) == {0: [tables[0][10]], 1: [tables[1][10]], 2: [tables[2][0]]}
    cache.close(0)
    assert not cache.take_changes().freed
    cache.withdraw(digests[3:])
    assert freed_in(cache.take_changes()) == {n: sorted(tables[n][6:10]) for n in (0, 1)}
    silent = manager(FULL)
    silent.open(0, [], 0)
    silent.extend(0, 42)
    silent.close(0)
    assert silent.take_changes().freed == ()


def test_what_a_window_has_left_behind_is_void() -> None:
    cache = manager(FULL, WINDOW, announce_freed=True)
    cache.open(0, [], 0)
    cache.extend(0, 40)
    behind = cache.tables[1][0, :5].tolist()
    cache.slide(np.array([0]), np.array([32]))
    assert freed_in(cache.take_changes()) == {1: sorted(behind)}


def test_a_block_may_be_void_and_used_anew_by_the_same_plan() -> None:
    cache = manager(FULL, budget=64 * 26, announce_freed=True)
    cache.open(0, [], 0)
    cache.extend(0, 90)
    cache.take_changes()
    before = set(cache.tables[0][0, :23].tolist())
    cache.close(0)
    cache.open(1, [], 0)
    assert cache.extend(1, 90)
    changes = cache.take_changes()
    assert set(freed_in(changes)[0]) == before and before & set(changes.blocks[:, 3].tolist())
    assert not cache.extend(2, 90) and not cache.take_changes().freed, "what was never handed out is not void"


def test_a_checkpoint_that_the_next_plan_copies_is_void_only_for_the_one_after_it() -> None:
    cache = manager(FULL, STATE, announce_freed=True)
    digests = chain(64)
    cache.open(0, digests, 0)
    cache.extend(0, 64)
    cache.publish(0, digests, 0, 64)
    kept = cache.checkpoint(cache.recurrent[0], digests, 32)
    cache.take_changes()
    cache.open(1, digests, 32)
    cache.pool.clear_index()
    first = cache.take_changes()
    assert first.copies[0].source == kept and not first.freed
    assert freed_in(cache.take_changes()) == {1: [kept]}
    cache.check_integrity()


def test_blocks_that_somebody_else_fills_are_announced_only_where_they_stay_unfilled() -> None:
    cache = manager(FULL, WINDOW, budget=64 * 60, announce_freed=True)
    for row in (0, 1):
        cache.open(row, [], 0)
        cache.extend(row, 32)
    cache.take_changes()
    cache.close(0)
    cache.close(1)
    cache.open(2, [], 0)
    cache.extend(2, 32)
    places = cache.filled_elsewhere(2, 0)
    assert len(places) == 16
    filled = {(group, block) for group, _, block in places}
    changes = cache.take_changes()
    told = {(group, block) for group, blocks in freed_in(changes).items() for block in blocks}
    assert told and not told & filled and not len(changes.blocks)
    cache.unfilled(2, 24)
    assert freed_in(cache.take_changes()) == {n: sorted(cache.tables[n][2, 6:8].tolist()) for n in (0, 1)}


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c.tables[0].__setitem__((0, 1), 0),
        lambda c: c.tables[0].__setitem__((1, 0), 3),
        lambda c: c.horizon.__setitem__(0, 99),
        lambda c: c.firsts.__setitem__((0, 0), 9),
        lambda c: c.pool.groups[0].refs.__setitem__(int(c.tables[0][0, 0]), 2),
    ],
)
def test_integrity_catches_planted_damage(damage) -> None:
    cache = manager(FULL, WINDOW)
    cache.open(0, [], 0)
    cache.extend(0, 16)
    cache.check_integrity()
    damage(cache)
    with pytest.raises(AssertionError):
        cache.check_integrity()


def test_kinds_without_rules_and_sizes_that_do_not_divide_are_refused() -> None:
    cache = manager(FULL)
    with pytest.raises(ValueError, match="latent"):
        make_group(
            cache.pool,
            0,
            plan_cache([GroupNeed(**{**FULL, "kind": "latent"})], 1 << 14, shared=True, max_tokens=9, chunk=9).groups[
                0
            ],
            8,
        )
    with pytest.raises(ValueError, match="divide"):
        manager({**FULL, "block_tokens": 12})
