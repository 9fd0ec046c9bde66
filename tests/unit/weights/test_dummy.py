"""Random weights: a function of each tensor's name alone."""

from __future__ import annotations

import torch

from drivetrain.models.weights.checkpoint import DRAWN, DummyCheckpoint

SHAPES = {"model.embed_tokens.weight": (293, 60), "model.norm.weight": (601,), "q_proj.bias": (600,)}
KNOWN = [-0.007031604181975126, -0.0012839166447520256, 0.019289832562208176]


def test_values_depend_on_the_name_alone():
    one = DummyCheckpoint(SHAPES, "float32")
    other = DummyCheckpoint(dict(reversed(SHAPES.items())), "bfloat16")
    for name in SHAPES:
        assert torch.equal(one.read(name, torch.float32), one.read(name, torch.float32))
        assert torch.equal(one.read(name, torch.bfloat16), other.read(name, torch.bfloat16))
    twin = DummyCheckpoint({"other.weight": (293, 60)}, "float32").read("other.weight", torch.float32)
    assert not torch.equal(twin, one.read("model.embed_tokens.weight", torch.float32))


def test_a_known_value():
    """Pinned: two machines must agree."""
    value = DummyCheckpoint(SHAPES, "float32").read("model.embed_tokens.weight", torch.float32)[0, :3]
    assert torch.equal(value, torch.tensor(KNOWN))


def test_scale():
    checkpoint = DummyCheckpoint(SHAPES, "float32")
    matrix = checkpoint.read("model.embed_tokens.weight", torch.float32)
    assert abs(float(matrix.std()) - 0.02) < 5e-4 and abs(float(matrix.mean())) < 1e-3
    assert abs(float(checkpoint.read("model.norm.weight", torch.float32).mean()) - 1) < 0.01
    assert abs(float(checkpoint.read("q_proj.bias", torch.float32).mean())) < 0.01


def test_sizes():
    infos = DummyCheckpoint(SHAPES, "bfloat16").infos()
    assert infos["model.norm.weight"].nbytes == 1202
    assert DummyCheckpoint(SHAPES, "float32").infos()["model.norm.weight"].nbytes == 2404


def test_a_large_tensor_repeats_its_first_values_and_its_rows_differ():
    value = DummyCheckpoint({"big.weight": (3, 700_001)}, "float32").read("big.weight", torch.float32)
    flat = value.flatten()
    assert torch.equal(flat[DRAWN:], flat[: len(flat) - DRAWN])
    assert not torch.equal(value[0], value[1]) and not torch.equal(value[1], value[2])
