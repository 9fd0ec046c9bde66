"""The models that an accelerator is measured with, as configurations without weights, and the floors of their work.

A floor is what the card's own rates allow: bytes over its read bandwidth and operations over its rate of bfloat16
products. ``overlapped``: the larger of the two sums, the most that could be hoped for. ``serial``: products and
attention one after the other, each at the larger of its own two.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ELEMENT = 2  # bytes of a bfloat16
SHARED = {"torch_dtype": "bfloat16", "hidden_act": "silu"}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    **SHARED,
}
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    **SHARED,
}
MODELS: dict[str, dict[str, Any]] = {"A": LLAMA, "C": QWEN}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
}
TITLES = {"A": "the shape of Llama 3.1 8B", "C": "the shape of Qwen3 0.6B"}


def config_of(name: str, *, tiny: bool = False) -> dict[str, Any]:
    """Return a model's configuration; ``tiny``: the same family in a size for trying a script out."""
    return MODELS[name] | (TINY if tiny else {})


def write_model(name: str, folder: Path, *, tiny: bool = False, tokenizer: bool = False) -> Path:
    """Write a model's folder: its configuration, and a tokenizer for those who must decode what it says."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(name, tiny=tiny)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if tokenizer:
        (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer(config["vocab_size"])), encoding="utf-8")
    return folder


def byte_tokenizer(vocabulary: int) -> dict[str, Any]:
    """A byte-level tokenizer of that many tokens: all bytes, then made-up words of three to six letters."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(one) for one in letters] + [chr(256 + at) for at in range(256 - len(letters))]
    tokens = dict.fromkeys(alphabet)
    number = 0
    while len(tokens) < vocabulary:
        digits, left = "", number + 26**2
        while left:
            left, digit = divmod(left, 26)
            digits = chr(97 + digit) + digits
        tokens[("\u0120" if number % 2 else "") + digits] = None
        number += 1
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {one: at for at, one in enumerate(tokens)}, "merges": []},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the card does: bytes read a second, bfloat16 operations a second in large products."""

    read: float
    products: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Bytes and operations of one kind of work."""

    nbytes: float
    operations: float

    def seconds(self, rates: Rates) -> float:
        """The larger of the two times."""
        return max(self.nbytes / rates.read, self.operations / rates.products)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Elements that a model's step reads: ``layers`` all linears of all layers, ``head`` the output projection,
    ``cache`` keys and values of one token, ``attention`` heads x head size x layers."""

    layers: int
    head: int
    cache: int
    attention: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Sizes:
        """Count from a configuration."""
        hidden, layers, size = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
        heads, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
        one = hidden * (heads + 2 * kv) + heads * hidden + 3 * hidden * config["intermediate_size"]
        return cls(
            layers=one * layers,
            head=hidden * config["vocab_size"],
            cache=2 * kv * layers,
            attention=heads * layers,
        )

    def step(self, rows: int, context: float) -> tuple[Work, Work]:
        """Products and attention of one decode step at a mean context."""
        weights = self.layers + self.head
        products = Work(nbytes=weights * ELEMENT, operations=2.0 * weights * rows)
        cached = Work(nbytes=rows * context * self.cache * ELEMENT, operations=4.0 * self.attention * rows * context)
        return products, cached

    def prompt(self, rows: int, tokens: int) -> tuple[Work, Work]:
        """Products and attention of that many prompts of one length, each with one token drawn."""
        products = Work(
            nbytes=(self.layers + self.head) * ELEMENT,
            operations=2.0 * (self.layers * rows * tokens + self.head * rows),
        )
        pairs = rows * tokens * (tokens + 1) / 2
        return products, Work(nbytes=rows * tokens * self.cache * ELEMENT, operations=4.0 * self.attention * pairs)


def overlapped(works: tuple[Work, ...], rates: Rates) -> float:
    """Seconds when all bytes and all operations run beside each other."""
    together = Work(nbytes=sum(w.nbytes for w in works), operations=sum(w.operations for w in works))
    return together.seconds(rates)


def serial(works: tuple[Work, ...], rates: Rates) -> float:
    """Seconds when one kind of work follows the other."""
    return sum(work.seconds(rates) for work in works)


def batch_floor(sizes: Sizes, load: tuple[int, int, int], rates: Rates) -> float:
    """Seconds of (requests, prompt tokens, new tokens) that all run together: the prompts, then the other steps."""
    rows, prompt, new = load
    return serial(sizes.prompt(rows, prompt), rates) + (new - 1) * serial(sizes.step(rows, prompt + new / 2), rates)
