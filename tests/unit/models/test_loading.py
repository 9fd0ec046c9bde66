"""Loading: planned bytes, faults named before anything is read, tied and untied heads, names as found in the wild."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drivetrain.errors import ModelError, WeightsError
from drivetrain.models.build import build, load, planned_bytes
from drivetrain.models.families import naming_of, read_spec
from drivetrain.models.naming import Naming, expected_tensors, path_naming
from drivetrain.models.source import resolve
from drivetrain.models.weights.checkpoint import DummyCheckpoint, TensorInfo
from drivetrain_api.v1 import Packed, Provided, torch_dtype
from tests.checkpoints import VARIANTS, random_ids, tiny_checkpoint
from tests.unit.models.driving import loaded, reference_ops, run, small_spec


class MemoryCheckpoint:
    """Tensors in memory; counts what is read."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.reads = []

    def infos(self):
        return {
            n: TensorInfo(shape=tuple(t.shape), dtype="float32", nbytes=t.numel() * 4) for n, t in self.tensors.items()
        }

    def read(self, name, dtype):
        self.reads.append(name)
        return self.tensors[name].to(dtype)

    def close(self):
        pass


def in_memory(directory):
    return MemoryCheckpoint(load_file(str(directory / "model.safetensors")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["gemma3", "gemma3-untied", "llama-biases", "qwen3"])
def test_planned_bytes_are_loaded_bytes(variant, dtype, tmp_path):
    directory = tiny_checkpoint(variant, tmp_path / "model")
    decoder, report = loaded(directory, dtype)
    assert planned_bytes(decoder.spec, reference_ops()) == report.weight_bytes
    file = sum(t.numel() for t in load_file(str(directory / "model.safetensors")).values())
    ropes = sum(r.rotary_dim // 2 * 4 for r in decoder.spec.ropes)
    mixers = [layer.mixer for layer in decoder.spec.layers if layer.mixer.head_norm is not None]
    repeated = sum((m.num_heads + m.num_kv_heads - 2) * m.head_dim for m in mixers)  # a row a head, not one a kind
    assert report.weight_bytes == (file + repeated) * (4 if dtype == "float32" else 2) + ropes
    assert report.peak_bytes >= report.weight_bytes and report.seconds > 0


def test_every_tensor_is_read_once(tmp_path):
    checkpoint = in_memory(tiny_checkpoint("gemma3", tmp_path / "model"))
    spec = read_spec(resolve(str(tmp_path / "model")).config, "float32")
    ops = reference_ops()
    seen = []
    load(build(spec, ops), checkpoint, ops.backend.device, lambda done, count: seen.append((done, count)))
    assert sorted(checkpoint.reads) == sorted(checkpoint.tensors)
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]


class CopyingLinear:
    """Packs into a transposed copy of its own, and tells so."""

    def __init__(self, spec):
        self.spec = spec

    def packed_bytes(self, spec):
        return (spec.in_features * spec.out_features + spec.out_features * spec.bias) * 4

    def pack(self, weight, bias):
        return Packed(
            data=(weight.t().clone(), bias),
            nbytes=self.packed_bytes(self.spec),
            peak_bytes=self.packed_bytes(self.spec),
            keeps_source=False,
        )

    def apply(self, x, packed):
        weight, bias = packed.data
        return x @ weight if bias is None else x @ weight + bias


def test_a_backend_that_packs_copies_is_counted(tmp_path):
    from dataclasses import replace

    from drivetrain.ops import Ops
    from drivetrain_api.v1 import Decline
    from tests.unit.models.driving import BLOCK, reference_backend

    def provide(spec):
        if spec.op == "linear/1":
            return Provided(implementation=CopyingLinear(spec), label="copying")
        return Decline(reason="not this one")

    directory = tiny_checkpoint("gemma3", tmp_path / "model")
    plain, report = loaded(directory)
    ops = Ops(replace(reference_backend(), provide=provide), block_tokens=BLOCK)
    decoder = build(plain.spec, ops)
    copied = load(decoder, in_memory(directory), ops.backend.device)
    head = plain.spec.vocabulary * plain.spec.hidden * 4  # tied: the embedding and a packed copy of it
    assert copied.weight_bytes == report.weight_bytes + head == planned_bytes(plain.spec, ops)
    largest = max(h.planned_bytes() for h in decoder.holders)
    assert copied.weight_bytes < copied.peak_bytes + 1 <= copied.weight_bytes + 2 * largest + 1
    ids = random_ids(20)
    assert torch.allclose(run(decoder, ids, [20]), run(plain, ids, [20]), atol=1e-4)


def test_all_faults_are_named_at_once_before_anything_is_read(tmp_path):
    directory = tiny_checkpoint("llama", tmp_path / "model")
    checkpoint = in_memory(directory)
    del checkpoint.tensors["model.layers.1.self_attn.k_proj.weight"]
    checkpoint.tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(77, 61)
    checkpoint.tensors["model.layers.2.self_attn.q_proj.bias"] = torch.zeros(60)
    spec = read_spec(resolve(str(directory)).config, "float32")
    ops = reference_ops()
    with pytest.raises(WeightsError) as caught:
        load(build(spec, ops), checkpoint, ops.backend.device)
    text = str(caught.value)
    assert "1 missing: model.layers.1.self_attn.k_proj.weight" in text
    assert "model.layers.0.mlp.up_proj.weight has shape [77, 61], the model needs [77, 60]" in text
    assert "model.layers.2.self_attn.q_proj.bias" in text
    assert checkpoint.reads == []


def test_a_tied_model_may_repeat_its_head_but_not_contradict_it(tmp_path):
    directory = tiny_checkpoint("qwen3", tmp_path / "model")
    checkpoint = in_memory(directory)
    spec = read_spec(resolve(str(directory)).config, "float32")
    ops = reference_ops()
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["model.embed_tokens.weight"].clone()
    load(build(spec, ops), checkpoint, ops.backend.device)
    checkpoint.tensors["lm_head.weight"][5, 5] += 1.0
    with pytest.raises(WeightsError, match=r"lm_head.weight differs from model.embed_tokens.weight.*tie_word_embedd"):
        load(build(spec, ops), checkpoint, ops.backend.device)


def test_an_untied_model_needs_its_head(tmp_path):
    checkpoint = in_memory(tiny_checkpoint("llama", tmp_path / "model"))
    del checkpoint.tensors["lm_head.weight"]
    ops = reference_ops()
    spec = read_spec(resolve(str(tmp_path / "model")).config, "float32")
    with pytest.raises(WeightsError, match=r"1 missing: lm_head\.weight"):
        load(build(spec, ops), checkpoint, ops.backend.device)


@pytest.mark.parametrize(
    "rename",
    [
        lambda n: n.replace("model.", "language_model.model.", 1),
        lambda n: n.replace("model.", "model.language_model.", 1),
    ],
)
def test_text_part_of_a_model_with_vision(rename, tmp_path):
    directory = tiny_checkpoint("gemma3", tmp_path / "model")
    plain, _ = loaded(directory)
    text = json.loads((directory / "config.json").read_text())
    tensors = load_file(str(directory / "model.safetensors"))
    nested = tmp_path / "nested"
    nested.mkdir()
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "eos_token_id": [1, 106],
    }
    (nested / "config.json").write_text(json.dumps(outer))
    renamed = {rename(name): tensor.contiguous() for name, tensor in tensors.items()}
    renamed["vision_tower.encoder.layers.0.weight"] = torch.zeros(3)
    renamed["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(3)
    save_file(renamed, str(nested / "model.safetensors"))
    decoder, _ = loaded(nested)
    assert decoder.spec.eos_ids == (1, 106)
    ids = random_ids(20)
    assert torch.equal(run(decoder, ids, [20]), run(plain, ids, [20]))


def test_the_same_parameter_under_two_names_is_refused(tmp_path):
    checkpoint = in_memory(tiny_checkpoint("gemma3", tmp_path / "model"))
    checkpoint.tensors["language_model.model.norm.weight"] = checkpoint.tensors["model.norm.weight"]
    ops = reference_ops()
    spec = read_spec(resolve(str(tmp_path / "model")).config, "float32")
    with pytest.raises(WeightsError, match=r"model.norm.weight twice"):
        load(build(spec, ops), checkpoint, ops.backend.device)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_dummy_weights_of_every_variant_run(variant, tmp_path):
    directory = tiny_checkpoint(variant, tmp_path / "model")
    spec = read_spec(json.loads((directory / "config.json").read_text()), "float32")
    expected = expected_tensors(spec, naming_of(spec))
    stored = {name: tuple(t.shape) for name, t in load_file(str(directory / "model.safetensors")).items()}
    assert expected == stored
    ops = reference_ops()
    decoder = build(spec, ops)
    load(decoder, DummyCheckpoint(expected, "float32"), ops.backend.device)
    logits = run(decoder, random_ids(12, vocabulary=spec.vocabulary), [12])
    assert torch.isfinite(logits).all() and float(logits.std()) > 0


def test_a_checkpoint_may_hold_several_parameters_in_one_tensor():
    spec = small_spec()
    separate = DummyCheckpoint(expected_tensors(spec, path_naming(spec)), "float32")
    tensors = {name: separate.read(name, torch.float32) for name in separate.infos()}
    names = {name: (name,) for name in tensors}
    for layer in range(3):
        paths = [f"layers.{layer}.mixer.{part}.weight" for part in "qkv"]
        tensors[f"{layer}.qkv"] = torch.cat([tensors.pop(path) for path in paths])
        names = {n: p for n, p in names.items() if n not in paths} | {f"{layer}.qkv": tuple(paths)}
    # gate and q in one tensor: parts that the decoder does not join are cut out
    tensors["odd"] = torch.cat([tensors.pop("layers.0.ffn.down.weight"), tensors.pop("layers.1.ffn.down.weight")])
    names = {n: p for n, p in names.items() if ".down." not in n or ".2." in n}
    names["odd"] = ("layers.0.ffn.down.weight", "layers.1.ffn.down.weight")
    ops = reference_ops()
    plain, joined = build(spec, ops), build(spec, ops)
    load(plain, separate, ops.backend.device, naming=path_naming(spec))
    load(joined, MemoryCheckpoint(tensors), ops.backend.device, naming=Naming(names=names))
    ids = random_ids(20, vocabulary=97)
    assert torch.equal(run(plain, ids, [20]), run(joined, ids, [20]))


@pytest.mark.parametrize("layers", [range(0, 4), range(2, 2), range(1, 0), range(0, 3, 2), range(-1, 2)])
def test_a_range_that_is_no_run_of_layers(layers):
    with pytest.raises(ModelError, match="not a run of the model's 3 layers"):
        build(small_spec(), reference_ops(), layers=layers)


def test_weights_are_converted_to_the_dtype_asked_for(tmp_path):
    decoder, _ = loaded(tiny_checkpoint("gemma3", tmp_path / "model"), "bfloat16")
    floats = {h.value.dtype for h in decoder.holders if h.sources and hasattr(h, "value")}
    assert floats == {torch_dtype("bfloat16")}
    assert decoder.logits(torch.zeros(2, 60, dtype=torch.bfloat16)).dtype == torch.float32
