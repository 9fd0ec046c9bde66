"""Caches: what is written comes back; what is nobody's is garbage."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drivetrain_api.v1 import CachePart, CacheSpec, Shrinkable
from drivetrain_mirage.device import DeviceOptions, MirageDevice
from drivetrain_mirage.rules import RuleError
from drivetrain_mirage.runtime import MirageRuntime
from drivetrain_mirage.storage import MirageStorage
from drivetrain_mirage.streams import Pace

KV = CacheSpec(
    kind="full",
    parts=(CachePart(name="k", shape=(3, 5), dtype="float32"), CachePart(name="v", shape=(3, 2), dtype="bfloat16")),
)
STATE = CacheSpec(
    kind="recurrent",
    parts=(CachePart(name="s", shape=(4,), dtype="float32"), CachePart(name="n", shape=(), dtype="int32")),
)


def ids(runtime, *values):
    return runtime.from_host(np.array(values, np.int32))


def values(runtime, spec, count, seed=0):
    torch.manual_seed(seed)
    dtypes = [getattr(torch, p.dtype) for p in spec.parts]
    made = [(torch.randn(count, *p.shape) * 4).to(d) for p, d in zip(spec.parts, dtypes, strict=True)]
    return made, tuple(runtime.from_host(m) for m in made)


def read(runtime, cache, *slots):
    return [v for v in runtime.to_host([t.to(torch.float32) for t in cache.read(ids(runtime, *slots))]).get()]


@pytest.fixture
def make(runtime):
    storage = MirageStorage(runtime.owner)
    return lambda spec, blocks=4: storage.allocate(storage.layout(spec, 128), blocks)


@pytest.mark.parametrize("spec", [KV, STATE])
def test_round_trip(runtime, make, spec):
    cache = make(spec)
    slots = [130, 257, 131, 500, 129] if spec is KV else [1, 3, 2]
    host, device = values(runtime, spec, len(slots))
    cache.write(ids(runtime, *slots), device)
    for got, want in zip(read(runtime, cache, *reversed(slots)), host, strict=True):
        assert np.array_equal(got, want.float().numpy()[::-1])


def test_bytes_are_exact(runtime, make):
    before = runtime.memory().allocated
    cache = make(KV, 7)
    assert cache.layout.bytes_per_block == 128 * 3 * (5 * 4 + 2 * 2)
    assert cache.nbytes == 7 * cache.layout.bytes_per_block == runtime.memory().allocated - before
    state = make(STATE, 3)
    assert state.layout.bytes_per_block == 128 and state.nbytes == 384
    assert runtime.memory().allocated - before == cache.nbytes + state.nbytes
    del cache, state
    assert runtime.memory().allocated == before


def test_a_new_arena_and_unwritten_slots_are_garbage(runtime, make):
    cache = make(KV)
    assert all(np.isnan(part).all() for part in read(runtime, cache, 128, 511))
    cache.write(ids(runtime, 128), values(runtime, KV, 1)[1])
    k, v = read(runtime, cache, 128, 129)
    assert np.isfinite(k[0]).all() and np.isnan(k[1]).all() and np.isnan(v[1]).all()


def test_the_null_block_keeps_garbage(runtime, make):
    cache = make(KV)
    cache.write(ids(runtime, 0, 0, 130), values(runtime, KV, 3)[1])
    k, _ = read(runtime, cache, 0, 1, 130)
    assert np.isnan(k[:2]).all() and np.isfinite(k[2]).all()


def test_freed_blocks_are_filled_with_garbage(runtime, make):
    cache = make(KV)
    cache.write(ids(runtime, 128, 256), values(runtime, KV, 2)[1])
    cache.freed(ids(runtime, 1))
    k, v = read(runtime, cache, 128, 256)
    assert np.isnan(k[0]).all() and np.isnan(v[0]).all() and np.isfinite(k[1]).all()


def test_a_block_that_begins_anew_loses_what_it_held(runtime, make):
    """Its next owner can't see what the one before left behind, even where nobody announced the release."""
    cache = make(KV)
    cache.write(ids(runtime, *range(128, 133)), values(runtime, KV, 5)[1])
    cache.write(ids(runtime, 133), values(runtime, KV, 1)[1])
    assert np.isfinite(read(runtime, cache, *range(128, 134))[0]).all(), "going on is not beginning anew"
    cache.write(ids(runtime, 129, 128), values(runtime, KV, 2)[1])
    k, _ = read(runtime, cache, *range(128, 134))
    assert np.isfinite(k[:2]).all() and np.isnan(k[2:]).all()


