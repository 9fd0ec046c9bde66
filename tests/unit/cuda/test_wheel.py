"""The CUDA wheel without a card: its hooks, the driver's answers, what it claims, products that run anywhere."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from drivetrain_api.v1 import (
    AddRmsNormSpec,
    ConfigView,
    Decline,
    DeviceRecord,
    DrawSpec,
    GatedActivationSpec,
    LinearSpec,
    LogprobsSpec,
    PlanSummary,
    QuantSpec,
    RmsNormSpec,
    Unavailable,
    torch_runtime,
)
from drivetrain_cuda import driver
from drivetrain_cuda.plugin import plugin
from drivetrain_triton.target import Target

SM90 = Target(kind="cuda", arch=90, multiprocessors=132, shared_bytes=227 << 10, overlaps=True)


class FakeDriver:
    """libcuda's functions, with the cards that a test wants: (name, bytes, major, minor)."""

    def __init__(self, cards=(), fails=()):
        self.cards, self.fails = cards, dict(fails)

    def __getattr__(self, name):
        if name.startswith("_"):
            return lambda *given: 0
        return lambda *given: self.fails.get(name) or getattr(self, "_" + name)(*given)

    def _cuDeviceGetCount(self, count):
        count._obj.value = len(self.cards)
        return 0

    def _cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def _cuDeviceGetName(self, name, size, device):
        name.value = self.cards[device.value][0].encode()
        return 0

    def _cuDeviceTotalMem_v2(self, memory, device):
        memory._obj.value = self.cards[device.value][1]
        return 0

    def _cuDeviceGetAttribute(self, value, number, device):
        value._obj.value = self.cards[device.value][2 if number == driver.MAJOR else 3]
        return 0

    def _cuGetErrorString(self, code, text):
        text._obj.value = b"no CUDA-capable device is detected"
        return 0


def loading(monkeypatch, found):
    def load(name):
        if found is None:
            raise OSError(name)
        return found

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_without_a_driver_it_says_so(monkeypatch):
    loading(monkeypatch, None)
    answer = plugin.probe()
    assert isinstance(answer, Unavailable) and "libcuda" in answer.reason and "driver" in answer.fix


def test_a_driver_that_shows_no_card_is_told_apart(monkeypatch):
    loading(monkeypatch, FakeDriver(fails={"cuInit": driver.NO_DEVICE}))
    answer = plugin.probe()
    assert "no CUDA-capable device" in answer.reason and "CUDA_VISIBLE_DEVICES" in answer.fix


def test_cards_are_listed_as_the_driver_shows_them(monkeypatch):
    loading(monkeypatch, FakeDriver([("Big", 141 << 30, 9, 0), ("Old", 16 << 30, 7, 5), ("Small", 24 << 30, 8, 6)]))
    found = plugin.probe()
    assert [(r.index, r.name, r.memory_bytes, r.architecture) for r in found] == [
        (0, "Big", 141 << 30, "sm_90"),
        (2, "Small", 24 << 30, "sm_86"),
    ]
    assert all(isinstance(r, DeviceRecord) and r.uuid.startswith("GPU-0000") for r in found)


def test_cards_that_are_too_old_are_named(monkeypatch):
    loading(monkeypatch, FakeDriver([("Old", 16 << 30, 7, 5)]))
    answer = plugin.probe()
    assert isinstance(answer, Unavailable) and "Old (7.5)" in answer.reason


class Retaining(FakeDriver):
    """Notes whose context is kept."""

    def _cuDevicePrimaryCtxRetain(self, context, device):
        self.kept = device.value
        return 0


@pytest.mark.parametrize("index", [0, 2])
def test_the_context_of_the_device_asked_for_is_made_ahead(monkeypatch, index):
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    known = Retaining([("Big", 141 << 30, 9, 0)] * 3)
    loading(monkeypatch, known)
    driver.make_context(index)
    assert known.kept == index
    for broken in (None, Retaining(fails={"cuInit": 999}), Retaining(fails={"cuDeviceGet": 101})):
        loading(monkeypatch, broken)
        driver.make_context(index)  # torch will meet the reason
        assert broken is None or "kept" not in vars(broken)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_refused_with_the_way_out():
    said = plugin.create([0], ConfigView())
    assert "built without CUDA" in said.reason and said.fix == "install a CUDA build of torch that fits the driver"


