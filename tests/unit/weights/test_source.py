"""Finding a model: directories, files and the local hub cache; whatever is wrong is named with the way out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.errors import ModelError
from drivetrain.models.source import resolve
from tests.checkpoints import hf_greedy, random_ids, tiny_checkpoint
from tests.unit.weights.ggufs import tiny_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=1)


def test_directory(model: Path):
    source = resolve(str(model))
    assert (source.kind, source.path, source.eos_ids) == ("safetensors", model, (2, 4))
    assert source.config["architectures"] == ["LlamaForCausalLM"] and source.config["vocab_size"] == 293
    assert len(source.open_checkpoint().infos()) == 12
    assert resolve(str(model)).identity == source.identity


def test_identity_follows_the_weights(model: Path, tmp_path: Path):
    copy = Path(shutil.copytree(model, tmp_path / "tiny"))
    before = resolve(str(copy)).identity
    tiny_checkpoint("llama", copy, num_hidden_layers=1, seed=1)
    assert resolve(str(copy)).identity != before


def test_end_tokens_of_the_configuration(model: Path, tmp_path: Path):
    copy = Path(shutil.copytree(model, tmp_path / "tiny"))
    (copy / "generation_config.json").unlink()
    assert resolve(str(copy)).eos_ids == (2,)
    config = json.loads((copy / "config.json").read_text())
    del config["eos_token_id"]
    (copy / "config.json").write_text(json.dumps(config))
    assert resolve(str(copy)).eos_ids == ()


def test_gguf_alone_or_in_a_directory(tmp_path: Path):
    tiny_gguf("qwen3", tmp_path / "m.gguf", num_hidden_layers=1)
    for name in (tmp_path / "m.gguf", tmp_path):
        source = resolve(str(name))
        assert (source.kind, source.path) == ("gguf", tmp_path / "m.gguf")
        assert source.eos_ids == (2,) and source.config["architectures"] == ["Qwen3ForCausalLM"]
    shutil.copy(tmp_path / "m.gguf", tmp_path / "n.gguf")
    with pytest.raises(ModelError, match=r"no config\.json; name one of its GGUF files, such as .*m\.gguf"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "name, message",
    [
        ("{}/tinyy", r"tinyy does not exist; did you mean .*/tiny\?"),
        ("./no/such/place", "does not exist; check the path"),
        ("{}/nothing.gguf", "does not exist"),
        ("{}/tiny/model.safetensors", "is a file but not GGUF; give its directory: .*tiny"),
        ("{}/tiny/config.json", "is a file but not GGUF; give a directory or a GGUF file"),
        ("{}/tiny/pytorch_model.bin", "is a pickle, which can run code when loaded; use safetensors or GGUF"),
        ("{}/model.pt", "is a pickle"),
        ("{}", "has no config.json; give a model's directory"),
    ],
)
def test_what_is_wrong_is_named(model: Path, name: str, message: str):
    with pytest.raises(ModelError, match=message):
        resolve(name.format(model.parent))


@pytest.mark.parametrize("text, message", [("{", "can't be read"), ("[1]", "is not a JSON object"), ("\x00", "can't")])
def test_damaged_configuration(tmp_path: Path, text: str, message: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"config\.json {message}"):
        resolve(str(tmp_path))


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds two revisions of org/tiny."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    root = tmp_path / "models--org--tiny"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(model, root / "snapshots" / commit)
    for ref, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / ref).write_text(commit)
    return root


def test_hub_cache(hub: Path):
    for revision, commit in ((None, "a" * 40), ("v2", "b" * 40), ("b" * 40, "b" * 40)):
        source = resolve("org/tiny", revision)
        assert source.path == hub / "snapshots" / commit
        assert source.identity == f"hub:org/tiny@{commit}"


@pytest.mark.parametrize(
    "name, revision, message",
    [
        ("org/tiny", "v3", "holds org/tiny, but not revision v3; fetch it first: hf download org/tiny"),
        ("org/other", None, "neither a path nor in the local hub cache .*; fetch it first: hf download org/other"),
        ("tiny", None, "tiny is neither a path nor in the local hub cache"),
    ],
)
def test_what_the_hub_cache_lacks(hub: Path, name: str, revision: str | None, message: str):
    with pytest.raises(ModelError, match=message):
        resolve(name, revision)


def test_without_torch(model: Path):
    """Finding a model and reading its text happens in the front end, which loads no torch."""
    code = (
        "import sys; from drivetrain.config import EngineConfig; from drivetrain.tokens import load_text;"
        f"load_text(EngineConfig(model={str(model)!r})).chat([{{'role': 'user', 'content': 'a'}}]);"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tiny_checkpoints_are_reproducible(model: Path, tmp_path: Path):
    """The same arguments give the same bytes, and the reference says something other than one token again and again."""
    again = tiny_checkpoint("llama", tmp_path / "again", num_hidden_layers=1)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (again / name).read_bytes() == (model / name).read_bytes()
    tokens = hf_greedy(model, [random_ids(9, 1)], 24)
    assert tokens == hf_greedy(again, [random_ids(9, 1)], 24) and len(set(tokens[0])) > 3


@pytest.mark.parametrize("bad", ["two", 1.5, True, -1, ["x"], {"a": 1}])
def test_an_end_token_that_is_none_is_named(model, tmp_path, bad):

    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
    with pytest.raises(ModelError, match="eos_token_id is"):
        _ = resolve(str(copy)).eos_ids
