"""GraniteSWA: Granite with learned sinks, windows in most layers, and a theta for each layer, 0 for no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drivetrain.models.families import granite, llama
from drivetrain.models.families.config import Fields
from drivetrain.models.naming import Naming, named
from drivetrain.models.spec import AttentionMixer, LayerSpec, ModelSpec

ARCHITECTURES = ("GraniteSWAForCausalLM",)
DEFAULTS = {
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "tie_word_embeddings": True,
}
TABLE = llama.TABLE | {"mixer.sinks": "self_attn.sinks"}


def spec(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Read a GraniteSWA configuration. ModelError naming the key that is missing or not supported."""
    fields = Fields({**DEFAULTS, **config})
    model = granite.multiplied(
        llama.decoder(
            fields,
            dtype,
            architecture="GraniteSWAForCausalLM",
            windows=_windows(fields),
            biases=llama.attention_biases(fields, mlp=fields.flag("mlp_bias")),
        ),
        fields,
    )
    (rope,) = model.ropes
    thetas = _thetas(fields, rope.theta)
    used = sorted({theta for theta in thetas if theta})

    def layer(given: LayerSpec, theta: float) -> LayerSpec:
        assert isinstance(given.mixer, AttentionMixer)
        return replace(given, mixer=replace(given.mixer, sinks=True, rope=used.index(theta) if theta else None))

    return replace(
        model,
        layers=tuple(layer(each, theta) for each, theta in zip(model.layers, thetas, strict=True)),
        ropes=tuple(replace(rope, theta=theta) for theta in used),
    )


def naming(spec: ModelSpec) -> Naming:
    """Name the parameters as Hugging Face checkpoints do."""
    return Naming(names=named(spec, TABLE), ignored=(".rotary_emb.inv_freq",))


def _windows(fields: Fields) -> tuple[int | None, ...]:
    """Each layer's window: of all but every fourth layer, from the first on, unless ``layer_types`` says otherwise."""
    count = fields.whole("num_hidden_layers")
    types = fields.layer_types(count)
    sliding = [kind == "sliding_attention" for kind in types] if types else [layer % 4 != 0 for layer in range(count)]
    return tuple(fields.whole("sliding_window") if each else None for each in sliding)


def _thetas(fields: Fields, common: float) -> tuple[float, ...]:
    """Each layer's theta, 0 for none."""
    count = fields.whole("num_hidden_layers")
    given = fields.raw("layer_rope_theta")
    if given is None:
        return (common,) * count
    if not isinstance(given, list | tuple) or len(given) != count:
        raise fields.wrong("layer_rope_theta", f"a list of {count}, one for each layer")
    none = [each == 0 and not isinstance(each, bool) for each in given]
    values = [Fields({"layer_rope_theta": each}) for each in given]
    return tuple(0.0 if no else value.number("layer_rope_theta") for no, value in zip(none, values, strict=True))
