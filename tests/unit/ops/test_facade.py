"""Binding: what the backend provides, what the reference serves, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from drivetrain.errors import DeviceError
from drivetrain.ops import Ops
from drivetrain.ops.provided import pack, packed_bytes
from drivetrain.ops.reference.dense import InvariantLinear, ReferenceLinear
from drivetrain_api.v1 import (
    AttentionSpec,
    CachePart,
    CacheSpec,
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
CACHE = CacheSpec(kind="full", parts=(CachePart(name="k", shape=(2, 8), dtype="float32"),))


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
        return Provided(implementation=ReferenceLinear(spec), label="fast gemm")

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


def attention():
    layout = Ops(backend(), block_tokens=16).layout(CACHE)
    return AttentionSpec(
        dtype="float32", num_heads=2, num_kv_heads=2, head_dim=8, v_head_dim=8, scale=1.0, layout=layout
    )


def refuses(text):
    def provide(spec):
        raise RuntimeError(text)

    return provide


class NoTraits:
    plan = write = forward = marker


@pytest.mark.parametrize(
    ("provide", "spec", "expected"),
    [
        (lambda s: None, NORM, "returned None, expected Provided or Decline"),
        (lambda s: "x", NORM, "returned str 'x', expected Provided or Decline"),
        (refuses("boom"), NORM, r"raised RuntimeError: boom \(.*test_facade"),
        (lambda s: Provided(implementation=5, label="z"), NORM, "'z' the implementation int 5, expected a callable"),
        (lambda s: Provided(implementation=marker, label=None), NORM, "gave the label None, expected text"),
        (lambda s: Provided(implementation=marker, label="z", traits=5), NORM, "the traits int 5, expected OpTraits"),
        (lambda s: Provided(implementation=marker, label="z"), LINEAR, "it has no packed_bytes, pack, apply"),
        (lambda s: Provided(implementation=marker, label="z"), None, "it has no plan, write, forward"),
        (lambda s: Provided(implementation=NoTraits(), label="z"), None, "expected one with AttentionTraits"),
    ],
)
def test_what_can_not_be_bound_names_op_and_provider(provide, spec, expected):
    spec = spec or attention()
    with pytest.raises(DeviceError, match=rf"provide\({spec.op}\) .*{expected}.*asked for {type(spec).__name__}"):
        Ops(backend(provide), block_tokens=16).bind(spec)


def test_the_wheel_is_named():
    from drivetrain.ops.provided import wheel_of
    from drivetrain_api.v1 import ConfigView
    from drivetrain_cpu.plugin import plugin

    assert wheel_of(plugin.create((0,), ConfigView())).startswith("drivetrain-cpu ")
    assert wheel_of(backend()) == "the backend"


def test_a_layout_that_is_none():
    made = backend()
    odd = replace(made, storage=SimpleNamespace(layout=lambda spec, tokens: None))
    with pytest.raises(DeviceError, match=r"storage\.layout returned None, expected CacheLayout"):
        Ops(odd, block_tokens=16).layout(CACHE)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x, w: None, r"it returned None, expected float32 \[3, 8\]"),
        (lambda x, w: x[:, 1:], r"it returned float32 \[3, 7\], expected float32 \[3, 8\]"),
        (lambda x, w: x.double(), r"it returned float64 \[3, 8\], expected float32 \[3, 8\]"),
        (lambda x, w: (x, x), r"it returned \(float32 \[3, 8\], float32 \[3, 8\]\), expected"),
        (lambda x, w: x / None, "it raised TypeError: .*test_facade"),
    ],
)
def test_a_watched_op_is_noted(run, expected):
    ops = Ops(backend(lambda s: Provided(implementation=run, label="z")), block_tokens=16)
    assert ops.bind(NORM) is run
    watched = ops.watched()
    with pytest.raises(DeviceError, match=f"the backend: norm.rms/1 by 'z': {expected}.*bound for RmsNormSpec"):
        watched.bind(NORM)(torch.ones(3, 8), torch.ones(8))
    assert len(watched.failures) == 1 and not ops.failures


def test_a_right_op_is_not_noted():
    ops = Ops(backend(lambda s: Provided(implementation=ReferenceLinear(s), label="z")), block_tokens=16)
    own = ops.bind(LINEAR)
    packed = own.pack(torch.ones(2, 4), None)
    watched = ops.watched()
    assert watched.bind(LINEAR).apply(torch.ones(3, 4), packed).shape == (3, 2)
    assert not hasattr(watched.bind(LINEAR), "nothing") and not watched.failures


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"pack": lambda w, b: None}, "pack returned None, expected Packed"),
        ({"pack": lambda w, b: w / "x"}, "pack raised TypeError"),
        ({"packed_bytes": lambda s: None}, "packed_bytes returned None, expected a number of bytes"),
        ({"packed_bytes": lambda s: s.nothing}, "packed_bytes raised AttributeError"),
    ],
)
def test_packing(parts, expected):
    linear = SimpleNamespace(**parts)
    with pytest.raises(DeviceError, match=f"linear/1 by SimpleNamespace: {expected}.*bound for LinearSpec"):
        if "pack" in parts:
            pack(linear, LINEAR, torch.ones(2, 4), None)
        else:
            packed_bytes(linear, LINEAR)
