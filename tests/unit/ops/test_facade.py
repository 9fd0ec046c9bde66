"""Binding: what the backend provides, what the reference serves, and what is refused."""

import pytest

from drivetrain.errors import DeviceError
from drivetrain.ops import Ops
from drivetrain.ops.reference.dense import InvariantLinear, ReferenceLinear
from drivetrain_api.v1 import (
    Capabilities,
    ComposedBackend,
    Decline,
    LinearSpec,
    OpSpec,
    OpTraits,
    Provided,
    RmsNormSpec,
    generic_profiler,
    torch_runtime,
    torch_storage,
)

NORM = RmsNormSpec(dtype="float32", size=8, eps=1e-6)
LINEAR = LinearSpec(dtype="float32", in_features=4, out_features=2)


def backend(provide=None):
    runtime = torch_runtime("cpu")
    parts = {"device": runtime, "storage": torch_storage(runtime), "memory": generic_profiler(runtime)}
    if provide is not None:
        parts["provide"] = provide
    return ComposedBackend(capabilities=Capabilities(), **parts)


def marker(x, weight):
    return x


def test_declined_specs_are_served_by_the_reference_and_say_why():
    ops = Ops(backend(lambda spec: Decline(reason="not today")), block_tokens=16)
    assert isinstance(ops.bind(LINEAR), ReferenceLinear)
    (choice,) = ops.report
    assert (choice.op, choice.provider, choice.reason) == ("linear/1", "reference", "not today")
    assert not choice.traits.batch_invariant


def test_equal_specs_share_one_implementation_and_are_counted():
    asked = []

    def provide(spec):
        asked.append(spec)
        return Provided(implementation=marker, label="native")

    ops = Ops(backend(provide), block_tokens=16)
    again = RmsNormSpec(dtype="float32", size=8, eps=1e-6)
    assert ops.bind(NORM) is marker and ops.bind(again) is marker
    ops.bind(RmsNormSpec(dtype="float32", size=8, eps=1e-5))
    assert len(asked) == 2
    assert [c.count for c in ops.report] == [2, 1]
    assert {c.provider for c in ops.report} == {"native"}


def test_a_shared_kernel_is_reported_as_shared():
    ops = Ops(backend(lambda s: Provided(implementation=marker, label="shared: rms")), block_tokens=16)
    ops.bind(NORM)
    assert ops.report[0].provider == "shared"


def test_strict_refuses_hot_ops_on_the_reference_only():
    ops = Ops(backend(lambda spec: Decline(reason="no kernel")), block_tokens=16, strict=True)
    ops.bind(NORM)
    with pytest.raises(DeviceError, match=r"linear/1 would run on the reference \(no kernel\)"):
        ops.bind(LINEAR)


def test_deterministic_takes_invariant_implementations_only():
    invariant = OpTraits(batch_invariant=True)

    def provide(spec):
        if spec.op == "norm.rms/1":
            return Provided(implementation=marker, label="fast", traits=invariant)
        return Provided(implementation=object(), label="fast gemm")

    ops = Ops(backend(provide), block_tokens=16, deterministic=True)
    assert ops.bind(NORM) is marker
    assert isinstance(ops.bind(LINEAR), InvariantLinear)
    choice = ops.report[1]
    assert choice.provider == "reference" and choice.traits.batch_invariant
    assert choice.reason == "fast gemm is not batch-invariant"


def test_an_unknown_op_names_what_exists():
    class Strange(OpSpec):
        op = "strange/1"

    with pytest.raises(DeviceError, match=r"no implementation of strange/1.*norm\.rms/1"):
        Ops(backend(), block_tokens=16).bind(Strange(dtype="float32"))


def test_layout_uses_the_block_size_of_the_engine():
    from drivetrain_api.v1 import CachePart, CacheSpec

    spec = CacheSpec(kind="full", parts=(CachePart(name="k", shape=(2, 8), dtype="float32"),))
    assert Ops(backend(), block_tokens=32).layout(spec).block_tokens == 32


def test_reference_linear_reports_its_bytes_exactly():
    import torch

    for tied, bias, bytes_wanted in ((False, True, 4 * (8 + 2)), (False, False, 32), (True, False, 0)):
        spec = LinearSpec(dtype="float32", in_features=4, out_features=2, bias=bias, tied=tied)
        linear = ReferenceLinear(spec)
        packed = linear.pack(torch.ones(2, 4), torch.ones(2) if bias else None)
        assert linear.packed_bytes(spec) == packed.nbytes == bytes_wanted
        assert packed.keeps_source is tied
