"""GGUF files: values, names and configurations equal to what Transformers makes of the same file; damage is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.errors import DrivetrainError, ModelError, WeightsError
from drivetrain.models.families import read_spec
from drivetrain.models.source import resolve
from drivetrain.models.spec import ModelSpec
from drivetrain.models.weights.checkpoint import TensorInfo
from drivetrain.models.weights.gguf_config import llama3_divisors
from drivetrain.models.weights.gguf_file import GgufFile
from tests.unit.weights.ggufs import tiny_gguf

K = gguf.GGMLQuantizationType
EVEN: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama grouped": ("llama", dict(EVEN, num_key_value_heads=2, tie_word_embeddings=True)),
    "llama packed": ("llama", dict(EVEN, kinds={"blk.0.attn_q": K.Q8_0, "blk.1.ffn": K.Q4_0, "token_embd": K.Q8_0})),
    "llama halves": ("llama", dict(kinds={"blk.0": K.F16, "output.": K.BF16})),
    "llama linear": ("llama", dict(metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})),
    "qwen3": ("qwen3", {}),
    "qwen3 of 128": ("qwen3", dict(head_dim=128)),  # Transformers takes no other head size from a GGUF file
    "qwen3 packed": ("qwen3", dict(EVEN, kinds={"blk.0.attn_k.": K.Q8_0, "blk.2.ffn_down": K.Q5_1})),
    "gemma3": ("gemma3", dict(num_hidden_layers=7, layer_types=None, query_pre_attn_scalar=24)),
    "gemma3 packed": ("gemma3", dict(EVEN, layer_types=None, kinds={"blk.0.attn_v": K.Q8_0, "token_embd": K.Q8_0})),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_written(tmp_path: Path, case: str):
    family, options = CASES[case]
    truth = tiny_gguf(family, tmp_path / "m.gguf", **options)
    checkpoint = resolve(str(tmp_path / "m.gguf")).open_checkpoint()
    assert set(checkpoint.infos()) == set(truth)
    for name, value in truth.items():
        assert checkpoint.infos()[name].shape == tuple(value.shape)
        found = checkpoint.read(name, torch.float32)
        exact = not (family == "gemma3" and name.endswith("norm.weight"))  # stored as 1 + w, which rounds w
        assert torch.equal(found, value) if exact else torch.allclose(found, value, rtol=0, atol=1e-6), name
        assert torch.equal(checkpoint.read(name, torch.bfloat16), found.to(torch.bfloat16))
    checkpoint.close()


@pytest.mark.parametrize("case", ["llama", "llama grouped", "llama packed", "qwen3 of 128", "gemma3"])
def test_values_and_configuration_are_those_of_transformers(tmp_path: Path, case: str):
    from transformers import AutoModelForCausalLM, GgufConfig

    family, options = CASES[case]
    tiny_gguf(family, tmp_path / "m.gguf", **options)
    theirs = AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file="m.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    source = resolve(str(tmp_path / "m.gguf"))
    checkpoint = source.open_checkpoint()
    state = theirs.state_dict()
    for name, info in checkpoint.infos().items():
        assert torch.equal(checkpoint.read(name, torch.float32), dense(state[name], info)), name
    ours, reference = read_spec(source.config, "float32"), spec_of(theirs.config, source.config)
    assert ours.layers == reference.layers
    assert ours.ropes == reference.ropes
    assert (ours.vocabulary, ours.hidden, ours.tied) == (reference.vocabulary, reference.hidden, reference.tied)
    assert (ours.max_positions, ours.final_norm) == (reference.max_positions, reference.final_norm)
    assert ours.embed_scale == reference.embed_scale and ours.logit_soft_cap == reference.logit_soft_cap


def dense(value: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """The dense copy of a quantized tensor is bfloat16; floats stay as they are."""
    return value if info.dtype in ("ggml:0", "ggml:1", "ggml:30") else value.bfloat16().float()


def spec_of(theirs: Any, ours: Mapping[str, Any]) -> ModelSpec:
    """Transformers' configuration as our families read it. Of a GGUF file it has no ``architectures``, and the
    norms' epsilon as the float32 that is stored, and Gemma's query scale is that of heads of 256 whatever the heads."""
    config = theirs.to_dict()
    assert np.float32(config["rms_norm_eps"]) == np.float32(ours["rms_norm_eps"])
    more = {name: ours[name] for name in ("architectures", "rms_norm_eps", "query_pre_attn_scalar") if name in ours}
    return read_spec({**config, **more}, "float32")


def test_gemma_in_full(tmp_path: Path):
    tiny_gguf("gemma3", tmp_path / "m.gguf", num_hidden_layers=7, layer_types=None)
    config = resolve(str(tmp_path / "m.gguf")).config
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"]
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (8, 24)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1000000.0, 10000.0)
    assert config["tie_word_embeddings"] is True and config["rms_norm_eps"] == 1e-6
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (1, 2, 293)


def test_the_largest_gemma_scales_by_its_heads(tmp_path: Path):
    tiny_gguf("gemma3", tmp_path / "m.gguf", num_hidden_layers=62, layer_types=None)
    assert resolve(str(tmp_path / "m.gguf")).config["query_pre_attn_scalar"] == 15  # 60 / 4


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies(tmp_path: Path, factor: float):
    """What a converter stores is recognized as the rule that Transformers applies to the same configuration."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rule = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=64, rope_parameters=rule)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    stored = (plain / theirs.numpy()).astype(np.float32)
    assert np.allclose(llama3_divisors(64, 500000.0, factor), stored, rtol=1e-5)
    path = with_frequencies(tmp_path, stored)
    assert resolve(str(path)).config["rope_scaling"] == {k: v for k, v in rule.items() if k != "rope_theta"}


