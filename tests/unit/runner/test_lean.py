"""Memory of graphs and of lean layers: as the plan counts them, against buckets and against tensors that live."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from drivetrain.models.build import build, load
from drivetrain.models.naming import expected_tensors, path_naming
from drivetrain.models.source import resolve
from drivetrain.models.spec import ModelSpec
from drivetrain.models.weights.checkpoint import DummyCheckpoint
from drivetrain.ops import Ops
from drivetrain.ops.reference import REFERENCE
from drivetrain.runner.activations import StepSizes, layer_bytes, lean_bytes, sampling_bytes
from drivetrain.runner.memory import MemoryRequest, plan_memory
from drivetrain_api.v1 import (
    AttentionSpec,
    AttentionTraits,
    Fused,
    GraphBudget,
    LinearSpec,
    Provided,
    RopeSpec,
    ShapePolicy,
)
from tests.checkpoints import tiny_checkpoint
from tests.unit.models.driving import BLOCK, Driver, reference_backend, small_spec
from tests.unit.models.test_fused import attending
from tests.unit.runner.test_memory import request_of

TOKENS = 64
EACH = 1000  # bytes that a graph of the vendor below takes


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return resolve(str(tiny_checkpoint("gemma3", tmp_path_factory.mktemp("model") / "gemma3"))).config


def with_graphs(request: MemoryRequest, *, budget: int = 0, each: int = EACH, **more) -> MemoryRequest:
    """A vendor whose graphs take so many bytes each, and one more for each token of the largest."""
    asked = request.backend

    def estimate(num_graphs: int, largest_tokens: int) -> dict[str, int]:
        return {"bytes": each * num_graphs + (largest_tokens if each else 0)}

    memory = SimpleNamespace(graph_estimate=estimate)
    graphs = SimpleNamespace(budget=GraphBudget(max_graphs=budget))
    return replace(request, backend=replace(asked, graphs=graphs, memory=memory, **more))


def let_capture(request: MemoryRequest, monkeypatch, graph: str) -> None:
    """Give the request's attention what capture needs."""
    for group in request.decoder.groups:
        kind = type(group.attention)
        traits = AttentionTraits(graph=graph)
        monkeypatch.setattr(kind, "plan_for_capture", lambda self, batch: None, raising=False)
        monkeypatch.setattr(kind, "traits", traits, raising=False)


@pytest.mark.parametrize(
    ("budget", "shapes", "graph", "graphs", "rows", "tokens"),
    [
        (0, ShapePolicy(), "one_token", 2 * 6, 6, 6),
        (3, ShapePolicy(), "one_token", 2, 6, 6),
        (1, ShapePolicy(), "any", 1, 6, 6),
        (0, ShapePolicy(), "any", 2 * (6 + 2), 8, 32),  # of 48 tokens a step, of small ones seven rows and the padding
        (0, ShapePolicy(tokens=(4, 8, 48), rows=(4, 8), blocks_per_row=(2, 4, 16), pad_token=0), "any", 2 * 2, 8, 8),
        (0, ShapePolicy(), "never", 0, 0, 0),
    ],
)
def test_graphs_share_the_largest_ones_activations(
    config, monkeypatch, budget, shapes, graph, graphs, rows, tokens
) -> None:
    request = with_graphs(request_of(config), budget=budget, shapes=shapes)
    let_capture(request, monkeypatch, graph)
    spec = request.decoder.spec
    sizes = replace(StepSizes.of(request.decoder, request.ops, request.runner), tokens=tokens, logits=rows)
    shared = layer_bytes(spec, sizes) + sampling_bytes(spec, sizes) if graphs else 0
    assert plan_memory(request).graphs == graphs * EACH + tokens + shared
    assert shared > 0 or not graphs


def test_more_rows_at_once_cost_more(config, monkeypatch) -> None:
    request = with_graphs(request_of(config))
    let_capture(request, monkeypatch, "one_token")
    more = replace(request, runner=replace(request.runner, max_num_seqs=8))
    few, many = plan_memory(request), plan_memory(more)
    assert many.graphs - few.graphs > 2 * 2 * EACH


def test_no_graphs_and_graphs_that_take_nothing_cost_nothing(config) -> None:
    request = request_of(config)
    assert plan_memory(request).graphs == 0
    assert plan_memory(with_graphs(request, each=0)).graphs == 0


class Meter:
    """Bytes of tensors that live when an op returns, beside those that lived before."""

    def __init__(self) -> None:
        self.before: set[int] = set()
        self.peak = 0
        self.on = False

    @staticmethod
    def living() -> dict[int, int]:
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}

    def look(self) -> None:
        if self.on:
            self.peak = max(self.peak, sum(n for at, n in self.living().items() if at not in self.before))

    def watched(self, run):
        def op(*given):
            made = run(*given)
            self.look()
            return made

        return op

    def provide(self, spec):
        made = REFERENCE[spec.op].make(spec)
        if isinstance(spec, AttentionSpec):
            made.forward = self.watched(made.forward)
        elif isinstance(spec, LinearSpec):
            made.apply = self.watched(made.apply)
        else:
            made = self.watched(made)
        return Provided(implementation=made, label="native")

    def fuse(self, specs):
        if [type(spec) for spec in specs] != [RopeSpec, AttentionSpec]:
            return None
        made = self.watched(attending(specs, Counter(), watched=self.watched))
        return Fused(count=2, provided=Provided(implementation=made, label="native"))

    def watch_layer(self, layer) -> None:
        """Count what comes in with the carry too."""
        inner = layer.forward

        def forward(carry, step):
            coming = {t.untyped_storage().data_ptr() for t in carry.values()}
            self.before = set(self.living()) - coming
            self.on = True
            try:
                return inner(carry, step)
            finally:
                self.on = False

        layer.forward = forward