def test_poison_can_be_switched_off():
    runtime = MirageRuntime(MirageDevice(DeviceOptions(poison_freed=False, pace=Pace(share=0.0))))
    storage = MirageStorage(runtime.owner)
    cache = storage.allocate(storage.layout(KV, 128), 3)
    cache.write(ids(runtime, 128, 129), values(runtime, KV, 2)[1])
    cache.freed(ids(runtime, 1))
    cache.write(ids(runtime, 128), values(runtime, KV, 1)[1])
    assert np.isfinite(read(runtime, cache, 128, 129)[0]).all()
    runtime.owner.close()


@pytest.mark.parametrize("spec", [KV, STATE])
def test_blocks_are_copied_zeroed_exported_and_imported(runtime, make, spec):
    cache, other = make(spec), make(spec)
    first = 128 if spec is KV else 1
    cache.write(ids(runtime, first), values(runtime, spec, 1)[1])
    want = read(runtime, cache, first)
    cache.copy_blocks(ids(runtime, 1), ids(runtime, 3))
    data = cache.export_blocks(ids(runtime, 3))
    assert tuple(data.shape) == (1, cache.layout.bytes_per_block) and data.dtype == torch.uint8
    other.import_blocks(ids(runtime, 2), data)
    for got, expected in zip(read(runtime, other, 2 * first), want, strict=True):
        assert np.array_equal(got, expected)
    cache.zero_blocks(ids(runtime, 1))
    assert all((part == 0).all() for part in read(runtime, cache, first))


def test_a_slot_outside_the_arena_fails_its_own_copy_only(runtime, make):
    cache = make(KV, 2)
    lost = runtime.to_host(list(cache.read(ids(runtime, 5000)))[:1])
    fine = runtime.to_host(list(cache.read(ids(runtime, 1)))[:1])
    with pytest.raises(IndexError):
        lost.get()
    fine.get()


def test_wrong_shapes_are_refused_at_once(runtime, make):
    cache = make(KV)
    with pytest.raises(ValueError, match="part k"):
        cache.write(ids(runtime, 1, 2), values(runtime, KV, 3)[1])
    with pytest.raises(ValueError, match="block"):
        cache.import_blocks(ids(runtime, 1), runtime.zeros((1, 5), torch.uint8))


def test_blocks_at_the_end_are_given_back_and_touched_no_more(runtime, make):
    cache = make(KV, 7)
    assert isinstance(cache, Shrinkable) and cache.piece_bytes == cache.layout.bytes_per_block
    host, device = values(runtime, KV, 2)
    slots = [128 + 3, 4 * 128 + 1]
    cache.write(ids(runtime, *slots), device)
    runtime.synchronize()
    size, before = cache.layout.bytes_per_block, runtime.memory().allocated
    assert cache.shrink(5 * size - 3) == 2 * size and cache.shrink(6 * size) == 0
    assert cache.nbytes == 5 * size and before - runtime.memory().allocated == 2 * size
    for got, want in zip(read(runtime, cache, *slots), host, strict=True):
        assert np.array_equal(got, want.float().numpy())
    assert all(torch.isnan(arena[5:].float()).all() for arena in cache.arenas)
    gone = ids(runtime, 5)
    touches = (
        lambda: cache.read(ids(runtime, 5 * 128)),
        lambda: cache.write(ids(runtime, 5 * 128 + 1, 128), device),
        lambda: cache.copy_blocks(gone, ids(runtime, 1)),
        lambda: cache.copy_blocks(ids(runtime, 1), gone),
        lambda: cache.zero_blocks(gone),
        lambda: cache.freed(gone),
        lambda: cache.export_blocks(gone),
    )
    for touch in touches:
        touch()
        with pytest.raises(RuleError, match=r"'given-back'.*block 5 was touched, 5 are left"):
            runtime.synchronize()
    cache.zero_blocks(ids(runtime, 4))
    runtime.synchronize()


def test_a_step_that_is_still_queued_does_not_find_what_was_given_back(runtime, make):
    cache = make(KV, 7)
    _, device = values(runtime, KV, 1)
    cache.write(ids(runtime, 6 * 128), device)
    cache.shrink(0)
    with pytest.raises(RuleError, match="'given-back'"):
        runtime.synchronize()
