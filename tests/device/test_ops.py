"""Every op as the device runs it, its own or the reference there, against float64 on the host."""

from __future__ import annotations

import pytest
import torch

from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import Decline
from tests.unit.ops.judges import check

pytestmark = pytest.mark.device
SMALL, LARGE = 1 << 20, 8 << 20  # bytes; allocators keep blocks of both kinds apart


def poison(runtime) -> None:
    """Leave freed memory full of ones, not-a-numbers in every float format: what no kernel wrote shows up."""
    held = [runtime.empty((size,), torch.uint8).fill_(255) for size in (SMALL,) * 8 + (LARGE,) * 4]
    del held


def on_host(runtime, outputs) -> tuple[torch.Tensor, ...]:
    plain = [t.to(torch.float32) if t.dtype in (torch.bfloat16, torch.float16) else t for t in outputs]
    return tuple(torch.from_numpy(value) for value in runtime.to_host(plain).get())


def implementation_of(backend, reference, spec):
    """Return what runs a spec, and its name."""
    answer = backend.provide(spec)
    if isinstance(answer, Decline):
        return reference.make(spec), f"reference ({answer.reason[:60]})"
    return answer.implementation, answer.label


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", sorted(REFERENCE))
def test_every_case_agrees_with_float64(backend, ran, op, dtype):
    if dtype not in backend.capabilities.model_dtypes:
        pytest.skip(f"the backend runs {', '.join(backend.capabilities.model_dtypes)}")
    reference, runtime = REFERENCE[op], backend.device
    place, wrong = Place(runtime=runtime, storage=backend.storage), []
    for seed in (31, 32):
        for case in reference.cases(place, dtype, seed):
            implementation, label = implementation_of(backend, reference, case.spec)
            ran[op, dtype, label] += 1
            poison(runtime)
            try:
                check(case, on_host(runtime, case.run(implementation)), reference.tolerance(dtype))
            except AssertionError as error:
                wrong.append(f"{label}: {error}")
    assert not wrong, f"{len(wrong)} cases are wrong:\n" + "\n".join(wrong[:20])