def test_a_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr("drivetrain_cuda.plugin.find_spec", lambda name: None)
    assert plugin.create([0], ConfigView()).reason == "Triton is not installed"


def test_a_driver_too_old_for_a_call_is_named(monkeypatch):
    class Old(FakeDriver):
        def __getattr__(self, name):
            if name == "cuDeviceGetUuid":
                raise AttributeError("undefined symbol: cuDeviceGetUuid")
            return super().__getattr__(name)

    loading(monkeypatch, Old([("Big", 141 << 30, 9, 0)]))
    said = plugin.probe()
    assert "cuDeviceGetUuid" in said.reason and said.fix == "update NVIDIA's driver"


def providers():
    from drivetrain_cuda.ops import Providers

    return Providers(target=SM90)


def linear(**more):
    return LinearSpec(**{"dtype": "bfloat16", "in_features": 64, "out_features": 96, "role": "gate_up"} | more)


def test_products_are_provided_and_others_declined_with_a_reason():
    given = providers()
    assert given.provide(linear()).label.startswith("native")
    assert "int4" in given.provide(linear(quant=QuantSpec(scheme="int4", bits=4))).reason
    assert "float32 rows times bfloat16 weights" in given.provide(linear(activations="float32")).reason
    assert isinstance(given.provide(LogprobsSpec(dtype="float32", vocabulary=100)), Decline)
    norm = given.provide(AddRmsNormSpec(dtype="bfloat16", size=64, eps=1e-6))
    assert norm.label.startswith("shared") and norm.traits.graph == "any"


def test_the_gated_product_is_claimed_whole_or_not_at_all():
    given, gated = providers(), GatedActivationSpec(dtype="bfloat16", size=48, kind="silu")
    assert given.fuse((linear(), gated)).count == 2
    assert given.fuse((linear(quant=QuantSpec(scheme="int4", bits=4)), gated)) is None
    assert given.fuse((linear(), GatedActivationSpec(dtype="float32", size=48, kind="silu"))) is None
    assert given.fuse((linear(), linear())) is None


def test_a_norm_is_claimed_with_the_product_behind_it_while_rows_are_short(monkeypatch):
    from drivetrain_cuda import table

    given, gated = providers(), GatedActivationSpec(dtype="bfloat16", size=48, kind="silu")
    norm = AddRmsNormSpec(dtype="bfloat16", size=64, eps=1e-6)
    assert given.fuse((norm, linear())).count == 2 and given.fuse((norm, linear(), gated)).count == 3
    assert "one kernel" in given.fuse((norm, linear(bias=True))).provided.label
    for declined in (
        (norm,),
        (norm, gated),
        (norm, linear(), linear()),
        (norm, linear(role="lm_head")),
        (norm, linear(in_features=128)),
        (norm, linear(dtype="float32")),
        (norm, linear(activations="float32")),
        (norm, linear(quant=QuantSpec(scheme="int4", bits=4))),
        (AddRmsNormSpec(dtype="bfloat16", size=5120, eps=1e-6), linear(in_features=5120)),
    ):
        assert given.fuse(declined) is None, declined
    most = [table.most_normed_rows(*shape) for shape in ((4096, 1024), (4096, 4096), (3072, 3072), (64, 8192))]
    assert most == [2, 1, 1, 0]
    monkeypatch.setattr(table, "most_normed_rows", lambda *shape: 0)
    assert given.fuse((norm, linear())) is None


