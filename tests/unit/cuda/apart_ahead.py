"""Compilation ahead of warm-up: the backend's own kernels, asked for by dummy steps on the host, none of which runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from drivetrain.models.build import build, load
from drivetrain.models.families import read_spec
from drivetrain.models.naming import expected_tensors, path_naming
from drivetrain.models.weights.checkpoint import DummyCheckpoint
from drivetrain.ops import Ops
from drivetrain.runner.batch import step_limits
from drivetrain.runner.dummies import dummy_plan
from drivetrain.runner.rows import NON_GREEDY
from drivetrain.runner.runner import Runner
from drivetrain.runner.sizes import RunnerConfig
from drivetrain.runner.warmup import Ahead, Variant, compile_ahead, run_dummy
from drivetrain_api.v1 import Capabilities, ComposedBackend, GraphBudget, generic_profiler, torch_runtime, torch_storage
from drivetrain_cuda.ops import Providers
from drivetrain_triton.launch import COLLECTING, KernelCompiler
from drivetrain_triton.target import Target

BLOCKS = 8
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
}
CARD = Target(kind="cuda", arch=90, multiprocessors=132, shared_bytes=232448, overlaps=True)


@pytest.fixture
def asked(monkeypatch):
    """(name, signature, constants) of each kernel that Triton is asked to compile; nothing is compiled."""
    found = []
    card = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )

    def note(self, key, signature, device, constexprs, options, attrs, warmup):
        assert warmup and COLLECTING.get() is not None
        found.append((self.__name__, key))

    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: product(a, b).to(out_dtype))  # a card's alone
    monkeypatch.setattr(driver, "_active", card)
    monkeypatch.setattr(JITFunction, "_do_compile", note)
    return found


def runner_of() -> Runner:
    spec = read_spec(SIZES, "bfloat16")
    runtime = torch_runtime("cpu")
    providers = Providers(target=CARD)
    backend = ComposedBackend(
        capabilities=Capabilities(model_dtypes=("bfloat16",), cache_dtypes=("bfloat16",)),
        device=runtime,
        storage=torch_storage(runtime, (16,), "int32"),
        memory=generic_profiler(runtime),
        graphs=SimpleNamespace(budget=GraphBudget(), capture=None),
        provide=providers.provide,
        fuse=providers.fuse,
        compiler=KernelCompiler(threads=1),
    )
    ops = Ops(backend, block_tokens=16)
    decoder = build(spec, ops)
    naming = path_naming(spec)
    load(decoder, DummyCheckpoint(expected_tensors(spec, naming), "bfloat16"), runtime, naming=naming)
    caches = [None] * len(decoder.cache_specs)
    for group in decoder.groups:
        for layer in group.layers:
            caches[layer] = backend.storage.allocate(group.layout, BLOCKS)
    config = RunnerConfig(max_num_seqs=12, max_num_batched_tokens=512, max_model_len=2048)
    return Runner(backend, decoder, caches, config, ops)


def test_every_kernel_is_asked_for_and_no_row_is_touched(asked) -> None:
    runner = runner_of()
    tables = [runner.tables.computed.clone(), runner.tables.last_tokens.clone()]
    whole = runner.decoder.layers
    ahead = compile_ahead(runner, step_limits(runner.backend.shapes, 1, 16))
    assert ahead.seconds > 0 and ahead.report is not None and ahead.steps > len(runner.graphs.shapes()) > 12
    assert runner.graphs.count == 0 and runner.decoder.layers is whole and runner.in_flight == 0
    names = {name for name, _ in asked}
    assert names >= {"_prepare", "_lookup", "_norm", "_angles", "rotate_kernel", "decode_kernel", "prefill_kernel"}
    assert names >= {"_scan", "_choose", "_scale", "_limits", "_keep"}
    assert len(asked) == len({(name, str(key)) for name, key in asked}), "one is asked for once"
    assert torch.equal(tables[0], runner.tables.computed) and torch.equal(tables[1], runner.tables.last_tokens)


def test_steps_of_other_sizes_need_nothing_more(asked) -> None:
    runner = runner_of()
    compile_ahead(runner, step_limits(runner.backend.shapes, 1, 16))
    known = {(name, str(key)) for name, key in asked}
    asked.clear()
    counts = [(1, 1, 1, 37), (1, 5, 200), (1,) * 7, (300, 3), (1, 1, 1, 1, 16), (7,), (1, 511)]
    with runner.backend.compiler.compiling():
        for number, one in enumerate(counts):
            given = np.array(one, np.int32)
            bounds = np.maximum(given, (1, 700, 2048)[number % 3])
            plan = dummy_plan(runner, given, bounds, sum(count == 1 for count in one))
            run_dummy(runner, plan, Variant(flags=NON_GREEDY if number % 2 else 0))
    assert asked, "steps have asked"
    more = {(name, str(key)) for name, key in asked} - known
    assert not more, f"would be compiled while serving: {more}"


def test_without_a_compiler_nothing_runs(asked) -> None:
    runner = runner_of()
    runner.backend = replace(runner.backend, compiler=None)
    assert compile_ahead(runner, step_limits(runner.backend.shapes, 1, 16)) == Ahead()
    assert not asked
