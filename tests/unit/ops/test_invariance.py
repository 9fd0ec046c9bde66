"""The reference's batch-invariant bodies: same bits whatever the batch."""

import pytest
import torch

from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import AddRmsNormSpec, LinearSpec, RmsNormSpec, torch_runtime, torch_storage
from tests.unit.ops.invariance import SHAPES, check_all_sizes, check_attention, check_rows

RUNTIME = torch_runtime("cpu")
DTYPES = ["float32", "bfloat16"]


def rows(dtype, count, size):
    return torch.randn(count, size, generator=torch.manual_seed(3)).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 48), (640, 331), (61, 47)])
def test_linear(dtype, size_in, size_out):
    spec = LinearSpec(dtype=dtype, in_features=size_in, out_features=size_out)
    linear = REFERENCE["linear/1"].invariant(spec)
    packed = linear.pack(rows(dtype, size_out, size_in), None)
    x = rows(dtype, 30, size_in)
    check_rows(lambda batch: linear.apply(batch, packed), x[0], x[1:])
    check_all_sizes(lambda batch: linear.apply(batch, packed), x[0], x[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [61, 640, 4096])
def test_norms(dtype, size):
    weight, x = rows(dtype, 1, size)[0], rows(dtype, 30, size)
    rms = REFERENCE["norm.rms/1"].invariant(RmsNormSpec(dtype=dtype, size=size, eps=1e-6))
    check_all_sizes(lambda batch: rms(batch, weight), x[0], x[1:])
    add = REFERENCE["norm.add_rms/1"].invariant(AddRmsNormSpec(dtype=dtype, size=size, eps=1e-6))
    check_rows(lambda batch: add(batch, batch, weight)[0], x[0], x[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(dtype, shape):
    place = Place(runtime=RUNTIME, storage=torch_storage(RUNTIME))
    check_attention(REFERENCE["attention.paged/1"].invariant, place, shape, dtype)
