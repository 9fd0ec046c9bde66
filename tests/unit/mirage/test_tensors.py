"""Torch on mirage tensors: equal to the host's, aliasing included, whatever is pending."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain_mirage.device import DeviceOptions, MirageDevice
from drivetrain_mirage.runtime import MirageRuntime
from drivetrain_mirage.streams import Pace

MODES = [torch.no_grad, torch.inference_mode]


def back(runtime, tensor) -> np.ndarray:
    (value,) = runtime.to_host([tensor]).get()
    return value


def test_tensors_say_where_they_live(runtime):
    x = runtime.zeros((2, 3), torch.float32)
    assert x.device == runtime.device and x.device.type == "mirage" and x.device.index == 0
    assert tuple(x.shape) == (2, 3) and x.stride() == (3, 1) and x.dtype == torch.float32
    assert not x.is_cpu and "values on the device" in repr(x)


@pytest.mark.parametrize("mode", MODES)
def test_a_long_program_gives_the_hosts_bits(runtime, mode):
    def program(x, w, ids):
        h = torch.nn.functional.linear(x, w)
        h = h.unflatten(1, (2, 8)).transpose(0, 1).contiguous()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = torch.cat((h, -h), dim=-1)[..., ::2]
        scores = h @ h.transpose(1, 2)
        scores = scores.masked_fill(scores < 0, float("-inf")).exp()
        h = (scores @ h).permute(1, 0, 2).reshape(6, -1)
        picked = h[ids] + x[:, :1]
        a, b = picked.chunk(2, dim=-1)
        ones = ids.new_ones(6).cumsum(0) - 1
        return torch.where(a > b, a, b).to(torch.bfloat16).float(), ones, picked.argmax(-1)

    torch.manual_seed(0)
    x, w, ids = torch.randn(6, 16), torch.randn(16, 16), torch.tensor([5, 0, 3, 3, 1, 2], dtype=torch.int32)
    with mode():
        want = program(x, w, ids)
        got = runtime.to_host(program(*(runtime.from_host(t) for t in (x, w, ids)))).get()
    for g, e in zip(got, want, strict=True):
        assert np.array_equal(g, e.numpy()) and str(g.dtype) == str(e.dtype).removeprefix("torch.")


@pytest.mark.parametrize("mode", MODES)
def test_writes_through_views_reach_the_base(runtime, mode):
    def program(x):
        row, column = x[1], x[:, 2]
        row.add_(10)
        column.mul_(2)
        x[0, 1:] = x[2, 1:] + 1
        x[[0, 2]] = x[[2, 0]] * 0.5
        flat = x.view(-1)
        flat[3] = 7.0
        x[x.new_ones(2, dtype=torch.int32).cumsum(0), 0] = 0.0
        return x, row, flat

    host = torch.arange(12, dtype=torch.float32).view(3, 4)
    with mode():
        device = runtime.from_host(host)
        if mode is torch.inference_mode:
            host = host.clone()
        # Index lists make host tensors; the device takes indices of its own only.
        indices = runtime.from_host(torch.tensor([0, 2])), runtime.from_host(torch.tensor([2, 0]))

        def on_mirage(x):
            row, column = x[1], x[:, 2]
            row.add_(10)
            column.mul_(2)
            x[0, 1:] = x[2, 1:] + 1
            x[indices[0]] = x[indices[1]] * 0.5
            flat = x.view(-1)
            flat[3] = 7.0
            x[x.new_ones(2, dtype=torch.int32).cumsum(0), 0] = 0.0
            return x, row, flat

        want = program(host)
        got = runtime.to_host(on_mirage(device)).get()
    for g, e in zip(got, want, strict=True):
        assert np.array_equal(g, e.numpy())


STEPS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=25)


def apply_step(tensors: list[torch.Tensor], kind: int, i: int, j: int) -> None:
    """One random operation on a list of [4, 4] tensors, some of which alias others."""
    a, b = tensors[i % len(tensors)], tensors[j % len(tensors)]
    if kind == 0:
        tensors.append(a + b)
    elif kind == 1:
        tensors.append(a.t())
    elif kind == 2:
        a.add_(b * 0.5)
    elif kind == 3:
        a[i] = b[j]
    elif kind == 4:
        a[:, j].mul_(-1)
    elif kind == 5:
        tensors.append(a.reshape(2, 8).flatten().view(4, 4))
    elif kind == 6:
        a.copy_(torch.tanh(b))
    else:
        tensors.append(torch.stack((a[i], b[j], a[j], b[i])))


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_random_programs_with_aliases(steps):
    runtime = MirageRuntime(MirageDevice(DeviceOptions(pace=Pace(share=0.05))))
    start = torch.linspace(-2, 2, 16).view(4, 4)
    host, device = [start.clone()], [runtime.from_host(start)]
    with torch.no_grad():
        for step in steps:
            apply_step(host, *step)
            apply_step(device, *step)
    got = runtime.to_host(device).get()
    runtime.owner.close()
    for g, e in zip(got, host, strict=True):
        assert np.array_equal(g, e.numpy(), equal_nan=True)


def test_shape_errors_are_raised_at_once(runtime, stall):
    stall()
    x, y = runtime.zeros((2, 3), torch.float32), runtime.zeros((4, 5), torch.float32)
    with pytest.raises(RuntimeError, match="broadcast"):
        _ = x + y
    with pytest.raises(RuntimeError):
        x.copy_(y)
    with pytest.raises(RuntimeError):
        x.view(7)


def test_outputs_are_garbage_until_their_turn(runtime, stall):
    stall(0.3)
    x = runtime.zeros((4,), torch.float32) + 1
    ids = runtime.zeros((4,), torch.int32)
    assert torch.isnan(x.raw).all() and (ids.raw < 0).all()
    runtime.synchronize()
    assert (x.raw == 1).all() and (ids.raw == 0).all()


def test_scalars_of_the_host_are_welcome(runtime):
    x = runtime.from_host(torch.ones(3))
    y = torch.tensor(2.0) * x + 1
    assert back(runtime, y).tolist() == [3.0, 3.0, 3.0]
