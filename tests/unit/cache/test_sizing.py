"""The cache's bytes are cut exactly, aligned, and with the padding that is reported."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from drivetrain.cache.sizing import GroupNeed, cut, holds_longest, plan_cache, smallest_budget
from drivetrain.errors import ConfigError

NEEDS = st.lists(
    st.builds(
        GroupNeed,
        kind=st.sampled_from(["full", "window", "recurrent"]),
        layer_bytes=st.integers(1, 40).map(lambda n: n * 512),
        num_layers=st.integers(1, 30),
        block_tokens=st.sampled_from([1, 16, 32]),
        alignment=st.sampled_from([64, 256]),
        window=st.sampled_from([None, 512]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(needs=NEEDS, megabytes=st.integers(64, 4096), shared=st.booleans())
def test_blocks_fit_aligned_and_disjoint(needs: list[GroupNeed], megabytes: int, shared: bool) -> None:
    budget = megabytes << 20
    try:
        plan = plan_cache(needs, budget, shared=shared, max_tokens=2048, chunk=512)
    except ConfigError:
        return
    assert plan.total_bytes <= budget
    for need, group in zip(needs, plan.groups, strict=True):
        assert group.stride >= need.block_bytes == group.block_bytes
        assert group.layer_offsets == tuple(i * need.layer_bytes for i in range(need.num_layers))
        if shared:
            assert group.stride % need.alignment == 0 and plan.slab_bytes % need.alignment == 0
            assert group.blocks_per_slab * group.stride == plan.slab_bytes
            assert group.num_blocks == plan.num_slabs * group.blocks_per_slab
            assert plan.padding >= 1 - need.block_bytes / group.stride - 1e-9
        else:
            assert group.num_blocks >= 2 and group.stride == need.block_bytes
    if shared:
        assert budget - plan.total_bytes < plan.slab_bytes
    assert plan.padding_too_large == (plan.padding > 0.03)


def test_states_beside_tokens_waste_nothing_and_force_no_huge_blocks() -> None:
    needs = [
        GroupNeed(kind="full", layer_bytes=16 << 10, num_layers=4, block_tokens=16),
        GroupNeed(kind="recurrent", layer_bytes=1 << 20, num_layers=4, block_tokens=1),
    ]
    plan = plan_cache(needs, 1 << 30, shared=True, max_tokens=4096, chunk=512)
    full, state = plan.groups
    assert (plan.padding, full.stride, state.stride) == (0.0, 64 << 10, 4 << 20)


def test_awkward_sizes_report_their_padding() -> None:
    needs = [
        GroupNeed(kind="full", layer_bytes=1000, num_layers=1, block_tokens=16),
        GroupNeed(kind="recurrent", layer_bytes=7777, num_layers=1, block_tokens=1),
    ]
    plan = plan_cache(needs, 1 << 24, shared=True, max_tokens=4096, chunk=512)
    worst = max(1 - g.block_bytes / g.stride for g in plan.groups)
    assert plan.padding == pytest.approx(worst) and not plan.padding_too_large


def test_a_cache_too_small_for_one_sequence_is_refused_with_figures() -> None:
    needs = [GroupNeed(kind="full", layer_bytes=1 << 20, num_layers=1, block_tokens=16)]
    with pytest.raises(ConfigError, match=r"has 10\.0 MiB, one sequence of 4096 tokens needs 257\.0 MiB"):
        plan_cache(needs, 10 << 20, shared=True, max_tokens=4096, chunk=512)
    enough = smallest_budget(needs, plan_cache(needs, 1 << 30, shared=True, max_tokens=4096, chunk=512), 4096, 512)
    assert plan_cache(needs, 257 << 20, shared=True, max_tokens=4096, chunk=512).num_slabs == 257
    assert enough >= 257 << 20


def test_a_window_needs_no_more_than_it_reads() -> None:
    need = GroupNeed(kind="window", layer_bytes=64, num_layers=1, block_tokens=16, window=512)
    assert need.blocks_for(100_000, 256) == -(-(512 + 256 + 32) // 16)
    assert need.blocks_for(100, 256) == 7


def test_a_model_without_a_cache_needs_nothing() -> None:
    plan = plan_cache([], 1 << 20, shared=True, max_tokens=10, chunk=10)
    assert (plan.total_bytes, plan.groups) == (0, ())


@pytest.mark.parametrize("shared", [True, False])
def test_a_cut_cache_holds_the_longest_sequence_just_as_a_smaller_plan_would(shared: bool) -> None:
    needs = [
        GroupNeed(kind="full", layer_bytes=256, num_layers=2, block_tokens=4),
        GroupNeed(kind="window", layer_bytes=256, num_layers=4, block_tokens=4, window=10),
        GroupNeed(kind="recurrent", layer_bytes=2048, num_layers=2, block_tokens=4),
    ]
    plan = plan_cache(needs, 400 * 1024, shared=shared, max_tokens=96, chunk=32)
    assert cut(plan, plan.total_bytes) == tuple(group.num_blocks for group in plan.groups)
    least = smallest_budget(needs, plan, 96, 32)
    fits = [n for n in range(0, plan.total_bytes, 512) if holds_longest(plan, cut(plan, n), 96, 32)]
    assert fits == list(range(fits[0], plan.total_bytes, 512)), "more holds it where less does"
    assert least <= fits[0] < least * (1.05 if shared else 2)  # a few states are cut coarsely
    half = cut(plan, plan.total_bytes // 2)
    assert all(0 < blocks <= group.num_blocks // 2 for blocks, group in zip(half, plan.groups, strict=True))
