"""The memory plan: exact where it says so, one formula for size and check, errors that name every term."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from drivetrain.errors import ConfigError
from drivetrain.models.build import build
from drivetrain.models.families import read_spec
from drivetrain.models.source import resolve
from drivetrain.ops import Ops
from drivetrain.runner import drawing, memory
from drivetrain.runner.activations import StepSizes, layer_bytes, live_elements, sampling_bytes
from drivetrain.runner.caches import allocate_caches
from drivetrain.runner.drawing import Drawer, rows_at_once
from drivetrain.runner.memory import DEVICE_SLACK, HOST_SLACK, MIB, MemoryRequest, compare, plan_memory
from drivetrain.runner.rows import RowTables
from drivetrain.runner.runner import Runner
from drivetrain.runner.sizes import RunnerConfig, staging_capacity, table_bytes, table_shape
from drivetrain_api.v1 import Baseline, SamplingInputs
from tests.checkpoints import tiny_checkpoint
from tests.unit.runner.devices import device, host

BASE = Baseline(context=100 * MIB, others=50 * MIB, total=1000 * MIB)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return resolve(str(tiny_checkpoint("gemma3", tmp_path_factory.mktemp("model") / "gemma3"))).config


def request_of(config, kind="cpu", **more) -> MemoryRequest:
    backend = device(kind)
    ops = Ops(backend, block_tokens=backend.storage.block_tokens[0])
    sizes = RunnerConfig(max_num_seqs=6, max_num_batched_tokens=48, max_model_len=200, depth=2)
    values = dict(
        backend=backend,
        decoder=build(read_spec(config, "float32"), ops),
        ops=ops,
        runner=sizes,
        baseline=BASE,
        weight_bytes=3 * MIB,
    )
    return MemoryRequest(**{**values, **more})


@pytest.mark.parametrize("kind", ["cpu", "mirage", "mirage-static"])
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_rows_staging_and_cache_are_what_is_allocated(config, kind: str, max_drafts: int) -> None:
    request = request_of(config, kind, cache_bytes=12 * MIB)
    request = replace(request, runner=replace(request.runner, max_drafts=max_drafts))
    plan = plan_memory(request)
    caches = allocate_caches(request.backend, request.decoder, plan.cache)
    runner = Runner(request.backend, request.decoder, caches, request.runner, request.ops)
    assert plan.rows == runner.tables.nbytes
    hosted = 2 if request.backend.capabilities.shared_host_memory else 1
    assert plan.staging == runner.ring.nbytes * hosted
    if not plan.cache.shared:
        assert plan.cache.total_bytes == sum(cache.nbytes for cache in caches)
    assert 0 <= 12 * MIB - plan.cache.total_bytes < MIB
    for group, sized in zip(request.decoder.groups, plan.cache.groups, strict=True):
        for layer in group.layers:
            assert caches[layer].num_blocks == sized.num_blocks


def test_the_cache_is_what_the_limit_leaves(config) -> None:
    plan = plan_memory(request_of(config, "mirage", utilization=0.5))
    assert plan.limit == BASE.context + 850 * MIB // 2
    block = max(group.block_bytes for group in plan.cache.groups)
    assert plan.limit - 2 * block <= plan.peak <= plan.limit
    held = plan.context + plan.weights + plan.rows + plan.staging + plan.graphs + plan.slack
    assert plan.peak == held + plan.cache.total_bytes + max(plan.layers, plan.sampling)
    assert {term.name: term.nbytes for term in plan.terms()}["peak"] == plan.peak


def test_a_host_is_not_filled_unless_asked_to(config) -> None:
    shared = device("cpu")
    capabilities = replace(shared.capabilities, shared_host_memory=True)
    request = replace(request_of(config), backend=replace(shared, capabilities=capabilities))
    modest, filled = plan_memory(request), plan_memory(replace(request, utilization=0.9))
    assert modest.cache.total_bytes < 64 * MIB < filled.cache.total_bytes
    assert modest.kept == modest.layers and plan_memory(request_of(config)).kept == 0


def test_what_does_not_fit_is_refused_with_every_term(config) -> None:
    with pytest.raises(ConfigError, match=r"a cache of 2000 MiB does not fit.*weights 3.*--cache-bytes"):
        plan_memory(request_of(config, cache_bytes=2000 * MIB))
    with pytest.raises(ConfigError, match="alone are larger than the limit"):
        plan_memory(request_of(config, weight_bytes=900 * MIB))
    with pytest.raises(ConfigError, match="loading takes more than the limit"):
        plan_memory(request_of(config, load_peak_bytes=900 * MIB))
    with pytest.raises(ConfigError, match="one sequence of 200 tokens needs"):
        plan_memory(request_of(config, cache_bytes=40_000))


def test_only_a_length_that_nobody_asked_for_is_shortened(config) -> None:
    request = request_of(config, cache_bytes=400_000)
    long = replace(request, runner=replace(request.runner, max_model_len=6400))
    with pytest.raises(ConfigError):
        plan_memory(long)
    plan = plan_memory(replace(long, may_shorten=True))
    assert 64 <= plan.max_model_len < 6400


def test_live_elements_are_counted_as_the_layer_holds_them(config) -> None:
    spec = read_spec(config, "float32")
    layer, hidden = spec.layers[0], spec.hidden
    q, k = layer.mixer.num_heads * layer.mixer.head_dim, layer.mixer.num_kv_heads * layer.mixer.head_dim
    mixer = 4 * hidden + (q + 2 * k) + 2 * (q + k) + q
    assert live_elements(layer, hidden) == max(mixer, 6 * hidden + 4 * layer.ffn.intermediate)
    sizes = StepSizes(tokens=10, logits=3, workspace=1000, reference_draw=False)
    largest = max(live_elements(each, hidden) for each in spec.layers)
    assert layer_bytes(spec, sizes) == 10 * largest * 4 + 1000
    half = read_spec(config, "bfloat16")
    assert layer_bytes(half, sizes) == 10 * largest * 6 + 1000


def test_sampling_counts_the_reference_draw_for_the_rows_it_does_at_once(config, monkeypatch) -> None:
    spec = read_spec(config, "float32")
    native = StepSizes(tokens=50, logits=40, workspace=0, reference_draw=False)
    cheap, dear = sampling_bytes(spec, native), sampling_bytes(spec, replace(native, reference_draw=True))
    assert dear - cheap == 39 * spec.vocabulary * drawing.DRAW_ELEMENT
    assert cheap >= 40 * spec.vocabulary * 4


def test_what_lies_beside_float32_logits_is_counted_once(config, monkeypatch) -> None:
    """Logits of two bytes are gone before draws hold anything: the larger of the two is counted, not both."""
    spec = read_spec(config, "bfloat16")
    vocabulary, hidden = spec.vocabulary, 3 * 40 * spec.hidden * 2
    greedy = StepSizes(tokens=50, logits=40, workspace=0, reference_draw=False)
    assert sampling_bytes(spec, greedy) == hidden + vocabulary * 40 * 6
    filters = replace(greedy, filters=True)
    assert sampling_bytes(spec, filters) == hidden + vocabulary * (40 * 4 + 40 * drawing.DRAW_ELEMENT)
    for rows, beside in ((30, 30 * 4), (15, 40 * 2)):
        monkeypatch.setattr("drivetrain.runner.activations.BESIDE_BYTES", rows * 4 * vocabulary)
        assert sampling_bytes(spec, filters) == hidden + vocabulary * (40 * 4 + beside)


def test_only_a_devices_plan_counts_filters_and_log_probabilities(config) -> None:
    apart = request_of(config)
    capabilities = replace(apart.backend.capabilities, shared_host_memory=True)
    shared = replace(apart, backend=replace(apart.backend, capabilities=capabilities))
    sizes = replace(StepSizes.of(apart.decoder, apart.ops, apart.runner), reference_draw=False)
    spec = apart.decoder.spec
    assert sampling_bytes(spec, sizes) < sampling_bytes(spec, replace(sizes, filters=True))
    seen = []
    memory.sampling_bytes, kept = lambda spec, sizes: (seen.append(sizes.filters), 0)[1], memory.sampling_bytes
    try:
        plan_memory(shared), plan_memory(apart)
    finally:
        memory.sampling_bytes = kept
    assert seen == [False, True]


def test_a_devices_slack_grows_with_what_holes_lie_between(config) -> None:
    apart = request_of(config, baseline=replace(BASE, total=4000 * MIB))
    many = replace(apart, runner=replace(apart.runner, max_num_batched_tokens=4800))
    for request in (apart, many):
        plan = plan_memory(request)
        assert plan.slack == DEVICE_SLACK + plan.layers // 6
    capabilities = replace(apart.backend.capabilities, shared_host_memory=True)
    shared = replace(many, backend=replace(apart.backend, capabilities=capabilities))
    assert plan_memory(many).slack > plan_memory(apart).slack and plan_memory(shared).slack == HOST_SLACK


def test_an_error_is_a_part_of_what_was_measured(config) -> None:
    plan = plan_memory(request_of(config, cache_bytes=12 * MIB))
    check = compare(plan, plan.peak * 2)
    assert check.error == -0.5 and check.planned == plan.peak


def test_tables_and_staging_sizes_without_a_device(config) -> None:
    request = request_of(config)
    shape = table_shape(request.backend, request.decoder, request.runner)
    assert table_bytes(shape) == RowTables(request.backend.device, shape).nbytes
    assert staging_capacity(shape, request.runner) > 48 * 3


def test_a_sequence_longer_than_every_table_bucket_is_refused(config) -> None:
    request = request_of(config, "mirage-static")
    with pytest.raises(ConfigError, match="max-model-len 100000 needs"):
        table_shape(request.backend, request.decoder, replace(request.runner, max_model_len=100_000))


def test_rows_at_once() -> None:
    assert rows_at_once(256, 262_144, 256 << 20, 4) == 256
    assert rows_at_once(300, 262_144, 256 << 20, 4) == 256
    assert rows_at_once(5, 262_144, 256 << 20, 4) == 5
    assert rows_at_once(5, 1 << 40, 256 << 20, 4) == 1


@pytest.mark.parametrize("greedy", [True, False])
def test_draws_in_pieces_are_those_of_one_piece(monkeypatch, greedy: bool) -> None:
    backend, count, vocabulary = host(), 11, 53
    rng = np.random.default_rng(1)
    hidden = torch.from_numpy(rng.normal(size=(count, 8)).astype(np.float32))
    head = torch.from_numpy(rng.normal(size=(8, vocabulary)).astype(np.float32))
    hidden[4] = float("nan")
    inputs = SamplingInputs(
        temperature=torch.full((count,), 0.0 if greedy else 0.7),
        top_k=torch.arange(count, dtype=torch.int32),
        top_p=torch.full((count,), 0.9),
        min_p=torch.full((count,), 0.01),
        seed=torch.arange(count),
        position=torch.arange(count, dtype=torch.int32),
        sample=torch.zeros(count, dtype=torch.int32),
        mask=torch.from_numpy(rng.integers(1 << 10, 1 << 30, (count, 2)).astype(np.int32)),
        all_greedy=greedy,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
    )
    sizes = []

    def logits(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ head

    def drawer() -> Drawer:
        ops = Ops(backend, block_tokens=16)
        return Drawer(ops, vocabulary=vocabulary, fixed_shapes=False, logits=logits)

    whole = drawer().run(hidden, inputs, 3)
    monkeypatch.setattr(drawing, "LOGIT_BYTES", 4 * vocabulary * 4)
    monkeypatch.setattr(drawing, "DRAW_BYTES", drawing.DRAW_ELEMENT * vocabulary * 3)
    pieces = drawer().run(hidden, inputs, 3)
    assert sizes == [11, 4, 4, 3]
    assert torch.equal(whole.tokens, pieces.tokens) and torch.equal(whole.witness.isfinite(), pieces.witness.isfinite())
    assert whole.witness.isfinite().tolist() == [i != 4 for i in range(11)]
    good = torch.tensor([i for i in range(count) if i != 4])
    for name, values in whole.logprobs.items():
        assert torch.allclose(values[good].to(torch.float64), pieces.logprobs[name][good].to(torch.float64), atol=1e-6)


@pytest.mark.parametrize(
    ("filters", "alternatives", "dear", "limit", "element"),
    [
        ({}, None, False, "", 0),
        ({"any_top_k": True}, None, False, "BESIDE_BYTES", 4),
        ({"any_min_p": True}, None, False, "BESIDE_BYTES", 4),
        ({"any_top_p": True}, 3, False, "BESIDE_BYTES", drawing.DRAW_ELEMENT),
        ({"all_greedy": True}, 0, True, "BESIDE_BYTES", drawing.DRAW_ELEMENT),
        ({"all_greedy": True}, None, True, "", 0),
        ({"any_top_p": True}, 3, True, "DRAW_BYTES", drawing.DRAW_ELEMENT),
    ],
)
def test_rows_are_drawn_as_many_at_once_as_the_plan_counts(
    monkeypatch, filters, alternatives, dear, limit, element
) -> None:
    vocabulary = 53
    drawer = Drawer(Ops(host(), block_tokens=16), vocabulary=vocabulary, fixed_shapes=False, logits=lambda rows: rows)
    drawer._dear_draw, drawer._dear_logprobs = dear, True
    each = torch.zeros(11)
    sizes = []
    draw = drawer._draw
    drawer._draw = lambda logits, *given: (sizes.append(len(logits)), draw(logits, *given))[1]
    facts = {"all_greedy": False, "any_top_k": False, "any_top_p": False, "any_min_p": False} | filters
    inputs = SamplingInputs(
        temperature=each,
        top_k=each.int(),
        top_p=each + 1,
        min_p=each,
        seed=each.long(),
        position=each.int(),
        sample=each.int(),
        mask=None,
        **facts,
    )
    if limit:
        monkeypatch.setattr(drawing, limit, 4 * element * vocabulary)
    drawer.run(torch.zeros(11, vocabulary), inputs, alternatives)
    assert sizes == ([4, 4, 3] if limit else [11])
