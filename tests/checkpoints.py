"""Tiny random checkpoints with awkward sizes, made by Transformers, and what Transformers computes with them.

    directory = tiny_checkpoint("llama", tmp_path / "model")                 # one of FAMILIES or VARIANTS
    directory = tiny_checkpoint("gemma3", path, num_hidden_layers=3, shards=3)
    logits = hf_logits(directory, ids)           # float32 [len(ids), vocabulary]
    tokens = hf_greedy(directory, prompts, 64)   # one list of ids a prompt

Results are kept under ``.cache`` keyed by the checkpoint's content, so that a second run and a second worker are fast.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.families import BOS, EOS, FAMILIES, OFFSET_NORMS, PAD, SPECIAL, VARIANTS, VOCABULARY

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "reference"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_checkpoint(family: str, directory: str | Path, *, shards: int = 1, seed: int = 0, **overrides: Any) -> Path:
    """Write a random float32 checkpoint with a tokenizer and a chat template; return the directory.

    ``family``: a key of FAMILIES or VARIANTS. ``shards``: at least this many safetensors files (1 or several).
    ``overrides``: fields of Transformers' configuration. The same arguments give the same bytes.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if family in VARIANTS:
        family, more = VARIANTS[family]
        overrides = {**more, **overrides}
    kind, fields = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**fields, **overrides})
    config.architectures = None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, seed, norms_around=0.0 if kind in OFFSET_NORMS else 1.0)
    total = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(directory, max_shard_size=total if shards == 1 else max(total // (shards + 1), 1))
    found = len(list(directory.glob("*.safetensors")))
    if (found == 1) != (shards == 1) or found < shards:
        raise AssertionError(f"{found} files were written for {shards} shards: {directory}")
    tiny_tokenizer(directory, config.vocab_size)
    return directory


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int, *, norms_around: float) -> None:
    """Give every parameter values that matter: norm weights differ, biases are not zero, logits spread."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name == "model.norm.weight":
            parameter.copy_(norms_around + 4.0 * (norms_around == 0.0) + 0.2 * noise)
        elif "norm" in name and name.endswith("weight"):
            parameter.copy_(norms_around + 0.2 * noise)
        elif parameter.dim() == 1:
            parameter.copy_(0.2 * noise)
        elif "embed_tokens" in name:
            parameter.copy_((0.04 if norms_around == 0.0 else 0.3) * noise)  # one family multiplies by sqrt(hidden)
        elif "lm_head" in name:
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(1.3 / math.sqrt(parameter.shape[-1]) * noise)


def tiny_tokenizer(directory: Path, vocabulary: int) -> None:
    """Write a byte-level BPE of exactly that many tokens; below 262 it knows printable ASCII only."""
    merges_text = (
        "the quick brown fox jumps over the lazy dog and then the other dog thinks that this is not the end of "
        "the story, for there was another fox in the forest who had seen it all. "
    )
    (directory / "tokenizer.json").write_text(_byte_level(merges_text, vocabulary).to_str(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, SPECIAL.index("<|im_end|>")], "pad_token_id": PAD}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1), encoding="utf-8")


def _byte_level(text: str, vocabulary: int) -> Any:
    """A tokenizer whose merges are the most frequent pairs of ``text``, ties in the order of the ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    if vocabulary >= len(SPECIAL) + 256:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        printable = "".join(map(chr, range(32, 127))) + "\n\t"
        letters = sorted(set("".join(piece for piece, _ in spell.pre_tokenize_str(printable))))
    vocab = {token: index for index, token in enumerate([*SPECIAL, *letters])}
    words = [list("Ġ" + word) for word in text.split()]
    merges: list[tuple[str, str]] = []
    while len(vocab) < vocabulary:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        vocab["".join(best)] = len(vocab)
        words = [_merged(word, best) for word in words]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for letter in word:
        if out and (out[-1], letter) == pair:
            out[-1] += letter
        else:
            out.append(letter)
    return out


def random_ids(count: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    """Ids that are not special tokens."""
    draws = np.random.Generator(np.random.Philox(key=seed)).integers(len(SPECIAL), vocabulary, count)
    return [int(i) for i in draws]


@functools.lru_cache(maxsize=4)
def _model(directory: Path, stamp: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def hf_logits(directory: str | Path, ids: Sequence[int]) -> torch.Tensor:
    """Transformers' float32 logits of one sequence in one forward, [len(ids), vocabulary]."""
    directory = Path(directory)

    def compute() -> np.ndarray:
        model = _model(directory, _stamp(directory))
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float().numpy()

    return torch.from_numpy(_kept(directory, ["logits", list(ids)], compute))


def hf_greedy(directory: str | Path, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    """Transformers' greedy ids for each prompt, with its cache, end tokens ignored; ties go to the lowest id."""
    return [[int(i) for i in _greedy(directory, prompt, num_new)[0]] for prompt in prompts]


def hf_gaps(directory: str | Path, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[float]]:
    """The gaps between the two largest logits at each of ``hf_greedy``'s ids."""
    return [[float(gap) for gap in _greedy(directory, prompt, num_new)[1]] for prompt in prompts]


@torch.no_grad()
def _greedy(directory: str | Path, prompt: Sequence[int], num_new: int) -> np.ndarray:
    directory = Path(directory)

    def compute() -> np.ndarray:
        model = _model(directory, _stamp(directory))
        found: list[tuple[int, float]] = []
        out = model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
        while True:
            logits = out.logits[0, -1]
            best = logits.topk(2).values
            found.append((int(logits.argmax()), float(best[0] - best[1])))
            if len(found) == num_new:
                return np.array(found, np.float64).T
            out = model(torch.tensor([[found[-1][0]]]), past_key_values=out.past_key_values, use_cache=True)

    return _kept(directory, ["greedy", list(prompt), num_new], compute)


def _stamp(directory: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted([directory / "config.json", *directory.glob("*.safetensors")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _kept(directory: Path, key: list[Any], compute: Any) -> np.ndarray:
    """Return an array from the cache, or compute and keep it (atomically: workers run side by side)."""
    import transformers

    text = json.dumps([_stamp(directory), transformers.__version__, torch.__version__, *key])
    path = CACHE / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.npy"
    if path.is_file():
        return np.load(path, allow_pickle=False)
    value = compute()
    CACHE.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(dir=CACHE))
    try:
        np.save(own / "value.npy", value, allow_pickle=False)
        os.replace(own / "value.npy", path)
    finally:
        shutil.rmtree(own)
    return value
