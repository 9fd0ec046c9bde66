"""The reference on mirage, and mirage's own kernels, against the reference on the host."""

from __future__ import annotations

import pytest
import torch

from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import ConfigView, Decline, LinearSpec, PlanSummary, RmsNormSpec, torch_runtime, torch_storage
from drivetrain_mirage.plugin import OPTIONS, plugin

HALVES = ("norm", "activation", "rope.apply", "soft", "embedding", "linear", "attention")
INTEGERS = ("input.prepare", "sample.verify", "sample.keep", "sample.count")


def dtypes(op: str) -> tuple[str, ...]:
    if op.startswith(INTEGERS):
        return ("int32",)
    return ("float32", "bfloat16") if op.startswith(HALVES) else ("float32",)


def host_place() -> Place:
    runtime = torch_runtime("cpu")
    return Place(runtime=runtime, storage=torch_storage(runtime, block_tokens=(128,), slot_dtype="int32"))


def agree(backend, case, implementation, want, tolerance):
    outputs = case.run(implementation)
    plain = [t.to(torch.float32) if t.dtype == torch.bfloat16 else t for t in outputs]
    for got, expected in zip(backend.device.to_host(plain).get(), want, strict=True):
        expected = expected.float() if expected.dtype == torch.bfloat16 else expected
        exact = not expected.is_floating_point()
        torch.testing.assert_close(
            torch.from_numpy(got),
            expected,
            rtol=0 if exact else tolerance.rtol,
            atol=0 if exact else tolerance.atol,
            equal_nan=True,
        )


@pytest.mark.parametrize("op", REFERENCE)
def test_every_reference_case(open_backend, op):
    """With pauses on, and with mirage's own kernels where it has one: all cases of the op."""
    backend = open_backend(options={"native": True, "delay": 0.01})
    place, reference = Place(runtime=backend.device, storage=backend.storage), REFERENCE[op]
    for dtype in dtypes(op):
        pairs = zip(reference.cases(place, dtype, 0), reference.cases(host_place(), dtype, 0), strict=True)
        for case, host_case in pairs:
            want = host_case.run(reference.make(host_case.spec))
            agree(backend, case, reference.make(case.spec), want, reference.tolerance(dtype))
            answer = backend.provide(case.spec)
            if not isinstance(answer, Decline):
                agree(backend, case, answer.implementation, want, reference.tolerance(dtype))


def test_by_default_everything_is_declined(open_backend):
    backend = open_backend()
    specs = (
        LinearSpec(dtype="float32", in_features=4, out_features=3),
        RmsNormSpec(dtype="float32", size=4, eps=1e-6),
    )
    for spec in specs:
        answer = backend.provide(spec)
        assert isinstance(answer, Decline) and spec.op in answer.reason


@pytest.mark.parametrize("op", ["linear/1", "attention.paged/1"])
def test_deterministic_kernels_say_so_and_agree(open_backend, op):
    backend = open_backend(options={"native": True}, deterministic=True)
    place, reference = Place(runtime=backend.device, storage=backend.storage), REFERENCE[op]
    pairs = zip(reference.cases(place, "float32", 1), reference.cases(host_place(), "float32", 1), strict=True)
    provided = 0
    for case, host_case in pairs:
        answer = backend.provide(case.spec)
        if isinstance(answer, Decline):
            continue
        provided += 1
        assert answer.traits.batch_invariant
        want = host_case.run(reference.make(host_case.spec))
        agree(backend, case, answer.implementation, want, reference.tolerance("float32"))
    assert provided


def test_a_deterministic_linear_gives_a_row_the_same_bits_in_any_batch(open_backend):
    backend = open_backend(options={"native": True}, deterministic=True)
    spec = LinearSpec(dtype="float32", in_features=67, out_features=129)
    linear = backend.provide(spec).implementation
    torch.manual_seed(3)
    packed = linear.pack(backend.device.from_host(torch.randn(129, 67)), None)
    x = backend.device.from_host(torch.randn(41, 67))
    together, alone = backend.device.to_host([linear.apply(x, packed), linear.apply(x[7:8] * 1, packed)]).get()
    assert (together[7:8] == alone).all()
    assert packed.nbytes == 129 * 67 * 4 == linear.packed_bytes(spec)


SUMMARY = {
    "model_type": "gemma3_text",
    "dtype": "float32",
    "cache_dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "block_tokens": 128,
    "deterministic": False,
    "tensor_parallel": 1,
}


def test_validate_names_what_does_not_fit(open_backend):
    backend = open_backend()
    assert not backend.validate(PlanSummary(**SUMMARY))
    wrong = SUMMARY | {"block_tokens": 16, "dtype": "float16", "tensor_parallel": 2}
    problems = {p.setting: p.proposed for p in backend.validate(PlanSummary(**wrong))}
    assert problems == {"block-size": "128", "dtype": "float32", "tensor-parallel-size": "1"}


def test_options_reach_the_device(open_backend):
    backend = open_backend(options={"memory": 1 << 20})
    assert backend.device.memory().total == 1 << 20
    assert {option.key for option in OPTIONS} == {"memory", "delay", "seed", "native", "poison_freed"}
    assert backend.capabilities.default_depth == 2 and backend.device.asynchronous
    with pytest.raises(ValueError, match="device 0 only"):
        plugin.create((1,), ConfigView())
