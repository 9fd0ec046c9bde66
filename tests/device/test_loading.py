"""Weights from files reach the device bit by bit, in rings that they go round many times, and at some speed."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from drivetrain.models.naming import expected_tensors, path_naming
from drivetrain.models.weights import feed as feeds
from drivetrain.models.weights.checkpoint import DummyCheckpoint
from drivetrain.models.weights.feed import Feed, Run
from drivetrain.models.weights.safetensors_files import SafetensorsCheckpoint
from tests.unit.models.driving import small_spec

LARGE = (4096, 4100)  # several buffers, and a part of one


def runs_of(checkpoint: SafetensorsCheckpoint) -> list[Run]:
    counts = {name: int(np.prod(info.shape)) for name, info in checkpoint.infos().items()}
    return [Run(stored=checkpoint.stored(name), first=0, count=count) for name, count in counts.items()]


def fed(backend, folder: Path, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """All tensors of a folder by way of the device, in float32."""
    checkpoint, runtime = SafetensorsCheckpoint(folder), backend.device
    found = {}
    with torch.no_grad(), runtime.activate(), Feed(runs_of(checkpoint), dtype, runtime) as feed:
        for name, info in checkpoint.infos().items():
            found[name] = runtime.empty(info.shape, dtype)
            feed.fill(found[name])
        return {name: runtime.to_host((t.to(torch.float32),)).get()[0].copy() for name, t in found.items()}


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_small_tensors(backend, stored, wanted, tmp_path, monkeypatch) -> None:
    for name, value in (("BUFFERS", 5), ("BUFFER_BYTES", 1000), ("CONVERT_BYTES", 488), ("SLICE", 50)):
        monkeypatch.setattr(feeds, name, value)
    spec = small_spec()
    drawn = DummyCheckpoint(expected_tensors(spec, path_naming(spec)), "float32")
    tensors = {name: drawn.read(name, stored) for name in drawn.infos()}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    for name, array in fed(backend, tmp_path, wanted).items():
        assert np.array_equal(array, tensors[name].to(wanted).to(torch.float32).numpy()), name


def test_bits_of_large_tensors(backend, tmp_path) -> None:
    """With the ring as it is. Prints the speed, buffers and their page-locking included."""
    generator = torch.Generator().manual_seed(3)
    tensors = {f"{n}": torch.randn(LARGE, generator=generator).to(torch.bfloat16) for n in range(6)}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    for name, array in fed(backend, tmp_path, torch.bfloat16).items():
        assert np.array_equal(array, tensors[name].to(torch.float32).numpy()), name
    checkpoint, runtime = SafetensorsCheckpoint(tmp_path), backend.device
    with torch.no_grad(), runtime.activate():
        target = runtime.empty(LARGE, torch.bfloat16)
        runtime.synchronize()
        begin = time.perf_counter()
        with Feed(runs_of(checkpoint), torch.bfloat16, runtime) as feed:
            for _ in tensors:
                feed.fill(target)
            runtime.synchronize()
        seconds = time.perf_counter() - begin
    total = sum(t.nbytes for t in tensors.values())
    print(f"{total / 1e9:.2f} GB from files in {seconds:.3f} s, {total / seconds / 1e9:.2f} GB/s")