MIXER = {"intermediate_size": 16, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
WIDE = {"intermediate_size": 400}
NORMED = {**MIXER, "architectures": ["Qwen3ForCausalLM"]}
OLMO, STARCODER = {"architectures": ["Olmo2ForCausalLM"]}, {"architectures": ["Starcoder2ForCausalLM"]}
SCALED = {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0.5, "embedding_multiplier": 2.0}
OTHERS = {
    "norms of all heads at once": {**MIXER, **OLMO},
    "norms after branches": {**WIDE, **OLMO},
    "layer norms": {**MIXER, **STARCODER},
    "no gate": {**WIDE, **STARCODER},
    "scaled branches": {**MIXER, **SCALED},
    "scaled branches, feed-forward": {**WIDE, **SCALED},
}


def metered(changes: dict) -> tuple[int, ModelSpec]:
    """A prompt through a tiny model in bfloat16; the peak of its second layer in bytes a token, and the spec."""
    meter, spec = Meter(), replace(small_spec(**changes), dtype="bfloat16")
    backend = replace(reference_backend(), provide=meter.provide, fuse=meter.fuse)
    decoder = build(spec, Ops(backend, block_tokens=BLOCK))
    weights = DummyCheckpoint(expected_tensors(spec, path_naming(spec)), "bfloat16")
    load(decoder, weights, backend.device, naming=path_naming(spec))
    meter.watch_layer(decoder.layers[1])
    Driver(decoder).step({0: list(range(TOKENS))})
    assert meter.peak % TOKENS == 0
    return meter.peak // TOKENS, spec


def by_hand(spec: ModelSpec, changes: dict) -> int:
    """Carry, normed input and new stream; beside them, in elements of two bytes, what the layer's fullest op has."""
    mixer, inner, hidden = spec.layers[1].mixer, spec.layers[1].ffn.intermediate, spec.hidden
    q, k = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    fullest = {
        "run": (q + 2 * k) + (q + k) + q,  # q, k, v came in; rotated heads in one piece; the result
        "rotation": (q + 2 * k) + 2 * (q + k),  # by itself: q, k, v, normed heads, rotated heads
        "down": 3 * inner + hidden,  # gate and up, the activated half, and the product
    }
    op = "down" if changes is WIDE else "rotation" if changes is NORMED else "run"
    return hidden * (2 * 2 + 2 * 4) + 2 * fullest[op]


@pytest.mark.parametrize("changes", [MIXER, WIDE, NORMED], ids=["mixer", "feed-forward", "normed heads"])
def test_what_lives_in_a_layer_is_what_a_hand_counts(changes) -> None:
    peak, spec = metered(changes)
    assert peak == by_hand(spec, changes)


@pytest.mark.parametrize("changes", [MIXER, WIDE, NORMED], ids=["mixer", "feed-forward", "normed heads"])
def test_lean_bytes_bound_what_lives(changes) -> None:
    peak, spec = metered(changes)
    counted = lean_bytes(spec.layers[1], spec.hidden, 2)
    assert peak <= counted <= 1.2 * peak
    sizes = StepSizes(tokens=10, logits=1, workspace=300, reference_draw=False, lean=True)
    assert layer_bytes(spec, sizes) == 10 * counted + 300
    assert layer_bytes(spec, replace(sizes, lean=False)) > 10 * counted + 300, "references hold more"


@pytest.mark.parametrize("name", OTHERS)
def test_lean_bytes_bound_what_lives_in_layers_of_another_build(name: str) -> None:
    """Norms of all heads go back into q and k, scaled branches are scaled in place: neither adds to the peak."""
    peak, spec = metered(OTHERS[name])
    counted = lean_bytes(spec.layers[1], spec.hidden, 2)
    assert peak <= counted <= 1.2 * peak
    mixer, inner, hidden = spec.layers[1].mixer, spec.layers[1].ffn.intermediate, spec.hidden
    q, k = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    wide = 2 * inner if name == "no gate" else 3 * inner + hidden
    fullest = wide if inner == WIDE["intermediate_size"] else (q + 2 * k) + (q + k) + q
    assert peak == hidden * (2 * 2 + 2 * 4) + 2 * fullest


def test_gate_and_up_count_only_for_the_tokens_whose_products_lie_apart() -> None:
    _, spec = metered(WIDE)
    with_them, without = (lean_bytes(spec.layers[1], spec.hidden, 2, apart=apart) for apart in (True, False))
    inner = spec.layers[1].ffn.intermediate
    assert with_them - without == 2 * 2 * inner, "the wide product"
    sizes = StepSizes(tokens=100, logits=1, workspace=300, reference_draw=False, lean=True)
    assert layer_bytes(spec, replace(sizes, apart=lambda most: 0)) == 100 * without + 300
    assert layer_bytes(spec, replace(sizes, apart=lambda most: most - 1)) == 99 * with_them + 300
    few = replace(sizes, apart=lambda most: min(most, 1))
    assert layer_bytes(spec, few) == 100 * without + 300
    assert layer_bytes(spec, replace(few, tokens=1)) == with_them + 300
