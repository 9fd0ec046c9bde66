"""Runs of ops in one implementation: where it calls the references one after another, not a bit changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import pytest
import torch

from drivetrain.models.build import build, load
from drivetrain.models.decoder import Decoder
from drivetrain.models.families import read_spec
from drivetrain.models.source import resolve
from drivetrain.ops import Ops
from drivetrain.ops.reference import REFERENCE
from drivetrain.ops.reference.dense import ReferenceLinear
from drivetrain_api.v1 import (
    AddRmsNormSpec,
    AttentionSpec,
    DrawSpec,
    Fused,
    GatedActivationSpec,
    LinearSpec,
    Provided,
    RmsNormSpec,
    RopeSpec,
)
from tests.checkpoints import random_ids, tiny_checkpoint
from tests.unit.models.driving import BLOCK, Driver, reference_backend

GATED, ENTRY, NORMED = (
    (LinearSpec, GatedActivationSpec),
    (RopeSpec, AttentionSpec),
    (RmsNormSpec, RopeSpec, AttentionSpec),
)
FIRST, FIRST_GATED = (AddRmsNormSpec, LinearSpec), (AddRmsNormSpec, LinearSpec, GatedActivationSpec)
GREEDY = (LinearSpec, DrawSpec)
LENGTH, STEPS = 29, 12
FAMILIES = {
    "llama": ENTRY,
    "llama-biases": ENTRY,
    "qwen2": ENTRY,
    "qwen3": NORMED,
    "phi3-partial": ENTRY,
    "granite": ENTRY,
    "gemma2": ENTRY,
    "gemma3": NORMED,
}


class GatedLinear:
    """A product and the gated activation of it."""

    def __init__(self, linear: LinearSpec, gated: GatedActivationSpec, calls: Counter) -> None:
        self._linear, self._activate, self._calls = ReferenceLinear(linear), REFERENCE[gated.op].make(gated), calls
        self.packed_bytes, self.pack = self._linear.packed_bytes, self._linear.pack

    def apply(self, x, packed):
        self._calls[GATED] += 1
        return self._activate(self._linear.apply(x, packed))


class NormedLinear:
    """Addition, norm, product and, at times, the gated activation of it."""

    def __init__(self, specs, calls: Counter, *, rounded: bool = False) -> None:
        norm, linear, *rest = specs
        alone = RmsNormSpec(**{each.name: getattr(norm, each.name) for each in fields(norm)})
        self._join, self._alone = REFERENCE[norm.op].make(norm), REFERENCE[alone.op].make(alone)
        self._linear, self._after = ReferenceLinear(linear), [REFERENCE[each.op].make(each) for each in rest]
        self._calls, self._kinds, self._rounded = calls, tuple(type(each) for each in specs), rounded
        self.packed_bytes, self.pack = self._linear.packed_bytes, self._linear.pack

    def apply(self, x, residual, weight, packed):
        self._calls[self._kinds] += 1
        self._calls["without a residual"] += residual is None
        normed, total = (self._alone(x, weight), x.float()) if residual is None else self._join(x, residual, weight)
        product = self._linear.apply(normed, packed)
        for after in self._after:
            product = after(product)
        return product, total * 1.001 if self._rounded else total


def attending(specs, calls: Counter, *, rotated: bool = True, watched=lambda run: run):
    """Norm, rotation, the write to the cache and attention, one reference after another."""
    *norms, rope, attention = specs
    norm = REFERENCE[norms[0].op].make(norms[0]) if norms else None
    rotate, planner = REFERENCE[rope.op].make(rope), REFERENCE[attention.op].make(attention)
    heads, kv_heads = attention.num_heads, attention.num_kv_heads

    forward = watched(planner.forward)

    def attend(x, weight, cos, sin, cache, plan, sinks):
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
        assert (sinks is not None) is attention.sinks
        return forward(q, cache, plan, sinks)

    return attend


class Claiming:
    """A backend that claims some of the runs, and which of them it was asked to do how often."""

    def __init__(self, claimed=(GATED, ENTRY, NORMED), **options) -> None:
        self.calls: Counter = Counter()
        self.claimed, self.options = claimed, options

    def fuse(self, specs):
        kinds = tuple(type(spec) for spec in specs)
        assert kinds in (GATED, ENTRY, NORMED, FIRST, FIRST_GATED, GREEDY), "no other run is asked for"
        if kinds not in self.claimed:
            return None
        if kinds in (FIRST, FIRST_GATED):
            made = NormedLinear(specs, self.calls, **self.options)
            return Fused(count=len(specs), provided=Provided(implementation=made, label="native"))
        made = GatedLinear(*specs, self.calls) if kinds == GATED else attending(specs, self.calls, **self.options)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_inside_the_products_behind_them_change_no_bit(family, dtype: str) -> None:
    _, directory = family
    plain, unclaimed = decoder_of(directory, None, dtype)
    claiming = Claiming((FIRST, FIRST_GATED))
    fused, ops = decoder_of(directory, claiming, dtype)
    wanted, got = generate(plain), generate(fused)
    assert torch.equal(got[0], wanted[0]) and got[1] == wanted[1]
    layers, steps = len(plain.layers), 2 + STEPS
    assert claiming.calls == {FIRST: layers * steps, FIRST_GATED: layers * steps, "without a residual": steps}
    counts = [{c.op: 0 for c in each.report} for each in (unclaimed, ops)]
    for count, each in zip(counts, (unclaimed, ops), strict=True):
        for choice in each.report:
            count[choice.op] += choice.count
    norm, linear = AddRmsNormSpec.op, LinearSpec.op
    assert counts[1][f"{norm} + {linear}"] == counts[1][f"{norm} + {linear} + {GatedActivationSpec.op}"] == layers
    # What is left: the norm before the head; the products of attention and of the feed-forward, and the head.
    assert counts[0][norm] == 2 * layers + 1 and counts[1][norm] == 1
    assert counts[0][linear] == 4 * layers + 1 and counts[1][linear] == 2 * layers + 1
    assert [h.sources for h in plain.holders] == [h.sources for h in fused.holders]


OTHERS = {  # family -> the runs that it asks for, a layer; the rest stays single
    "olmo2": {GATED: 3, ENTRY: 3},  # no norm before a product
    "starcoder2": {ENTRY: 3},  # layer norms, and no gate
    "granite_swa": {FIRST_GATED: 5, FIRST: 5, ENTRY: 3},  # two layers without a rope
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OTHERS)
def test_layers_of_another_build_ask_for_the_runs_that_fit_and_keep_their_bits(name, dtype: str, tmp_path) -> None:
    directory = tiny_checkpoint(name, tmp_path / "model")
    plain, _ = decoder_of(directory, None, dtype)
    claiming = Claiming((GATED, ENTRY, NORMED, FIRST, FIRST_GATED))
    fused, _ = decoder_of(directory, claiming, dtype)
    wanted, got = generate(plain), generate(fused)
    assert torch.equal(got[0], wanted[0]) and len(set(got[1])) > 2
    claiming.calls.pop("without a residual", None)
    assert claiming.calls == {run: count * (2 + STEPS) for run, count in OTHERS[name].items()}


def test_all_runs_together(family) -> None:
    _, directory = family
    plain, _ = decoder_of(directory, None)
    claiming = Claiming((GATED, ENTRY, NORMED, FIRST, FIRST_GATED))
    fused, _ = decoder_of(directory, claiming)
    assert torch.equal(generate(fused)[0], generate(plain)[0])
    assert GATED not in claiming.calls and claiming.calls[FIRST_GATED]


def test_a_run_that_gives_another_stream_shows(family) -> None:
    """Planted fault: the sum that is carried on is not what was normed."""
    _, directory = family
    plain, _ = decoder_of(directory, None)
    wrong, _ = decoder_of(directory, Claiming((FIRST, FIRST_GATED), rounded=True))
    assert not torch.equal(generate(wrong)[0], generate(plain)[0])
