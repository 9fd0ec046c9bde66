"""Blocks are in one state at a time, slabs move between groups, the oldest is evicted first."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from drivetrain.cache.pool import Pool
from drivetrain.cache.sizing import CachePlan, GroupPlan


def pool(num_slabs: int = 5, per_slab: tuple[int, ...] = (4, 1), shared: bool = True, recording: bool = False) -> Pool:
    groups = tuple(
        GroupPlan(
            kind="full",
            block_tokens=4,
            block_bytes=64,
            stride=64,
            blocks_per_slab=n,
            num_blocks=num_slabs * n,
            layer_offsets=(0,),
        )
        for n in per_slab
    )
    return Pool(
        CachePlan(shared=shared, num_slabs=num_slabs if shared else 0, slab_bytes=256, groups=groups, padding=0),
        recording=recording,
    )


def test_the_null_block_is_never_handed_out() -> None:
    one = pool()
    taken = one.take_many(0, 99)
    assert sorted(taken) == list(range(4, 20)) and one.take(0) == 0 and one.take(1) == 0
    apart = pool(shared=False)
    assert sorted(apart.take_many(0, 99)) == list(range(1, 20)) and apart.take_many(1, 99) == [1, 2, 3, 4]


def test_a_slab_goes_back_when_its_last_block_is_free() -> None:
    one = pool()
    taken = one.take_many(0, 16)
    assert one.available(1) == 0
    one.drop_many(0, taken[:4])
    assert one.available(1) == 1 and one.take(1)
    one.check_integrity()


def test_free_blocks_come_before_cached_ones_and_the_oldest_is_evicted_first() -> None:
    one = pool(per_slab=(4,), num_slabs=3)
    first, second, third = one.take_many(0, 3)
    for block, name in ((first, b"a"), (second, b"b")):
        one.name(0, block, name)
    one.drop(0, second)
    one.drop(0, first)
    one.drop(0, third)
    assert one.available(0) == 8
    assert not {first, second} & set(one.take_many(0, 6))
    assert one.take(0) == second and b"b" not in one.groups[0].index
    one.hold(0, first)
    assert one.take(0) == 0
    one.check_integrity()


def test_what_another_group_let_go_of_longer_ago_is_evicted_before_ones_own() -> None:
    one = pool(num_slabs=3, per_slab=(2, 2))
    theirs, mine = one.take_many(0, 2), one.take_many(1, 2)
    for number, blocks in ((0, theirs), (1, mine)):
        for block in blocks:
            one.name(number, block, b"%d-%d" % (number, block))
    one.drop_many(0, theirs)
    one.drop_many(1, mine)
    assert len(one.take_many(1, 2)) == 2
    assert not one.groups[0].index and len(one.groups[1].index) == 2
    one.check_integrity()


def test_a_name_belongs_to_the_first_block_that_took_it() -> None:
    one = pool()
    first, second = one.take_many(0, 2)
    assert one.name(0, first, b"n") and not one.name(0, second, b"n") and not one.name(0, first, b"m")
    one.drop_many(0, [first, second])
    assert list(one.groups[0].cached) == [first]
    one.unname(0, first)
    one.unname(0, first)
    assert one.available(0) == 16 and len(one.free_slabs) == 4
    one.check_integrity()


def test_nothing_is_recorded_unless_asked_for() -> None:
    one = pool()
    one.drop_many(0, one.take_many(0, 3))
    assert one.freed is None and one.take_freed() == []
    one.overwritten(0, [5])


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_let_go_without_a_name_is_void_and_what_is_cached_is_not(shared: bool) -> None:
    one = pool(shared=shared, recording=True)
    plain, named, twice = one.take_many(0, 3)
    one.name(0, named, b"n")
    one.hold(0, twice)
    one.drop_many(0, [plain, named, twice])
    assert one.take_freed() == [[plain], []]
    assert one.take_freed() == [[], []], "each is told once"
    one.drop(0, twice)
    assert one.take_many(0, 1), "taken anew, and void all the same: the next plan tells before it writes"
    one.hold(0, named)
    one.drop(0, named)
    assert one.take_freed() == [[twice], []]


def test_blocks_that_lose_their_name_are_void_once_nobody_holds_them() -> None:
    one = pool(recording=True)
    held, cached, other = one.take_many(0, 3)
    for block, name in ((held, b"h"), (cached, b"c"), (other, b"o")):
        one.name(0, block, name)
    one.drop_many(0, [cached, other])
    one.unname(0, held)
    one.unname(0, cached)
    assert one.take_freed() == [[cached], []]
    one.clear_index()
    one.drop(0, held)
    assert one.take_freed() == [[other, held], []]


def test_evicted_blocks_are_void_for_the_group_that_had_them() -> None:
    one = pool(num_slabs=3, per_slab=(2, 1), recording=True)
    mine = one.take_many(0, 4)
    for block in mine:
        one.name(0, block, b"%d" % block)
    one.drop_many(0, mine)
    assert one.take_freed() == [[], []]
    (first,) = one.take_many(1, 1)
    assert one.take_freed() == [[2 * first, 2 * first + 1], []], "a slab goes to the other group, with all that it had"
    (last,) = one.take_many(0, 1)
    assert one.take_freed() == [[last], []] and last in mine


def test_what_is_filled_at_once_is_not_announced_nor_what_shares_its_bytes() -> None:
    one = pool(num_slabs=3, per_slab=(4, 2), recording=True)
    one.drop_many(0, one.take_many(0, 8))
    assert sorted(one.take_freed()[0]) == list(range(4, 12))
    one.drop_many(0, one.take_many(0, 8))
    filled, other = one.take_many(1, 2)  # one slab: four blocks of group 0 lay where these two lie
    one.overwritten(1, [filled])
    beside = [block for block in range(4, 12) if block // 2 != filled]
    assert [sorted(part) for part in one.take_freed()] == [beside, []]
    one.drop(1, other)
    (again,) = one.take_many(1, 1)
    one.overwritten(1, [again])
    assert again == other and one.take_freed() == [[], []]
    apart = pool(shared=False, recording=True)
    for group in (0, 1):
        apart.drop_many(group, apart.take_many(group, 2))
    apart.overwritten(0, [1])
    assert apart.take_freed() == [[2], [1, 2]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p.groups[0].refs.__setitem__(9, 3),
        lambda p: p.groups[0].open.pop(next(iter(p.groups[0].open))),
        lambda p: p.groups[0].index.clear(),
        lambda p: p.free_slabs.pop(),
        lambda p: p.idle.clear(),
        lambda p: p.groups[0].cached.clear(),
        lambda p: p.owner.__setitem__(4, 1),
    ],
)
def test_integrity_catches_planted_damage(damage) -> None:
    one = pool()
    blocks = one.take_many(0, 6)
    one.name(0, blocks[4], b"x")
    one.drop_many(0, blocks[4:])
    one.check_integrity()
    damage(one)
    with pytest.raises(AssertionError):
        one.check_integrity()


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from("tdhnuc"), st.integers(0, 2), st.integers(0, 9)), max_size=120),
    shared=st.booleans(),
)
def test_random_operations_keep_the_books(steps: list[tuple[str, int, int]], shared: bool) -> None:
    one = pool(num_slabs=6, per_slab=(4, 1, 3), shared=shared, recording=True)
    held: list[list[int]] = [[], [], []]
    used: list[set[int]] = [set(), set(), set()]  # held once, and not announced since
    for kind, group, number in steps:
        mine = held[group]
        got: list[int] = []
        if kind == "t":
            available = one.available(group)
            got = one.take_many(group, number)
            assert len(got) == min(number, available) and not set(got) & set(mine)
            mine += got
        elif kind == "d" and mine:
            one.drop(group, mine.pop(number % len(mine)))
        elif kind == "h" and one.groups[group].index:
            block = sorted(one.groups[group].index.values())[number % len(one.groups[group].index)]
            one.hold(group, block)
            mine.append(block)
        elif kind == "n" and mine:
            one.name(group, mine[number % len(mine)], b"%d" % number)
        elif kind == "u" and mine:
            one.unname(group, mine[number % len(mine)])
        elif kind == "c" and number == 0:
            one.clear_index()
        one.check_integrity()
        for n, freed in enumerate(one.take_freed()):
            kept = {*one.groups[n].cached, *held[n]} - set(got if n == group else ())
            assert 0 not in freed and not kept & set(freed), "announced, and still of use"
            used[n] -= set(freed)
        assert not used[group] & set(got), "taken anew, and not announced"
        used[group] |= set(got)
    for group, mine in enumerate(held):
        one.drop_many(group, mine)
    one.clear_index()
    one.check_integrity()
    assert all(blocks.num_held == 0 for blocks in one.groups)
    assert not shared or len(one.free_slabs) == 5


@pytest.mark.parametrize("shared", [True, False])
def test_retired_blocks_are_not_handed_out_and_leave_the_index(shared: bool) -> None:
    one = pool(shared=shared, recording=True)
    blocks = one.take_many(0, 16)
    named, other, kept = max(blocks), max(blocks) - 1, min(blocks)
    for block, name in ((named, b"named"), (other, b"other"), (kept, b"kept")):
        one.name(0, block, name)
    one.drop_many(0, [block for block in blocks if block != other])
    limits = (12, 3)
    one.retire(limits)
    assert not one.retired(), "somebody holds one"
    assert set(one.groups[0].index) == {b"kept"}, "nobody finds them, held or not"
    one.check_integrity()
    one.hold(0, other)
    one.drop(0, other)
    one.name(0, other, b"again")
    assert not one.retired() and b"again" not in one.groups[0].index
    one.name(0, other, b"at last")
    one.drop(0, other)
    assert one.retired() and set(one.groups[0].index) == {b"kept"}
    assert all(block < 12 for block in one.take_freed()[0]), "what is void there is nobody's business"
    one.check_integrity()
    first = 4 if shared else 1
    assert one.available(0) == 12 - first
    assert sorted(one.take_many(0, 99)) == list(range(first, 12)) and one.take(0) == 0
    assert one.take_many(1, 9) == ([] if shared else [1, 2])
    one.check_integrity()


def test_retired_slabs_go_to_no_group_and_an_idle_one_is_emptied() -> None:
    one = pool(num_slabs=4, per_slab=(4, 2))
    slabs = [one.take_many(0, 4), one.take_many(1, 2), one.take_many(0, 4)]
    for block in slabs[2]:
        one.name(0, block, b"%d" % block)
    one.drop_many(0, slabs[2])
    one.retire((12, 6))
    assert one.retired() and not one.groups[0].index and not one.idle
    one.drop_many(0, slabs[0])
    one.drop_many(1, slabs[1])
    one.check_integrity()
    assert len(one.take_many(1, 99)) == 4 and one.take(0) == 0
    one.retire((99, 99))
    assert [group.limit for group in one.groups] == [12, 6], "what went does not come back"