def test_the_head_is_claimed_with_a_greedy_draw_where_bulk_copies_bring_it():
    from drivetrain_cuda.ops import Providers

    head, draw = linear(role="lm_head", out_features=1000), DrawSpec(dtype="float32", vocabulary=1000)
    for tied in (False, True):
        claim = providers().fuse((replace(head, tied=tied), draw))
        assert claim.count == 2 and "no logits" in claim.provided.label and claim.provided.traits.graph == "any"
        assert not claim.provided.traits.batch_invariant
    made = claim.provided.implementation
    assert [rows for rows in (0, 1, 2, 3, 64, 65, 1000) if made.takes(rows)] == [2, 3, 64]
    huge = 1 << 19
    large = linear(role="lm_head", out_features=huge, in_features=512)
    made = providers().fuse((large, DrawSpec(dtype="float32", vocabulary=huge))).provided.implementation
    assert [rows for rows in (1, 2, 64, 65, 256) if made.takes(rows)] == [65, 256], (
        "few rows of a huge one are the library's"
    )
    for other in (
        (head, replace(draw, vocabulary=999)),
        (head, replace(draw, vocabulary_offset=8)),
        (replace(head, bias=True), draw),
        (replace(head, dtype="float32"), draw),
        (replace(head, in_features=65), draw),
        (replace(head, quant=QuantSpec(scheme="int4", bits=4)), draw),
    ):
        assert providers().fuse(other) is None, other
    assert Providers(target=replace(SM90, arch=100)).fuse((head, draw)) is None
    assert Providers(target=SM90, deterministic=True).fuse((head, draw)) is None


@pytest.mark.parametrize("gated", [False, True])
def test_many_rows_behind_a_norm_take_its_own_kernel_and_the_product_alone(monkeypatch, gated):
    from drivetrain.ops.reference import REFERENCE
    from drivetrain_cuda import linear as module

    def few(*given):
        raise AssertionError("three rows are too many")

    norm = AddRmsNormSpec(dtype="float32", size=64, eps=1e-6)
    alone = RmsNormSpec(dtype="float32", size=64, eps=1e-6)
    add, rms = REFERENCE[norm.op].make(norm), REFERENCE[alone.op].make(alone)
    monkeypatch.setattr(module, "normed_linear", few)
    product = module.DeviceLinear(linear(dtype="float32"), SM90)
    product._most = 0
    made = module.NormedLinear(norm, product, 2, SM90, "silu" if gated else "")
    made._norm = SimpleNamespace(rms=rms, add_rms=add)
    x, residual, scale, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64), torch.randn(96, 64)
    packed = made.pack(weight, None)
    assert packed.nbytes == made.packed_bytes(linear(dtype="float32")) and made.unpack(packed) is weight
    for stream, (normed, total) in ((residual, add(x, residual, scale)), (None, (rms(x, scale), x))):
        got = made.apply(x, stream, scale, packed)
        assert torch.equal(got[0], product.apply(normed, packed)) and torch.equal(got[1], total)
    with pytest.raises(AssertionError, match="too many"):
        made.apply(x[:2], None, scale, packed)
    if gated:
        assert made.apply(x[:2], None, scale, made.pack(weight, torch.randn(96)))[0].shape == (2, 96)


@pytest.mark.parametrize("normed", [False, True])
def test_gated_products_say_for_which_tokens_they_lie_in_memory(normed):
    norm = (AddRmsNormSpec(dtype="bfloat16", size=4096, eps=1e-6),) if normed else ()
    gated = GatedActivationSpec(dtype="bfloat16", size=14336, kind="silu")
    for bias, found in ((False, {64: 0, 128: 120, 8192: 4872}), (True, {64: 64, 8192: 8192})):
        spec = linear(dtype="bfloat16", in_features=4096, out_features=28672, bias=bias)
        made = providers().fuse((*norm, spec, gated)).provided.implementation
        assert {most: made.apart_tokens(most) for most in found} == found


def test_deterministic_ops_all_say_that_a_rows_bits_are_its_own():
    from drivetrain_cuda.ops import Providers

    given = Providers(target=SM90, deterministic=True)
    norm, gated = (
        AddRmsNormSpec(dtype="bfloat16", size=64, eps=1e-6),
        GatedActivationSpec(dtype="bfloat16", size=48, kind="silu"),
    )
    for spec in (linear(), linear(bias=True, role="lm_head"), norm, gated, LogprobsSpec(dtype="float32", vocabulary=9)):
        answer = given.provide(spec)
        assert answer.traits.batch_invariant and answer.traits.graph == "any", spec
    assert "batch-invariant" in given.provide(linear()).label
    assert not providers().provide(linear()).traits.batch_invariant
    for run in ((linear(), gated), (norm, linear()), (norm, linear(), gated)):
        assert given.fuse(run) is None and providers().fuse(run) is not None, run
    assert "int4" in given.provide(linear(quant=QuantSpec(scheme="int4", bits=4))).reason


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_many_rows_take_the_library_and_bytes_are_exact(bias, tied):
    spec = linear(dtype="float32", bias=bias, tied=tied)
    made = providers().provide(spec).implementation
    weight, offset = torch.randn(96, 64), torch.randn(96) if bias else None
    packed = made.pack(weight, offset)
    held = (0 if tied else weight.nbytes) + (offset.nbytes if bias else 0)
    assert packed.nbytes == made.packed_bytes(spec) == held
    x = torch.randn(200, 64)
    wanted = x @ weight.t() + (offset if bias else 0)
    assert torch.allclose(made.apply(x, packed), wanted, atol=1e-4) and made.unpack(packed) is weight


