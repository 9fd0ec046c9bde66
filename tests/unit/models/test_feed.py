"""Weights that are read by several threads into a ring of buffers: the bits of the plain way, and its errors."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from drivetrain.errors import WeightsError
from drivetrain.models.build import build, load, planned_bytes
from drivetrain.models.families import naming_of, read_spec
from drivetrain.models.naming import Naming, expected_tensors, path_naming
from drivetrain.models.parameters import HeadWeights
from drivetrain.models.source import resolve
from drivetrain.models.weights import feed as feeds
from drivetrain.models.weights.checkpoint import DummyCheckpoint, Stored
from drivetrain.models.weights.feed import Feed, Run
from drivetrain.models.weights.safetensors_files import SafetensorsCheckpoint
from drivetrain.ops import Ops
from drivetrain_api.v1 import torch_dtype
from tests.checkpoints import VARIANTS, tiny_checkpoint
from tests.unit.models.driving import reference_ops, small_spec
from tests.unit.models.late import LateRuntime
from tests.unit.runner.devices import device


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch) -> None:
    """Rings that every tiny checkpoint goes round many times; no tensor's rows fit a buffer a whole number of times."""
    monkeypatch.setattr(feeds, "BUFFERS", 5)
    monkeypatch.setattr(feeds, "READERS", 3)
    monkeypatch.setattr(feeds, "BUFFER_BYTES", 1000)
    monkeypatch.setattr(feeds, "CONVERT_BYTES", 488)
    monkeypatch.setattr(feeds, "SLICE", 50)


@pytest.fixture(autouse=True)
def ordered(monkeypatch) -> None:
    """A device's ops follow the copies queued before them; those of a device made of host memory would not."""
    plain = HeadWeights.install

    def install(self, tensors, runtime):
        if isinstance(runtime, LateRuntime):
            runtime.synchronize()
        return plain(self, tensors, runtime)

    monkeypatch.setattr(HeadWeights, "install", install)


@pytest.fixture
def delays(monkeypatch):
    """Readers that take very different times."""
    plain, draws = feeds.Files.read, random.Random(5)

    def late(self, path, offset, into):
        time.sleep(draws.choice((0, 0, 0, 1e-3)))
        plain(self, path, offset, into)

    monkeypatch.setattr(feeds.Files, "read", late)


def values(decoder) -> list[torch.Tensor]:
    """All that a decoder's holders hold, as integers of its bits."""
    found = []
    for holder in decoder.holders:
        held = [holder.value] if hasattr(holder, "value") else list(holder.packed.data)
        found += [t.contiguous().view(torch.uint8) for t in held if t is not None]
    return found


def loaded(spec, checkpoint, runtime, naming=None):
    ops = reference_ops()
    decoder = build(spec, ops)
    seen: list[tuple[int, int]] = []
    report = load(decoder, checkpoint, runtime, lambda *at: seen.append(at), naming=naming)
    assert seen == [(i + 1, len(decoder.holders)) for i in range(len(decoder.holders))]
    assert report.weight_bytes == planned_bytes(spec, ops)
    return values(decoder), report


def check_same(spec, directory: Path, naming=None, **late) -> LateRuntime:
    """Load both ways; returns the device of the asynchronous one."""
    runtime = LateRuntime(**late)
    plain, one = loaded(spec, SafetensorsCheckpoint(directory), reference_ops().backend.device, naming)
    fed, other = loaded(spec, SafetensorsCheckpoint(directory), runtime, naming)
    assert len(plain) == len(fed) and all(torch.equal(a, b) for a, b in zip(plain, fed, strict=True))
    assert (one.weight_bytes, one.peak_bytes) == (other.weight_bytes, other.peak_bytes)
    assert len(runtime.uploads) > len(runtime.buffers) and max(runtime.uploads) <= 1000
    assert 0 < len(runtime.buffers) <= 5 and {b.nbytes for b in runtime.buffers} == {1000}
    assert not runtime.busy() and runtime.synchronized
    return runtime


