"""Digests follow docs/prefix-hash.md: the vectors, and a second implementation written from that page."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from drivetrain.cache.prefix import Chain, PrefixRoot
from drivetrain.sched.state import array_digest

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "prefix_vectors.json").read_text())


def blake(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def root_by_the_page(v: dict) -> bytes:
    fields = [b"drivetrain-prefix-1", struct.pack("<I", v["unit"])]
    fields += [v[name].encode() for name in ("model", "layout", "adapter", "cache_salt")]
    fields.append(b"" if v["fanout"] is None else struct.pack("<q", v["fanout"]))
    fields += [bytes.fromhex(one) for one in v["media"]]
    return blake(b"".join(struct.pack("<Q", len(field)) + field for field in fields))


def digests_by_the_page(root: bytes, tokens: list[int], unit: int) -> list[bytes]:
    out = []
    for i in range(len(tokens) // unit):
        root = blake(root + struct.pack(f"<{unit}i", *tokens[i * unit : (i + 1) * unit]))
        out.append(root)
    return out


def tokens_of(v: dict) -> list[int]:
    t = v["tokens"]
    return [t["first"] + i * t["step"] for i in range(t["count"])]


@pytest.mark.parametrize("vector", VECTORS)
def test_vectors(vector: dict) -> None:
    root = PrefixRoot(
        model=vector["model"],
        layout=vector["layout"],
        adapter=vector["adapter"],
        cache_salt=vector["cache_salt"],
        fanout=vector["fanout"],
        media=tuple(bytes.fromhex(one) for one in vector["media"]),
    ).digest(vector["unit"])
    assert root.hex() == vector["root"] and root == root_by_the_page(vector)
    tokens = tokens_of(vector)
    chain = Chain(root, vector["unit"])
    chain.extend(np.array(tokens, np.int32), len(tokens))
    assert [one.hex() for one in chain.digests] == vector["digests"]
    assert chain.digests == digests_by_the_page(root, tokens, vector["unit"])
    assert chain.num_tokens == len(vector["digests"]) * vector["unit"]


@settings(max_examples=40, deadline=None)
@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=80), unit=st.sampled_from([1, 3, 8]), cuts=st.data())
def test_a_chain_grown_in_steps_is_the_same(tokens: list[int], unit: int, cuts: st.DataObject) -> None:
    root = b"r" * 32
    chain, array, at = Chain(root, unit), np.array(tokens, np.int32), 0
    while at < len(tokens):
        if cuts.draw(st.booleans()):
            at = cuts.draw(st.integers(at + 1, len(tokens)))
            chain.extend(array, at)
        else:
            start = chain.num_tokens
            at = max(at, min(start + unit, len(tokens)))
            if start + unit <= len(tokens):
                chain.push(array[start : start + unit].tobytes())
                at = max(at, chain.num_tokens)
    chain.extend(array, len(tokens))
    assert chain.digests == digests_by_the_page(root, tokens, unit)


def test_every_field_of_the_root_matters() -> None:
    fields = {"model": "m", "layout": "l", "adapter": "", "cache_salt": "", "fanout": None, "media": ()}
    others = {"model": "n", "layout": "k", "adapter": "a", "cache_salt": "s", "fanout": 0, "media": (b"x" * 32,)}
    roots = {PrefixRoot(**fields).digest(32), PrefixRoot(**fields).digest(16)}
    roots |= {PrefixRoot(**{**fields, name: value}).digest(32) for name, value in others.items()}
    assert len(roots) == 2 + len(others)
    shifted = PrefixRoot(**{**fields, "model": "", "layout": "ml"}).digest(32)
    assert shifted != PrefixRoot(**{**fields, "model": "m", "layout": "l"}).digest(32), "fields run into each other"


def test_arrays_are_told_apart_by_type_shape_and_bytes() -> None:
    base = np.arange(6, dtype=np.float32)
    hashes = {array_digest(base), array_digest(base.reshape(2, 3)), array_digest(base.astype(np.int32))}
    assert len(hashes) == 3
    assert array_digest(base.reshape(2, 3).T) == array_digest(np.ascontiguousarray(base.reshape(2, 3).T))
    assert array_digest(base.reshape(2, 3)) == blake(b"<f4(2, 3)" + base.tobytes())
