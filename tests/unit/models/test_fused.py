"""Runs of ops in one implementation: where it calls the references one after another, not a bit changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from drivetrain.models.build import build, load
from drivetrain.models.decoder import Decoder
from drivetrain.models.families import read_spec
from drivetrain.models.source import resolve
from drivetrain.ops import Ops
from drivetrain.ops.reference import REFERENCE
from drivetrain.ops.reference.dense import ReferenceLinear
from drivetrain_api.v1 import AttentionSpec, Fused, GatedActivationSpec, LinearSpec, Provided, RmsNormSpec, RopeSpec
from tests.checkpoints import random_ids, tiny_checkpoint
from tests.unit.models.driving import BLOCK, Driver, reference_backend

GATED, ENTRY, NORMED = (
    (LinearSpec, GatedActivationSpec),
    (RopeSpec, AttentionSpec),
    (RmsNormSpec, RopeSpec, AttentionSpec),
)
LENGTH, STEPS = 29, 12
FAMILIES = {"llama": ENTRY, "llama-biases": ENTRY, "qwen3": NORMED, "gemma3": NORMED}


class GatedLinear:
    """A product and the gated activation of it."""

    def __init__(self, linear: LinearSpec, gated: GatedActivationSpec, calls: Counter) -> None:
        self._linear, self._activate, self._calls = ReferenceLinear(linear), REFERENCE[gated.op].make(gated), calls
        self.packed_bytes, self.pack = self._linear.packed_bytes, self._linear.pack

    def apply(self, x, packed):
        self._calls[GATED] += 1
        return self._activate(self._linear.apply(x, packed))


def entering(specs, calls: Counter, *, rotated: bool = True):
    """Norm, rotation and the write to the cache, one reference after another."""
    *norms, rope, attention = specs
    norm = REFERENCE[norms[0].op].make(norms[0]) if norms else None
    rotate, planner = REFERENCE[rope.op].make(rope), REFERENCE[attention.op].make(attention)
    heads, kv_heads = attention.num_heads, attention.num_kv_heads

    def enter(x, weight, cos, sin, cache, plan):
        calls[tuple(type(spec) for spec in specs)] += 1
        assert x.shape[1:] == (heads + 2 * kv_heads, attention.head_dim)
        qk, v = x.split((heads + kv_heads, kv_heads), 1)
        assert (weight is None) == (norm is None)
        if norm is not None:
            assert weight.shape == qk.shape[1:]
            qk = norm(qk, weight)
        if rotated:
            qk = rotate(qk, cos, sin)
        q, k = qk.split((heads, kv_heads), 1)
        planner.write(cache, k, v, plan)
        return q

    return enter


class Claiming:
    """A backend that claims both runs, and which of them it was asked to do how often."""

    def __init__(self, **options) -> None:
        self.calls: Counter = Counter()
        self.options = options

    def fuse(self, specs):
        kinds = tuple(type(spec) for spec in specs)
        assert kinds in (GATED, ENTRY, NORMED), "no other run is asked for"
        made = GatedLinear(*specs, self.calls) if kinds == GATED else entering(specs, self.calls, **self.options)
        return Fused(count=len(specs), provided=Provided(implementation=made, label="native"))


def decoder_of(directory, claiming: Claiming | None, dtype: str = "float32") -> tuple[Decoder, Ops]:
    backend = reference_backend()
    if claiming is not None:
        backend = replace(backend, fuse=claiming.fuse)
    source = resolve(str(directory))
    ops = Ops(backend, block_tokens=BLOCK)
    decoder = build(read_spec(source.config, dtype), ops)
    checkpoint = source.open_checkpoint()
    load(decoder, checkpoint, backend.device)
    checkpoint.close()
    return decoder, ops


def generate(decoder: Decoder) -> tuple[torch.Tensor, list[int]]:
    """A prompt in two pieces beside another one, then greedy decode of both. All logits, and the tokens."""
    prompts = {row: random_ids(LENGTH, vocabulary=decoder.spec.vocabulary)[row:] for row in (0, 1)}
    driver = Driver(decoder, rows=2)
    logits = driver.step({row: ids[:20] for row, ids in prompts.items()})
    last = driver.step({row: ids[20:] for row, ids in prompts.items()})
    tokens = []
    for _ in range(STEPS):
        logits += last
        drawn = [int(each[-1].argmax()) for each in last]
        tokens += drawn
        last = driver.step({row: [token] for row, token in enumerate(drawn)})
    return torch.cat([*logits, *last]), tokens


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, tmp_path_factory):
    return request.param, tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_runs_of_references_give_the_bits_of_single_ones(family, dtype: str) -> None:
    name, directory = family
    plain, _ = decoder_of(directory, None, dtype)
    claiming = Claiming()
    fused, ops = decoder_of(directory, claiming, dtype)
    wanted, got = generate(plain), generate(fused)
    assert torch.equal(got[0], wanted[0]) and got[1] == wanted[1]
    assert len(set(wanted[1])) > 2, "one token again and again would prove nothing"
    layers, steps = len(plain.layers), 2 + STEPS
    assert claiming.calls == {GATED: layers * steps, FAMILIES[name]: layers * steps}
    runs = {c.op: c.count for c in ops.report if " + " in c.op}
    entry = " + ".join(kind.op for kind in FAMILIES[name])
    assert runs[f"{LinearSpec.op} + {GatedActivationSpec.op}"] == layers and entry in runs


def test_what_is_claimed_is_not_bound_again(family) -> None:
    _, directory = family
    _, ops = decoder_of(directory, Claiming())
    bound = {choice.op for choice in ops.report if " + " not in choice.op}
    assert not bound & {GatedActivationSpec.op, RopeSpec.op}
    _, ops = decoder_of(directory, None)
    assert {GatedActivationSpec.op, RopeSpec.op} < {choice.op for choice in ops.report}


def test_a_run_that_leaves_out_a_part_shows(family) -> None:
    """Planted fault: the run stores keys that nobody rotated."""
    _, directory = family
    plain, _ = decoder_of(directory, None)
    wrong, _ = decoder_of(directory, Claiming(rotated=False))
    assert not torch.allclose(generate(wrong)[0][:LENGTH], generate(plain)[0][:LENGTH], atol=1e-3)