def small(family: str, directory: Path, **more) -> Path:
    return tiny_checkpoint(family, directory / "model", num_hidden_layers=2, **more)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_bits_of_every_variant(variant: str, shards: int, tmp_path: Path, delays) -> None:
    directory = tiny_checkpoint(variant, tmp_path / "model", shards=shards)
    spec = read_spec(resolve(str(directory)).config, "float32")
    runtime = check_same(spec, directory, pause=2e-4)
    assert sum(runtime.uploads) == sum(t.nbytes for p in directory.glob("*.safetensors") for t in load_file(p).values())


@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float64", "float32", "bfloat16", "float16"])
def test_bits_of_other_dtypes(stored: str, wanted: str, tmp_path: Path) -> None:
    """Rounding, overflow, subnormal numbers and what is no number included."""
    spec = read_spec(resolve(str(small("llama", tmp_path, attention_bias=True))).config, wanted)
    file = tmp_path / "model" / "model.safetensors"
    tensors = {name: tensor.to(torch_dtype(stored)) for name, tensor in load_file(str(file)).items()}
    odd = tensors["model.layers.1.mlp.up_proj.weight"].view(-1)
    odd[:6] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, 65_520.0, 1.00390625], dtype=torch.float64)
    save_file(tensors, str(file), metadata={"format": "pt"})
    check_same(spec, tmp_path / "model", pause=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_neither_order_nor_pace_matters(seed: int, tmp_path: Path, delays) -> None:
    directory = small("qwen3", tmp_path, shards=3)
    spec = read_spec(resolve(str(directory)).config, "bfloat16")
    check_same(spec, directory, seed=seed, pause=(0.0, 1e-4, 1e-3, 3e-3)[seed])


def test_rows_of_one_stored_tensor_for_several_parameters(tmp_path: Path) -> None:
    spec = small_spec()
    plain = DummyCheckpoint(expected_tensors(spec, path_naming(spec)), "float32")
    tensors = {name: plain.read(name, torch.float32) for name in plain.infos()}
    names = {name: (name,) for name in tensors}
    qkv = tuple(f"layers.0.mixer.{part}.weight" for part in "qkv")
    downs = ("layers.0.ffn.down.weight", "layers.1.ffn.down.weight")
    for name, paths in (("qkv", qkv), ("downs", downs)):  # joined as stored, and cut out of what is stored
        tensors[name] = torch.cat([tensors.pop(path) for path in paths])
        names = {n: p for n, p in names.items() if n not in paths} | {name: paths}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    check_same(spec, tmp_path, Naming(names=names))


def test_a_tied_model_with_a_head_of_its_own(tmp_path: Path) -> None:
    directory = small("qwen3", tmp_path)
    spec = read_spec(resolve(str(directory)).config, "float32")
    tensors = load_file(str(directory / "model.safetensors"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, str(directory / "model.safetensors"))
    check_same(spec, directory)
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, str(directory / "model.safetensors"))
    with pytest.raises(WeightsError, match="differs from"):
        loaded(spec, SafetensorsCheckpoint(directory), LateRuntime())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mirage", "mirage-static"])
def test_the_emulated_devices(name: str, dtype: str, tmp_path: Path, delays) -> None:
    """Their rules hold: a buffer that changes under a copy is a fault there."""
    directory = small("qwen3", tmp_path, shards=3)
    spec = read_spec(resolve(str(directory)).config, dtype)
    backend = device(name)
    decoder, plain = (
        build(spec, Ops(backend, block_tokens=backend.storage.block_tokens[0])),
        build(spec, reference_ops()),
    )
    report = load(decoder, SafetensorsCheckpoint(directory), backend.device)
    one = load(plain, SafetensorsCheckpoint(directory), reference_ops().backend.device)
    assert report.weight_bytes == one.weight_bytes
    got = backend.device.to_host([_held(h).to(torch.float32) for h in decoder.holders if h.sources]).get()
    for array, holder in zip(got, (h for h in plain.holders if h.sources), strict=True):
        assert np.array_equal(array, _held(holder).to(torch.float32).numpy())
    backend.close()


def _held(holder) -> torch.Tensor:
    return holder.value if hasattr(holder, "value") else holder.packed.data[0]


def test_a_device_that_is_the_host_reads_as_ever(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("drivetrain.models.build.Feed", None)
    directory = small("llama", tmp_path)
    loaded(
        read_spec(resolve(str(directory)).config, "float32"),
        SafetensorsCheckpoint(directory),
        reference_ops().backend.device,
    )


# -- faults ------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path: Path):
    """A checkpoint in shards, opened, and its spec; what comes after may damage it."""
    directory = small("llama", tmp_path, shards=3)
    spec = read_spec(resolve(str(directory)).config, "float32")
    return spec, SafetensorsCheckpoint(directory), sorted(directory.glob("*.safetensors"))


def quiet() -> bool:
    """Whether no reader is left."""
    return not [t for t in threading.enumerate() if t.name.startswith("weights")]


def open_files() -> list[str]:
    return [
        os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")
    ]


def refused(broken, match: str, runtime: LateRuntime | None = None, kind=WeightsError) -> LateRuntime:
    spec, checkpoint, shards = broken
    runtime = runtime or LateRuntime()
    with pytest.raises(kind, match=match):
        loaded(spec, checkpoint, runtime)
    assert quiet() and not runtime.busy(), "readers and copies have come to their end"
    assert not [name for name in open_files() if name.startswith(str(shards[0].parent))]
    return runtime


@pytest.mark.parametrize("victim", [0, 1, -1])
def test_a_shard_that_got_shorter(broken, victim: int) -> None:
    shard = broken[2][victim]
    os.truncate(shard, shard.stat().st_size - 3)
    refused(broken, rf"{shard.name} is damaged or cut short: \d+ more bytes are needed")


@pytest.mark.parametrize("victim", [0, 1, -1])
def test_a_shard_that_is_gone(broken, victim: int) -> None:
    broken[2][victim].unlink()
    refused(broken, rf"{broken[2][victim].name} can't be read: .*No such file")


def test_a_shard_that_is_no_file_any_more(broken) -> None:
    broken[2][1].unlink()
    broken[2][1].mkdir()
    refused(broken, rf"{broken[2][1].name} can't be read: .*directory")


def test_a_disk_that_fails(broken, monkeypatch) -> None:
    plain, count = os.preadv, iter(range(10_000))

    def failing(*args):
        if next(count) == 40:
            raise OSError(5, "Input/output error")
        return plain(*args)

    monkeypatch.setattr(os, "preadv", failing)
    runtime = refused(broken, r"safetensors can't be read: .*Input/output error")
    assert len(runtime.buffers) <= 5


def test_reads_that_bring_less_than_asked_for(tmp_path: Path, monkeypatch) -> None:
    plain, draws = os.preadv, random.Random(3)

    def short(file, parts, offset):
        (part,) = parts
        return plain(file, [part[: draws.randint(1, len(part))]], offset)

    monkeypatch.setattr(os, "preadv", short)
    directory = small("llama", tmp_path)
    check_same(read_spec(resolve(str(directory)).config, "float32"), directory)


def test_a_copy_that_fails(broken) -> None:
    runtime = LateRuntime()
    runtime.fail_at = 17
    refused(broken, "planted: the copy failed", runtime, RuntimeError)
    assert len(runtime.uploads) == 17


def test_a_buffer_that_cannot_be_made(broken) -> None:
    runtime = LateRuntime()

    def none(shape, dtype):
        raise MemoryError("planted: no page-locked memory")

    runtime.host_buffer = none
    refused(broken, "planted: no page-locked memory", runtime, MemoryError)


def test_integers_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    directory = small("llama", tmp_path)
    tensors = load_file(str(directory / "model.safetensors"))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, str(directory / "model.safetensors"))
    runtime = LateRuntime()
    with pytest.raises(WeightsError, match=r"model\.norm\.weight of model\.safetensors has dtype int32"):
        loaded(read_spec(resolve(str(directory)).config, "float32"), SafetensorsCheckpoint(directory), runtime)
    assert not runtime.uploads and not runtime.buffers and quiet()


# -- the feed alone ----------------------------------------------------------------------------------------------


def test_reading_goes_ahead_no_further_than_the_buffers(tmp_path: Path, monkeypatch) -> None:
    raw = np.random.default_rng(0).integers(0, 256, 40_000, np.uint8)
    (tmp_path / "raw").write_bytes(bytes(7) + raw.tobytes())
    plain, reads = feeds.Files.read, []

    def noted(self, path, offset, into):
        reads.append(offset)
        plain(self, path, offset, into)

    monkeypatch.setattr(feeds.Files, "read", noted)
    stored = Stored(path=tmp_path / "raw", offset=7, dtype="uint8")
    runtime = LateRuntime()
    plan = [Run(stored=stored, first=first, count=10_000) for first in (0, 30_000, 10_000, 20_000)]
    with runtime.activate(), Feed(plan, torch.uint8, runtime) as feed:
        deadline = time.monotonic() + 10
        while len(reads) < 5 and time.monotonic() < deadline:
            time.sleep(1e-3)
        time.sleep(0.05)
        assert sorted(reads) == [7 + 1000 * i for i in range(5)], "all buffers, before anything is asked for; no more"
        targets = [torch.zeros(100, 100, dtype=torch.uint8), torch.zeros(0, 3, dtype=torch.uint8)]
        for target in targets:
            feed.fill(target)
        assert len(reads) <= 15
        rest = torch.zeros(30_000, dtype=torch.uint8)
        feed.fill(rest)
        runtime.synchronize()
    assert np.array_equal(targets[0].view(-1).numpy(), raw[:10_000])
    assert np.array_equal(rest.numpy(), np.concatenate([raw[30_000:], raw[10_000:30_000]]))
    assert len(runtime.buffers) == 5 and len(reads) == 40


def test_a_checkpoint_smaller_than_the_ring_makes_few_buffers(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(bytes(1500))
    runtime = LateRuntime()
    plan = [Run(stored=Stored(path=tmp_path / "raw", offset=0, dtype="float32"), first=5, count=370)]
    with runtime.activate(), Feed(plan, torch.float32, runtime) as feed:
        target = torch.ones(370)
        feed.fill(target)
        runtime.synchronize()
    assert not target.any() and len(runtime.buffers) == 2


@pytest.mark.parametrize("hole", ["gap", "overlap", "tail"])
def test_files_whose_tensors_do_not_lie_end_to_end(hole: str, tmp_path: Path) -> None:
    begin = {"gap": 9, "overlap": 7, "tail": 8}[hole]
    table = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [begin, begin + 4]},
    }
    raw = json.dumps(table).encode()
    data = bytes(begin + 4 + (hole == "tail"))
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    with pytest.raises(WeightsError, match=r"tensors end at byte" if hole == "tail" else r"tensor b begins at byte"):
        SafetensorsCheckpoint(tmp_path)


def test_names_come_from_the_family(tmp_path: Path) -> None:
    """The plan names every tensor of the checkpoint once: nothing is read twice, nothing is left out."""
    directory = small("gemma3", tmp_path, layer_types=["sliding_attention", "full_attention"])
    spec = read_spec(resolve(str(directory)).config, "float32")
    checkpoint = SafetensorsCheckpoint(directory)
    asked: list[str] = []
    plain = checkpoint.stored
    checkpoint.stored = lambda name: asked.append(name) or plain(name)
    loaded(spec, checkpoint, LateRuntime(pause=0))
    assert sorted(asked) == sorted(expected_tensors(spec, naming_of(spec)))
