"""Weights that repeat a few values are made on the device, and are what reading them on the host would have given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drivetrain.models.naming import CheckpointMap, Naming, expected_tensors, map_checkpoint, path_naming
from drivetrain.models.weights import checkpoint as checkpoints
from drivetrain.models.weights.checkpoint import DummyCheckpoint, repeat
from tests.unit.models.driving import small_spec
from tests.unit.runner.devices import device

DRAWN = 37  # values that a tensor repeats here: less than a row of some, no divisor of any
QKV = tuple(f"layers.1.mixer.{part}.weight" for part in "qkv")


@pytest.fixture(autouse=True)
def few(monkeypatch) -> None:
    monkeypatch.setattr(checkpoints, "DRAWN", DRAWN)


@pytest.fixture(params=["cpu", "mirage"])
def runtime(request):
    backend = device(request.param)
    yield backend.device
    backend.close()


class Watched:
    """A pattern checkpoint that notes what it is asked for."""

    def __init__(self, inner: DummyCheckpoint) -> None:
        self.inner, self.patterns, self.reads = inner, [], []
        self.infos, self.close = inner.infos, lambda: None

    def pattern(self, name, dtype):
        self.patterns.append(name)
        return self.inner.pattern(name, dtype)

    def read(self, name, dtype):
        self.reads.append(name)
        return self.inner.read(name, dtype)


def mapped_of(naming: Naming | None = None) -> tuple[CheckpointMap, Watched]:
    spec = small_spec()
    naming = path_naming(spec) if naming is None else naming
    watched = Watched(DummyCheckpoint(expected_tensors(spec, naming), "float32"))
    return map_checkpoint(spec, naming, watched), watched


def loaded(mapped: CheckpointMap, paths, dtype, runtime) -> torch.Tensor:
    with runtime.activate():
        made = mapped.load(paths, dtype, runtime)
        assert made.device == runtime.device and made.dtype == dtype
        (array,) = runtime.to_host((made.to(torch.float32),)).get()
    return torch.from_numpy(np.array(array))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_is_what_is_read(runtime, dtype) -> None:
    mapped, watched = mapped_of()
    shapes = small_spec().parameters()
    for path in shapes:
        assert torch.equal(loaded(mapped, (path,), dtype, runtime), mapped.read((path,), dtype).to(torch.float32))
    assert len(watched.patterns) == len(watched.reads) == len(shapes)
    sizes = [len(watched.inner.pattern(name, dtype)) for name in watched.patterns]
    assert max(sizes) == DRAWN > min(sizes), "large ones repeat, small ones are drawn whole"


def test_joined_parameters_begin_anew_each(runtime) -> None:
    mapped, watched = mapped_of()
    wanted = mapped.read(QKV, torch.float32)
    watched.reads.clear()
    got = loaded(mapped, QKV, torch.float32, runtime)
    assert torch.equal(got, wanted) and not watched.reads and len(watched.patterns) == 3
    q, k = wanted.shape[0] // 2, wanted.shape[0] // 4
    first = [wanted[row, :5].tolist() for row in (0, q, q + k)]
    assert first[0] != first[1] != first[2], "each has a pattern of its own"


def test_parameters_that_share_a_stored_tensor_take_the_plain_way(runtime) -> None:
    names = {name: paths for name, paths in path_naming(small_spec()).names.items() if paths[0] not in QKV}
    mapped, watched = mapped_of(Naming(names={**names, "qkv": QKV}))
    whole = watched.inner.read("qkv", torch.float32)
    assert torch.equal(loaded(mapped, QKV, torch.float32, runtime), whole)
    rows = small_spec().parameters()[QKV[0]][0]
    assert torch.equal(loaded(mapped, QKV[:1], torch.float32, runtime), whole[:rows])
    assert watched.patterns == [] and watched.reads == ["qkv", "qkv"]
    mixed = (QKV[2], "layers.1.mixer.out.weight")
    if small_spec().parameters()[mixed[0]][1:] == small_spec().parameters()[mixed[1]][1:]:
        assert torch.equal(loaded(mapped, mixed, torch.float32, runtime), mapped.read(mixed, torch.float32))
    assert watched.patterns == [], "one that shares is enough"


@pytest.mark.parametrize(("size", "length"), [(3, 10), (3, 9), (5, 5), (5, 3), (1, 4), (2, 0)])
def test_a_pattern_fills_to_the_last_element(size: int, length: int) -> None:
    target = torch.full((length,), -1.0)
    repeat(torch.arange(size, dtype=torch.float32), target)
    assert target.tolist() == [float(i % size) for i in range(length)]
