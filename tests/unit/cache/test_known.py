"""What prompts have in common is hashed and looked up once, and never found where it is no more."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain.cache import prefix
from drivetrain.cache.manager import CacheManager
from drivetrain.cache.prefix import PIECE, Chain, Known
from drivetrain.cache.sizing import GroupNeed, plan_cache

UNIT = 4
FULL = {"kind": "full", "layer_bytes": 64, "num_layers": 2}
ROOT = b"r" * 32


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count, dtype=np.int32)


def digests(of: np.ndarray, known: Known | None = None, root: bytes = ROOT) -> list[bytes]:
    chain = Chain(root, UNIT, known)
    chain.extend(of, len(of))
    return chain.digests


@pytest.mark.parametrize("count", [UNIT * PIECE - 1, UNIT * PIECE, UNIT * (2 * PIECE + 3)])
def test_digests_are_the_same_whatever_is_known(count: int) -> None:
    known, one = Known(), tokens(count)
    other = np.concatenate((one[: UNIT * PIECE], tokens(count, 1)))
    for prompt in (one, one, other, one[: count // 2]):
        assert digests(prompt, known) == digests(prompt)
    assert digests(one, known, b"s" * 32) == digests(one, root=b"s" * 32), "another root, other digests"


def test_a_chain_goes_on_from_anywhere() -> None:
    known, one = Known(), tokens(UNIT * 3 * PIECE)
    chain = Chain(ROOT, UNIT, known)
    for upto in (UNIT, UNIT * PIECE, UNIT * (PIECE + 5), len(one)):
        chain.extend(one, upto)
    assert chain.digests == digests(one)
    assert digests(one, known) == digests(one)


def test_a_known_piece_is_not_hashed_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    known, prompts = Known(most=2), [tokens(UNIT * PIECE, seed) for seed in range(3)]
    hashed: list[int] = []
    hashing = Chain._hash
    monkeypatch.setattr(Chain, "_hash", lambda self, data: (hashed.append(len(data)), hashing(self, data)))
    for number in (0, 1, 0, 2, 0, 1):
        digests(prompts[number], known)
    assert len(hashed) == 4 and len(known) == 2, "0, 1, 2, and 1 again: it had not been asked for longest"


def manager(block_tokens: int, budget: int = 1 << 17) -> CacheManager:
    needs = [GroupNeed(**FULL, block_tokens=block_tokens)]
    plan = plan_cache(needs, budget, shared=True, max_tokens=512, chunk=512)
    return CacheManager(plan, max_rows=2, max_tokens=512, unit=UNIT)


def write(cache: CacheManager, row: int, of: list[bytes], length: int) -> list[int]:
    assert cache.open(row, of, 0) is not None and cache.extend(row, length)
    cache.publish(row, of, 0, length)
    blocks = cache.tables[0][row, : cache.ends[0][row]].tolist()
    cache.close(row)
    cache.take_changes()
    return blocks


@pytest.mark.parametrize("block_tokens", [2, 4, 8, 64])
def test_remembered_blocks_are_those_of_their_names(block_tokens: int) -> None:
    cache, one = manager(block_tokens), digests(tokens(256))
    blocks = write(cache, 0, one, 256)
    for _ in range(2):
        assert cache.longest(one, 256) == 256
        assert cache.open(1, one, 256) == [blocks]
        cache.close(1)
    cache.check_integrity()


@pytest.mark.parametrize("lost", [0, 10, 100])
def test_what_lost_its_name_is_not_found(lost: int) -> None:
    cache, one = manager(2), digests(tokens(256))
    blocks = write(cache, 0, one, 256)
    assert cache.longest(one, 256) == 256
    cache.pool.unname(0, blocks[lost])
    assert cache.longest(one, 256) == lost * 2 // UNIT * UNIT
    again = write(cache, 0, one, 256)  # most names are taken: only what is new gets one
    assert cache.longest(one, 256) == 256 and cache.open(1, one, 256) != [again]
    assert cache.tables[0][1, lost] == cache.pool.groups[0].index[cache.paged[0].name_of(one, lost)]
    cache.close(1)
    cache.check_integrity()


def test_evicted_blocks_with_other_names_are_not_found() -> None:
    cache = manager(2, budget=256 * 160)
    first = digests(tokens(256))
    write(cache, 0, first, 256)
    assert cache.longest(first, 256) == 256
    for seed in range(1, 4):
        write(cache, 0, digests(tokens(256, seed)), 256)
    assert cache.longest(first, 256) < 256
    cache.check_integrity()


def test_few_pieces_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.cache.groups.MOST_PIECES", 3)
    cache = manager(2)
    one = digests(tokens(512))
    write(cache, 0, one, 512)
    assert len(cache.paged[0]._runs._runs) == 3 and cache.longest(one, 512) == 512
    assert prefix.MOST_PIECES > 3