def test_unknown_frequencies_are_refused(tmp_path: Path):
    path = with_frequencies(tmp_path, np.linspace(1, 7, 32).astype(np.float32))
    with pytest.raises(ModelError, match="rope_freqs"):
        resolve(str(path))


def with_frequencies(directory: Path, values: np.ndarray) -> Path:
    """A Llama file that also holds ``rope_freqs``."""
    writer = gguf.GGUFWriter(directory / "m.gguf", "llama")
    for key, value in (
        ("block_count", 1),
        ("embedding_length", 128),
        ("feed_forward_length", 64),
        ("context_length", 131072),
        ("attention.head_count", 2),
        ("vocab_size", 32),
    ):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_tensor("rope_freqs.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory / "m.gguf"


def test_unsupported_architecture_and_rule(tmp_path: Path):
    tiny_gguf("llama", tmp_path / "m.gguf", metadata={"rope.scaling.type": "yarn"})
    with pytest.raises(ModelError, match=r"m\.gguf lacks the metadata llama\.rope\.scaling\.factor"):
        resolve(str(tmp_path / "m.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "strange")
    writer.add_tensor("a", np.zeros(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"other\.gguf is of the GGUF architecture 'strange'; supported: gemma2"):
        resolve(str(tmp_path / "other.gguf"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sound file."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    tiny_gguf("llama", path, num_hidden_layers=1, vocab_size=31)
    return path


def opened(path: Path) -> None:
    """All that reading does."""
    source = resolve(str(path))
    checkpoint = source.open_checkpoint()
    for name in checkpoint.infos():
        checkpoint.read(name, torch.float32)


def test_every_cut_is_an_error_that_names_the_file(small: Path, tmp_path: Path):
    whole = small.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(4, 2000, 37), *range(2000, len(whole), 1999), len(whole) - 40]:
        path.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"cut\.gguf"):
            opened(path)


def test_not_gguf(tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(ModelError, match="is a file but not GGUF"):
        resolve(str(path))
    with pytest.raises(WeightsError, match="is not a GGUF file"):
        GgufFile(path)
    path.write_bytes(b"")
    with pytest.raises(WeightsError, match=r"m\.gguf can't be read"):
        GgufFile(path)


@pytest.mark.parametrize(
    "at, value, message",
    [
        (4, (1).to_bytes(4, "little"), "version 1"),
        (8, (2**60).to_bytes(8, "little"), "claims"),
        (16, (2**60).to_bytes(8, "little"), "claims"),
        (24, (2**63).to_bytes(8, "little"), "bytes are needed"),
    ],
)
def test_absurd_sizes(small: Path, tmp_path: Path, at: int, value: bytes, message: str):
    path, whole = tmp_path / "m.gguf", small.read_bytes()
    path.write_bytes(whole[:at] + value + whole[at + len(value) :])
    with pytest.raises(WeightsError, match=message):
        GgufFile(path)


def test_sizes_that_can_not_be(tmp_path: Path):
    tiny_gguf("llama", tmp_path / "m.gguf", num_hidden_layers=1)
    whole = (tmp_path / "m.gguf").read_bytes()
    key = b"llama.attention.head_count\x04\x00\x00\x00"
    at = whole.index(key) + len(key)
    (tmp_path / "m.gguf").write_bytes(whole[:at] + bytes(4) + whole[at + 4 :])
    with pytest.raises(ModelError, match=r"m\.gguf has metadata of the wrong type or size"):
        resolve(str(tmp_path / "m.gguf"))


def test_arrays_nested_too_deeply(tmp_path: Path):
    key = b"general.name"
    nest = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    body = len(key).to_bytes(8, "little") + key + (9).to_bytes(4, "little") + nest * 20000
    (tmp_path / "m.gguf").write_bytes(head + body)
    with pytest.raises(WeightsError, match="too deeply"):
        GgufFile(tmp_path / "m.gguf")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damage_is_an_error_of_ours_or_none(small: Path, tmp_path_factory: pytest.TempPathFactory, data):
    raw = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(4, 3000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    path.write_bytes(bytes(raw))
    try:
        opened(path)
    except DrivetrainError as error:
        assert str(error)


# (name, first two and last value, sum of magnitudes), one of each stored type; the slow test below has all of them.
KNOWN = (
    ("model.embed_tokens.weight", [-0.007232666015625, 0.04296875, -0.0174560546875], 5044278.209246635),
    ("model.layers.3.mlp.gate_proj.weight", [-0.006195068359375, -0.04345703125, -0.01373291015625], 38670.81901550293),
    ("model.layers.0.mlp.down_proj.weight", [0.005218505859375, 0.021728515625, -0.0093994140625], 21697.93980407715),
    ("model.layers.17.self_attn.o_proj.weight", [-0.04443359375, -0.07373046875, -0.0096435546875], 14901.75802809),
    ("model.layers.9.self_attn.q_norm.weight", [0.90234375, -0.004119873046875, -0.10888671875], 240.23109436035156),
)


def test_the_real_model(real_gguf: Path):
    checkpoint = resolve(str(real_gguf)).open_checkpoint()
    infos = checkpoint.infos()
    assert len(infos) == 236 and sum(int(np.prod(i.shape)) for i in infos.values()) == 268098176
    for name, values, total in KNOWN:
        flat = checkpoint.read(name, torch.float32).reshape(-1)
        assert flat[[0, 1, -1]].tolist() == values, name
        assert float(flat.double().abs().sum()) == pytest.approx(total, rel=1e-12), name
    checkpoint.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_the_real_model_is_as_transformers_dequantizes_it(real_gguf: Path):
    from transformers import AutoModelForCausalLM, GgufConfig

    theirs = AutoModelForCausalLM.from_pretrained(
        str(real_gguf.parent),
        gguf_file=real_gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    source = resolve(str(real_gguf))
    checkpoint = source.open_checkpoint()
    state = theirs.state_dict()
    assert set(checkpoint.infos()) == set(state) - {"lm_head.weight"}
    for name, info in checkpoint.infos().items():
        assert torch.equal(checkpoint.read(name, torch.float32), dense(state[name], info)), name
    ours, reference = read_spec(source.config, "float32"), spec_of(theirs.config, source.config)
    assert ours.layers == reference.layers and ours.ropes == reference.ropes
