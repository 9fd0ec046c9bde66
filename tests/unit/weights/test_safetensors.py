"""Safetensors checkpoints: equal to what Transformers wrote; every fault is an error that names the culprit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drivetrain.errors import WeightsError
from drivetrain.models.weights import safetensors_files
from drivetrain.models.weights.checkpoint import TensorInfo, check_tensors
from drivetrain.models.weights.safetensors_files import INDEX, SafetensorsCheckpoint
from tests.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("sharded"), shards=3)


@pytest.fixture
def broken(sharded: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(sharded, tmp_path / "broken"))


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def test_single_and_sharded_hold_the_same(single: Path, sharded: Path):
    one, many = SafetensorsCheckpoint(single), SafetensorsCheckpoint(sharded)
    truth = load_file(single / "model.safetensors")
    assert dict(one.infos()) == dict(many.infos())
    assert set(truth) == set(one.infos())
    for name, tensor in truth.items():
        info = one.infos()[name]
        assert info == TensorInfo(shape=tuple(tensor.shape), dtype="float32", nbytes=tensor.numel() * 4)
        assert torch.equal(one.read(name, torch.float32), tensor)
        assert torch.equal(many.read(name, torch.bfloat16), tensor.to(torch.bfloat16))
    one.close()
    many.close()


def test_an_index_is_not_needed(sharded: Path, tmp_path: Path):
    for path in shards(sharded):
        shutil.copy(path, tmp_path)
    assert dict(SafetensorsCheckpoint(tmp_path).infos()) == dict(SafetensorsCheckpoint(sharded).infos())


def test_missing_shard(broken: Path):
    victim = shards(broken)[1]
    victim.unlink()
    with pytest.raises(WeightsError, match=victim.name):
        SafetensorsCheckpoint(broken)


@pytest.mark.parametrize("keep", [0, 5, 8, 60, 2000, -1])
def test_truncated(broken: Path, keep: int):
    victim = shards(broken)[1]
    data = victim.read_bytes()
    victim.write_bytes(data[:keep])
    with pytest.raises(WeightsError, match=victim.name):
        SafetensorsCheckpoint(broken)


def test_index_names_a_tensor_that_its_shard_lacks(broken: Path):
    index = json.loads((broken / INDEX).read_text())
    first, last = shards(broken)[0].name, shards(broken)[-1].name
    name = next(n for n, shard in index["weight_map"].items() if shard == first)
    index["weight_map"][name] = last
    (broken / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=f"{name} is in {last}"):
        SafetensorsCheckpoint(broken)


def test_index_names_a_tensor_that_is_nowhere(broken: Path):
    index = json.loads((broken / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = shards(broken)[0].name
    (broken / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"model\.extra\.weight"):
        SafetensorsCheckpoint(broken)


def test_index_may_not_lead_elsewhere(broken: Path):
    index = json.loads((broken / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../other.safetensors")
    (broken / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="outside the checkpoint"):
        SafetensorsCheckpoint(broken)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "{"])
def test_index_that_is_none(broken: Path, text: str):
    (broken / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=INDEX):
        SafetensorsCheckpoint(broken)


def test_tensor_in_two_shards(broken: Path):
    (broken / INDEX).unlink()
    name = next(iter(load_file(shards(broken)[0])))
    save_file({name: torch.zeros(2)}, broken / "zz.safetensors")
    with pytest.raises(WeightsError, match=rf"{name} is in both .* and zz\.safetensors"):
        SafetensorsCheckpoint(broken)


def write_header(path: Path, header: str, data: bytes) -> None:
    raw = header.encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


ENTRY = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'


@pytest.mark.parametrize(
    "header, message",
    [
        (f'{{"a": {ENTRY}, "a": {ENTRY}}}', "a is in model.safetensors twice"),
        ('{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', "claims 8 bytes"),
        ('{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', r"the shape \[-2\]"),
        ('{"a": {"dtype": "F32", "shape": [2.5], "data_offsets": [0, 8]}}', r"the shape \[2\.5\]"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, true]}}', "the offsets 0, True"),
        ('{"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}', "unknown dtype"),
        ("[1, 2]", "a list, not tensors by name"),
        ('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}', "ends at byte"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}', "claims -8 bytes"),
        ('{"a": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}', "unknown dtype X9"),
        ('{"a": {"dtype": "F32"}}', "no dtype, shape and offsets"),
        ('{"a": 3}', "no dtype, shape and offsets"),
        ("[" * 5000, "not JSON"),
    ],
)
def test_header_faults(tmp_path: Path, header: str, message: str):
    write_header(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(WeightsError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_what_is_no_file_is_named_with_its_fix(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.mkdir()
    with pytest.raises(WeightsError, match=r"model\.safetensors can't be read: Is a directory"):
        SafetensorsCheckpoint(tmp_path)
    path.rmdir()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match=r"model\.safetensors can't be read: No such file") as caught:
        SafetensorsCheckpoint(tmp_path)
    assert caught.value.fix == "download it"


def test_a_header_longer_than_the_format_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(safetensors_files, "MOST_HEADER", 10)
    write_header(tmp_path / "model.safetensors", f'{{"a": {ENTRY}}}', bytes(8))
    with pytest.raises(WeightsError, match="the format allows 10"):
        SafetensorsCheckpoint(tmp_path)


def test_offsets_that_overlap(tmp_path: Path):
    write_header(tmp_path / "model.safetensors", f'{{"a": {ENTRY}, "b": {ENTRY}}}', bytes(8))
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        SafetensorsCheckpoint(tmp_path).read("a", torch.float32)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_is_an_error_of_ours_or_none(single: Path, tmp_path_factory: pytest.TempPathFactory, data):
    """Whatever bytes of the header change: WeightsError, or a checkpoint that can be read."""
    raw = bytearray((single / "model.safetensors").read_bytes()[:20000])
    end = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    directory = tmp_path_factory.mktemp("damaged")
    (directory / "model.safetensors").write_bytes(bytes(raw) + (single / "model.safetensors").read_bytes()[20000:])
    try:
        found = SafetensorsCheckpoint(directory)
        for name in list(found.infos())[:3]:
            found.read(name, torch.float32)
    except WeightsError as error:
        assert "model.safetensors" in str(error)


def test_integers_are_not_weights(tmp_path: Path):
    save_file({"packed": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    with pytest.raises(WeightsError, match=r"packed of model\.safetensors has dtype int8"):
        checkpoint.read("packed", torch.float32)


def test_pickles_are_never_read(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin would be unpickled"):
        SafetensorsCheckpoint(tmp_path)


def test_all_that_does_not_fit_is_named_at_once():
    expected = {"a.weight": (2, 3), "layer.one.weight": (4,), "layer.two.weight": (4,)}
    found = {
        "a.weight": TensorInfo(shape=(3, 2), dtype="float32", nbytes=24),
        "layer.twoo.weight": TensorInfo(shape=(4,), dtype="float32", nbytes=16),
        "rotary.inv_freq": TensorInfo(shape=(4,), dtype="float32", nbytes=16),
    }
    with pytest.raises(WeightsError) as caught:
        check_tensors(expected, found, frozenset({"rotary.inv_freq"}))
    text = str(caught.value)
    assert "a.weight has shape [3, 2], the model needs [2, 3]" in text
    assert "2 missing: layer.one.weight" in text
    assert "layer.two.weight (there is layer.twoo.weight)" in text
    assert "1 that the model does not have: layer.twoo.weight" in text
    assert "inv_freq" not in text
    check_tensors({"a.weight": (3, 2)}, {"a.weight": found["a.weight"]})
