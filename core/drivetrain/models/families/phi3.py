"""Phi-3 and Phi-4: Llama's shape with one window or none; checkpoints hold q, k, v and gate, up joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.errors import ModelError
from drivetrain.models.families import llama
from drivetrain.models.families.config import Fields
from drivetrain.models.naming import Naming, named
from drivetrain.models.spec import ModelSpec

ARCHITECTURES = ("Phi3ForCausalLM",)
DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
JOINED = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj"),
    (("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
)
ROPES = ("default", "longrope")
OLDER = {"su": "longrope", "yarn": "longrope"}  # names that the family's first checkpoints give it


def spec(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Read a Phi-3 configuration. ModelError naming the key that is missing or not supported."""
    fields = Fields({**DEFAULTS, **config, **_ropes(config)})
    fields.refuse("attention_bias", "the family's attention has no biases")
    window = fields.whole("sliding_window") if fields.has("sliding_window") else None
    windows = (window,) * fields.whole("num_hidden_layers")
    return llama.decoder(fields, dtype, architecture="Phi3ForCausalLM", windows=windows, biases=llama.Biases())


def naming(spec: ModelSpec) -> Naming:
    """Name the parameters as Hugging Face checkpoints do."""
    names: dict[str, tuple[str, ...]] = {}
    for name, paths in named(spec, llama.TABLE).items():
        for parts, joined in JOINED:
            for part in parts:
                name = name.replace(f".{part}.", f".{joined}.")
        names[name] = (*names.get(name, ()), *paths)
    return Naming(names=names, ignored=(".rotary_emb.inv_freq",))


def _ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration's rope under the name that its rule has today."""
    key = "rope_scaling" if config.get("rope_scaling") is not None else "rope_parameters"
    given = config.get(key)
    if not isinstance(given, Mapping):
        return {}
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = OLDER.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in ROPES:
        raise ModelError(f"{key}.rope_type is {kind!r}", fix=f"supported: {', '.join((*ROPES, *OLDER))}")
    return {key: {**given, "rope_type": kind}}
