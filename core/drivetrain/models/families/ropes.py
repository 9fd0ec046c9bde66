"""Reading a configuration's ropes, in the old style and in the new one, with every rule of scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from drivetrain.errors import ModelError
from drivetrain.models.families.config import LAYER_TYPES, Fields
from drivetrain.models.spec import (
    BandScaling,
    DynamicScaling,
    LinearScaling,
    LongScaling,
    Rope,
    Scaling,
    YarnScaling,
)

TRAINED = "original_max_position_embeddings"


def read_rope(fields: Fields, head_dim: int, *, theta: float = 10000.0) -> Rope:
    """The model's one rope: ``rope_parameters`` as of Transformers 5, else ``rope_theta`` and ``rope_scaling``."""
    key = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    given = fields.raw(key) or {}
    for kind in LAYER_TYPES:
        if isinstance(given, Mapping) and kind in given:
            raise ModelError(f"{key} has {kind}", fix="all layers of this family share one rope; give its values alone")
    return rope_of(given, fields, key=key, head_dim=head_dim, theta=theta)


def rope_of(given: Mapping[str, Any], fields: Fields, *, key: str, head_dim: int, theta: float = 10000.0) -> Rope:
    """One rope. What ``given`` lacks is taken from the configuration's older top-level keys, then from ``theta``."""
    if not isinstance(given, Mapping):
        raise ModelError(f"{key} is {given!r}; it must be an object")
    rope = Fields(given, within=f"{key}.")
    kind = given.get("rope_type") or given.get("type") or "default"
    part = rope.maybe_number("partial_rotary_factor") or fields.maybe_number("partial_rotary_factor") or 1.0
    rotary = int(head_dim * part)
    if rotary % 2 or not 2 <= rotary <= head_dim:
        raise ModelError(
            f"{key}: {rotary} of a head's {head_dim} elements would be rotated; it must be an even part of them"
        )
    if kind not in RULES and kind != "default":
        raise ModelError(f"{key}.rope_type is {kind!r}", fix=f"supported: default, {', '.join(RULES)}")
    theta = rope.maybe_number("rope_theta") or fields.maybe_number("rope_theta") or theta
    scaling: Scaling | None = None
    factor = 1.0
    if kind in RULES:
        scaling, factor = RULES[kind](rope, fields, rotary)
    if theta <= 1 and isinstance(scaling, YarnScaling):
        raise ModelError(f"{key}: rope_theta is {theta}; with yarn it must be above 1")
    return Rope(theta=theta, rotary_dim=rotary, scaling=scaling, attention_factor=factor)


def _trained(rope: Fields, fields: Fields) -> int:
    """The length that the model was first trained for: the configuration's own key, then the rope's."""
    if fields.has(TRAINED):
        return fields.whole(TRAINED)
    return rope.whole(TRAINED) if rope.has(TRAINED) else fields.whole("max_position_embeddings")


def _times(rope: Fields, fields: Fields) -> float:
    """``factor``, or how many times the first length the model's is."""
    return rope.maybe_number("factor") or fields.whole("max_position_embeddings") / _trained(rope, fields)


def _linear(rope: Fields, fields: Fields, rotary: int) -> tuple[Scaling, float]:
    return LinearScaling(factor=rope.number("factor")), 1.0


def _dynamic(rope: Fields, fields: Fields, rotary: int) -> tuple[Scaling, float]:
    rope.refuse("alpha", "dynamic ropes are scaled by their factor only")
    if rotary == 2:
        raise ModelError("a dynamic rope must rotate more than 2 elements of a head")
    factor = rope.number("factor")
    if factor < 1:
        raise rope.wrong("factor", "1 or more")
    return DynamicScaling(factor=factor, original_positions=fields.whole("max_position_embeddings")), 1.0


def _bands(rope: Fields, fields: Fields, rotary: int) -> tuple[Scaling, float]:
    rule = BandScaling(
        factor=rope.number("factor"),
        low_factor=rope.number("low_freq_factor"),
        high_factor=rope.number("high_freq_factor"),
        original_positions=_trained(rope, fields),
    )
    return rule, 1.0


def _yarn(rope: Fields, fields: Fields, rotary: int) -> tuple[Scaling, float]:
    rule = YarnScaling(
        factor=_times(rope, fields),
        original_positions=_trained(rope, fields),
        fast_turns=rope.maybe_number("beta_fast") or 32.0,
        slow_turns=rope.maybe_number("beta_slow") or 1.0,
        truncate=rope.flag("truncate", True),
    )
    if rope.has("attention_factor"):
        return rule, rope.number("attention_factor")

    def grown(times: float) -> float:
        return 0.1 * times * math.log(rule.factor) + 1.0 if rule.factor > 1 else 1.0

    both = rope.raw("mscale") and rope.raw("mscale_all_dim")
    return rule, grown(rope.number("mscale")) / grown(rope.number("mscale_all_dim")) if both else grown(1.0)


def _long(rope: Fields, fields: Fields, rotary: int) -> tuple[Scaling, float]:
    for key in ("short_mscale", "long_mscale"):
        rope.refuse(key, "longrope is served with one attention factor")
    trained = _trained(rope, fields)
    rule = LongScaling(
        short=rope.numbers("short_factor", rotary // 2),
        long=rope.numbers("long_factor", rotary // 2),
        original_positions=trained,
    )
    if rope.has("attention_factor"):
        return rule, rope.number("attention_factor")
    times = _times(rope, fields)
    return rule, math.sqrt(1 + math.log(times) / math.log(trained)) if times > 1 and trained > 1 else 1.0


RULES = {"linear": _linear, "dynamic": _dynamic, "llama3": _bands, "yarn": _yarn, "longrope": _long}