def test_settings_that_can_not_run_are_named():
    from drivetrain_cuda.backend import validate

    plan = PlanSummary(
        model_type="decoder",
        dtype="float64",
        cache_dtype="float64",
        max_num_seqs=65536,
        max_num_batched_tokens=1,
        max_model_len=1,
        block_tokens=16,
        deterministic=False,
        tensor_parallel=2,
    )
    assert [p.setting for p in validate(plan)] == ["dtype", "tensor_parallel_size", "max_num_seqs"]


def test_the_allocator_is_set_unless_the_user_has_set_it_by_either_name(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert plugin.environment([0], ConfigView()) == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        with monkeypatch.context() as user:
            user.setenv(name, "max_split_size_mb:64")
            assert plugin.environment([0], ConfigView()) == {}


class FakeGraph:
    """A recording that an error in the run makes invalid: ending it then fails too, and leaves its pool in use."""

    pools: ClassVar[list[int]] = []

    def capture_begin(self, pool, capture_error_mode):
        self.pools.append(pool)

    def capture_end(self):
        if len(self.pools) == 1:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self):
        return None

    def reset(self):
        return None


def test_a_failed_capture_raises_what_failed_and_leaves_others_possible(monkeypatch):
    from drivetrain_cuda.graphs import CudaGraphs

    handles = iter(range(9))
    monkeypatch.setattr(FakeGraph, "pools", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    graphs = CudaGraphs(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError):
        graphs.capture(lambda: 1 // 0)
    assert graphs.capture(lambda: 5)[1] == 5 and graphs.capture(lambda: 6)[1] == 6
    assert FakeGraph.pools == [0, 1, 1]
    FakeGraph.pools.clear()
    with pytest.raises(RuntimeError, match="operation failed"):  # by what the driver says at the end alone
        graphs.capture(lambda: 7)
    assert graphs.capture(lambda: 8)[1] == 8 and FakeGraph.pools == [1, 2]


def test_what_another_engine_of_the_process_holds_is_in_use(monkeypatch):
    from drivetrain_cuda.memory import CODE_BYTES, CudaMemory

    figures = {"mem_get_info": (60, 100), "memory_reserved": 35, "memory_allocated": 30, "synchronize": None}
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    found = CudaMemory(torch_runtime("cpu")).baseline()
    assert (found.context, found.others, found.total) == (35 + CODE_BYTES, 0, 100)


@pytest.mark.parametrize("set_to", [None, "on", "off"])
def test_the_head_and_a_greedy_draw_are_one_unless_that_is_turned_off(monkeypatch, set_to):
    from drivetrain_cuda import backend as module

    card = SimpleNamespace(major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448)
    for name, value in {"is_available": True, "set_device": None, "get_device_properties": card}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *given, value=value: value)
    monkeypatch.setattr(module, "torch_runtime", lambda *given, **more: torch_runtime("cpu"))
    monkeypatch.setattr(module, "CudaGraphs", lambda device: None)
    option = next(one for one in plugin.backend_info().options if one.key == "greedy_head")
    view = ConfigView(options={option.key: set_to or option.default})
    run = (linear(role="lm_head"), DrawSpec(dtype="float32", vocabulary=linear().out_features))
    assert (module.open_backend(0, view).fuse(run) is None) is (set_to == "off")
    assert module.open_backend(0, replace(view, deterministic=True)).fuse(run) is None
