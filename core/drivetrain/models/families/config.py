"""Reading Hugging Face style configurations, old and new. Every complaint names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from drivetrain.errors import ModelError
from drivetrain.models.spec import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
LAYER_TYPES = ("full_attention", "sliding_attention")
LARGEST = 1 << 24  # of a size; no product of the sizes of one weight leaves 64 bits
LIMITS = {
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position_embeddings": 2**31 - 1,
    "original_max_position_embeddings": 2**31 - 1,
    "sliding_window": 2**31 - 1,
}


class Fields:
    """A configuration's values, checked as they are taken. Null counts as absent."""

    def __init__(self, config: Mapping[str, Any], *, within: str = "") -> None:
        """``within``: prefix of the keys in messages, for a nested configuration."""
        self._config = config
        self._within = within
        if self.has("quantization_config"):
            raise ModelError(
                f"{within}quantization_config asks for quantized weights, which are not served yet",
                fix="use a checkpoint with float weights",
            )

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._config.get(key) is not None

    def raw(self, key: str) -> Any:
        """The value as it is, None when absent."""
        return self._config.get(key)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more."""
        value = self._config.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"the configuration lacks {self._within}{key}")
        if not _finite(value) or int(value) != value or value < 1:
            raise self.wrong(key, "a whole number of 1 or more")
        limit = LIMITS.get(key, LARGEST)
        if value > limit:
            raise self.wrong(key, f"at most {limit}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._config.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"the configuration lacks {self._within}{key}")
        if not _finite(value) or not value > 0:
            raise self.wrong(key, "a positive number")
        return float(value)

    def maybe_number(self, key: str) -> float | None:
        """A positive number, or None when absent."""
        return self.number(key) if self.has(key) else None

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of ``count`` positive numbers."""
        values = self._config.get(key)
        if values is None:
            raise ModelError(f"the configuration lacks {self._within}{key}")
        listed = isinstance(values, list | tuple) and len(values) == count
        if not listed or not all(_finite(one) and one > 0 for one in values):
            raise self.wrong(key, f"a list of {count} positive numbers")
        return tuple(float(one) for one in values)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def activation(self, key: str, default: str) -> Activation:
        """The gate's activation."""
        name = self._config.get(key) or default
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise self.wrong(key, f"one of {', '.join(sorted(ACTIVATIONS))}")
        return ACTIVATIONS[name]

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them, as a tuple."""
        value = self._config.get(key)
        if value is None:
            return ()
        ids = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(one, int) and 0 <= one < 2**31 for one in ids):
            raise self.wrong(key, "a token id or a list of them")
        return ids

    def layer_types(self, count: int) -> tuple[str, ...] | None:
        """``layer_types``, one a layer, each known; None when absent."""
        if not self.has("layer_types"):
            return None
        types = self._config["layer_types"]
        if not isinstance(types, list | tuple) or len(types) != count:
            raise self.wrong("layer_types", f"a list of {count}, one for each layer")
        for kind in types:
            if kind not in LAYER_TYPES:
                raise ModelError(f"{self._within}layer_types has {kind!r}", fix=f"supported: {', '.join(LAYER_TYPES)}")
        return tuple(types)

    def refuse(self, key: str, why: str) -> None:
        """Refuse a configuration in which ``key`` is set to anything but null, false or 0."""
        if self._config.get(key):
            raise ModelError(f"{self._within}{key} is {self._config[key]!r}: {why}")

    def wrong(self, key: str, allowed: str) -> ModelError:
        """The error for a value that is not allowed."""
        shown = repr(self._config.get(key))
        shown = shown if len(shown) <= 100 else shown[:97] + "..."
        return ModelError(f"{self._within}{key} is {shown}; it must be {allowed}")


def _finite(value: Any) -> bool:
    """Whether a value is a number that a float holds; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**1000


def head_dim_of(fields: Fields, hidden: int, heads: int) -> int:
    """``head_dim``, or the hidden size shared out among the heads."""
    if not fields.has("head_dim") and hidden % heads:
        raise ModelError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}", fix="give head_dim")
    return fields.whole("head_dim", hidden // heads)


def check_heads(heads: int, kv_heads: int) -> None:
    """Query heads are shared out evenly among KV heads."""
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")


def sliding_layers(fields: Fields, count: int, *, every: int) -> tuple[bool, ...]:
    """Which layers have a window: ``layer_types``, else all but each n-th (``sliding_window_pattern`` or ``every``)."""
    types = fields.layer_types(count)
    if types is not None:
        return tuple(kind == "sliding_attention" for kind in types)
    key = "sliding_window_pattern" if fields.has("sliding_window_pattern") else "_sliding_window_pattern"
    pattern = fields.whole(key, every)
    return tuple((layer + 1) % pattern != 0 for layer in range(count))


def upper_windows(fields: Fields) -> tuple[int | None, ...]:
    """Each layer's window as Qwen's configurations give it: none without ``use_sliding_window``, else the layers that
    ``layer_types`` names, or those from ``max_window_layers`` on."""
    count = fields.whole("num_hidden_layers")
    if not fields.flag("use_sliding_window"):
        return (None,) * count
    window = fields.whole("sliding_window", 4096)
    types = fields.layer_types(count)
    if types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = fields.whole("max_window_layers", 28) if fields.raw("max_window_layers") != 0 else 0
    return tuple(window if layer >= first else None for layer in range(count))
