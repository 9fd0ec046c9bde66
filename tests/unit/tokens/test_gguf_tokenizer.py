"""Tokenizers from GGUF metadata are Transformers' of the same file, for both kinds and for the real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from drivetrain.errors import TokenizerError
from drivetrain.models.source import resolve
from drivetrain.tokens import Tokenizer, load_tokenizer
from drivetrain.tokens.gguf_tokenizer import gguf_parts
from tests.checkpoints import tiny_tokenizer
from tests.data.make_gemma_tokens import WRITTEN, strings
from tests.unit.weights.ggufs import pieces, tiny_gguf

ROOT = Path(__file__).resolve().parents[3]
WORDS = ["▁the", "▁quick", "▁brown", "▁fox", "▁jumps", "▁▁▁▁", "ing", "café", "12", "3.14", "▁<", "</", "\n\n"]
TYPED = ("the quick brown fox", " the  fox</s> <s>", "<tool>fox<|end|> the<tool>", "a <|end|>")
TEXTS = (*WRITTEN, *strings(80, 5), *TYPED)


def both(path: Path, tokens: dict, family: str = "llama") -> tuple[Tokenizer, object]:
    from transformers import AutoTokenizer

    tiny_gguf(family, path, tokens=tokens, vocab_size=len(tokens["tokens"]), num_hidden_layers=1)
    return load_tokenizer(resolve(str(path))), AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def check(ours: Tokenizer, theirs) -> None:
    for text in TEXTS:
        assert ours.encode(text, control=True) == theirs(text).input_ids, text
        typed = ours.encode(text, add_special=False)
        assert typed == theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids, text
        assert ours.control_ids.isdisjoint(typed)


def test_sentencepiece_style(tmp_path: Path):
    ours, theirs = both(tmp_path / "m.gguf", {**pieces(WORDS), "add_bos_token": True})
    check(ours, theirs)
    text = "the quick\n\ncafé 日本"
    assert ours.decode(ours.encode(text)) == text
    assert ours.bos_id == 1 and ours.eos_ids == (2,)


def test_no_space_in_front_where_the_file_says_so(tmp_path: Path):
    """(Transformers does not read this key.)"""
    tokens = {**pieces(WORDS), "add_space_prefix": False, "add_eos_token": True}
    tiny_gguf("llama", tmp_path / "m.gguf", tokens=tokens, vocab_size=len(tokens["tokens"]), num_hidden_layers=1)
    made = load_tokenizer(resolve(str(tmp_path / "m.gguf")))
    names = [tokens["tokens"][i] for i in made.encode("the fox")]
    assert names[0] == "<s>" and names[-1] == "</s>"
    assert "".join(names[1:-1]) == "the▁fox"
    assert made.decode(made.encode(" the fox")) == " the fox"


def byte_level(directory: Path, pre: str) -> dict:
    """The tiny byte-level vocabulary as GGUF metadata has it."""
    directory.mkdir()
    tiny_tokenizer(directory, 293)
    described = json.loads((directory / "tokenizer.json").read_text())
    vocab = described["model"]["vocab"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in described["model"]["merges"]]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": sorted(vocab, key=vocab.__getitem__),
        "token_type": [3] * 5 + [1] * 288,
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
    }


@pytest.mark.parametrize("pre", ["default", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("bos", [True, False])
def test_byte_level(tmp_path: Path, pre: str, bos: bool):
    import unicodedata

    ours, theirs = both(tmp_path / "m.gguf", {**byte_level(tmp_path / "json", pre), "add_bos_token": bos})
    texts = [unicodedata.normalize("NFC", text) for text in TEXTS]  # Qwen's own tokenizer composes, theirs does not
    for text in texts:
        assert ours.encode(text, control=True) == theirs(text).input_ids, text
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("")[:1] == ([1] if bos else [])


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("starcoder", "x 123 it's", ["x", " ", "1", "2", "3", " it", "'s"]),
        ("refact", "a42\n\nb", ["a", "4", "2", "\n", "\n", "b"]),
        ("dbrx", "x 12345 It's", ["x", " ", "123", "45", " It", "'s"]),
        ("phi-2", "x 12345 it's", ["x", " 12345", " it", "'s"]),
        ("gpt-4o", "camelCase IT'S 12345 a/\n", ["camel", "Case", " IT'S", " ", "123", "45", " a", "/\n"]),
        ("tekken", "camelCase it's 123", ["camel", "Case", " it", "'s", " ", "1", "2", "3"]),
    ],
)
def test_text_is_split_by_the_kinds_published_rule(tmp_path: Path, pre: str, text: str, pieces: list[str]):
    """Written by hand from the rules."""
    tokens = byte_level(tmp_path / "json", pre)
    tiny_gguf("llama", tmp_path / "m.gguf", tokens=tokens, vocab_size=len(tokens["tokens"]), num_hidden_layers=1)
    made = load_tokenizer(resolve(str(tmp_path / "m.gguf")))
    source = resolve(str(tmp_path / "m.gguf"))
    source.header.reopen()
    split = gguf_parts(source.header).backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[first:end] for _, (first, end) in split] == pieces
    assert made.decode(made.encode(text)) == text


def test_chat_template_and_end_tokens(tmp_path: Path):
    tokens = {**pieces(WORDS), "chat_template": "{{ messages }}", "eot_token_id": 5}
    tiny_gguf("llama", tmp_path / "m.gguf", tokens=tokens, vocab_size=len(tokens["tokens"]), num_hidden_layers=1)
    made = load_tokenizer(resolve(str(tmp_path / "m.gguf")))
    assert made.templates == {"default": "{{ messages }}"}
    assert made.eos_ids == (2, 5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "bert"}, "tokenizer of kind 'bert'"),
        ({"eos_token_id": 99999}, "says eos_token_id 99999"),
        ({"scores": [0.0]}, "no score for each token"),
        ({"token_type": [1]}, "token types"),
        ({"model": "gpt2", "pre": "novel"}, "rule 'novel'"),
        ({"model": "gpt2"}, "without merges"),
        ({"model": "gpt2", "merges": ["no such", "merge at"]}, "merges that its vocabulary does not know"),
    ],
)
def test_faults_name_the_file(tmp_path: Path, change: dict, message: str):
    tokens = {**pieces(WORDS), **change}
    tiny_gguf("llama", tmp_path / "m.gguf", tokens=tokens, vocab_size=len(tokens["tokens"]), num_hidden_layers=1)
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(resolve(str(tmp_path / "m.gguf")))
    assert "m.gguf" in str(caught.value)


def test_the_real_tokenizer(gemma: Tokenizer):
    """458 strings as Transformers reads them, control tokens meant and not meant, with BOS, and back."""
    data = json.loads((ROOT / "tests/data/gemma3_270m_tokens.json").read_text())
    assert data["bos"] == [2] and len(data["cases"]) > 400
    assert sum("typed" in case for case in data["cases"]) > 40
    for case in data["cases"]:
        text, typed = case["text"], case.get("typed", case["meant"])
        assert gemma.encode(text, control=True) == data["bos"] + case["meant"], text
        assert gemma.encode(text, add_special=False) == typed, text
        assert gemma.decode(case["meant"]) == case["decoded"], text
        assert gemma.decode(typed) == text.replace("▁", " "), text


def test_the_golden_prompts(gemma: Tokenizer):
    for name in ("gemma3_270m_golden.json", "gemma3_270m_prompts20.json"):
        for case in json.loads((ROOT / "tests/data" / name).read_text())["cases"]:
            assert gemma.encode(case["prompt"], control=True) == case["prompt_ids"]
            if "text" in case:
                assert gemma.decode(case["out_ids"], continuing=True) == case["text"]


def test_the_real_roles(gemma: Tokenizer):
    assert (gemma.bos_id, gemma.eos_ids, gemma.vocabulary) == (2, (1,), 262144)
    assert len(gemma.control_ids) == 6249 and gemma.templates == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_tokenizer_on_other_strings(gemma: Tokenizer, real_gguf: Path):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(real_gguf.parent), gguf_file=real_gguf.name)
    for text in strings(3000, 11):
        assert gemma.encode(text, control=True) == theirs(text).input_ids, text
        assert gemma.encode(text) == theirs(text, split_special_tokens=True).input_ids, text
    merges = json.loads(theirs.backend_tokenizer.to_str())["model"]["merges"]
    own = json.loads(gemma._backend.to_str())["model"]["merges"]
    assert merges == own
    assert isinstance(gemma._backend, tokenizers.Tokenizer)
