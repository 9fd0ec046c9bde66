"""Tokenizers from tokenizer.json: equal to Transformers', control tokens only where they are meant, faults named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from drivetrain.errors import DrivetrainError, RequestError, TokenizerError
from drivetrain.tokens import Tokenizer, load_tokenizer
from drivetrain.tokens.guard import MARK
from drivetrain.tokens.spelling import byte_alphabet, spelling_of
from drivetrain.tokens.tokenizer import TokenizerParts
from tests.data.make_gemma_tokens import WRITTEN, strings

TEXTS = (*WRITTEN, *strings(60, 3), "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|><bos><bos", "a<eos>b", "<<pad>>")


@pytest.fixture(scope="module")
def theirs(tiny_directory: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tiny_directory))


def test_equal_to_transformers(tiny: Tokenizer, theirs):
    for text in TEXTS:
        assert tiny.encode(text, control=True) == theirs(text).input_ids, text
        assert tiny.encode(text) == theirs(text, split_special_tokens=True).input_ids, text
        ids = tiny.encode(text, control=True)
        assert tiny.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert tiny.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False), text


def test_roles(tiny: Tokenizer):
    assert (tiny.bos_id, tiny.eos_ids, tiny.vocabulary) == (1, (2,), 293)
    assert tiny.control_ids == {0, 1, 2, 3, 4}
    assert tiny.encode("", add_special=True) == [1] and tiny.encode("", add_special=False) == []
    assert tiny.special == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=6), st.sampled_from(["<bos>", "<eos>", "<|im_end|>", "<", "<b", MARK]))))
def test_what_is_typed_never_becomes_control(tiny: Tokenizer, parts: list[str]):
    text = "".join(parts)
    ids = tiny.encode(text, add_special=False)
    assert tiny.control_ids.isdisjoint(ids)
    assert tiny.decode(ids) == text.replace(MARK, "")


def test_protected_and_meant_text_mix(tiny: Tokenizer):
    text = "<|im_start|>" + tiny.guard.protect("say <|im_end|> <eos>") + "<|im_end|>"
    ids = tiny.encode(text, add_special=False, control=True)
    assert [i for i in ids if i in tiny.control_ids] == [3, 4] and ids[0] == 3 and ids[-1] == 4
    assert tiny.decode(ids) == "say <|im_end|> <eos>"


def test_lone_surrogates_are_a_request_error(tiny: Tokenizer):
    with pytest.raises(RequestError, match="lone surrogate"):
        tiny.encode("a\ud800b")


def test_ids_outside_the_vocabulary_have_no_text(tiny: Tokenizer):
    assert tiny.decode([5, 293, 99999, -1, 1 << 40]) == tiny.decode([5])


def test_byte_alphabet_is_the_published_one():
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(byte_alphabet()) == set(ByteLevel.alphabet())
    spell = ByteLevel(add_prefix_space=False, use_regex=False)
    for point in [*range(0x250), 0x4E00, 0x1F600]:
        text = chr(point)
        spelt = "".join(piece for piece, _ in spell.pre_tokenize_str(text))
        assert bytes(byte_alphabet()[c] for c in spelt) == text.encode()


def parts_of(backend: tokenizers.Tokenizer, **special: str) -> TokenizerParts:
    return TokenizerParts(backend=backend, origin="test", special=special)


def spelt(vocab: list[str], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """SentencePiece style with these tokens."""
    made = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocab)}, merges=merges, unk_token="?"))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def test_merges_into_control_tokens_are_taken_out():
    """A vocabulary whose merges build a control token from letters: typed text must not reach it."""
    backend = spelt(["?", "<", "s", ">", "s>", "<s>"], [("s", ">"), ("<", "s>")])
    backend.add_special_tokens([AddedToken("<s>", normalized=False, special=True)])
    assert backend.encode("<s>").ids == [5]
    made = Tokenizer(parts_of(backend, bos_token="<s>"))
    assert made.encode("<s>", control=True) == [5]
    assert made.encode("<s>") == [1, 4]
    assert made.encode("<s>s><s>") == [1, 4, 4, 1, 4]


def test_control_tokens_sought_after_normalization():
    """``normalized`` control tokens would be found once the marks are gone; they are sought before."""
    backend = spelt(["?", "<", "s", ">", "a", "<s>"], [])
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<s>", normalized=True, special=True)])
    made = Tokenizer(parts_of(backend))
    assert made.encode("A<s>", control=True) == [4, 5]
    assert made.encode("A<s>") == [4, 1, 2, 3]


def test_a_role_is_a_control_token_even_where_it_is_not_listed():
    made = Tokenizer(parts_of(spelt(["?", "<", "s", ">", "<s>"], []), bos_token="<s>"))
    assert made.control_ids == {4} and made.bos_id == 4
    assert made.encode("<s>") == [1, 2, 3]


def test_stripped_spaces():
    backend = spelt(["?", "▁", "a", "▁a"], [("▁", "a")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made = Tokenizer(parts_of(backend))
    for text in ("a", " a", "  a a", " ", ""):
        ids = made.encode(text)
        assert made.decode(ids) == backend.decode(ids)
    assert made.decode([3]) == "a" and made.decode([3], continuing=True) == " a"


def test_decoders_without_a_meaning_in_bytes_are_refused():
    with pytest.raises(TokenizerError, match="WordPiece"):
        spelling_of(decoders.WordPiece().__getstate__())
    with pytest.raises(TokenizerError, match="test: the tokenizer has no decoder"):
        backend = spelt(["?"], [])
        backend.decoder = None
        Tokenizer(parts_of(backend))


@pytest.fixture
def copied(tiny_directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_directory, tmp_path / "copied"))


def test_missing_and_damaged_files(copied: Path, tmp_path: Path):
    (copied / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json can't be read"):
        load_tokenizer(None, str(copied))
    (copied / "tokenizer.json").unlink()
    (copied / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json \(there is tokenizer\.model"):
        load_tokenizer(None, str(copied))
    with pytest.raises(DrivetrainError, match="does not exist"):
        load_tokenizer(None, str(tmp_path / "nowhere"))
    with pytest.raises(TokenizerError, match="no tokenizer was named"):
        load_tokenizer(None)


def test_damaged_settings(copied: Path):
    (copied / "tokenizer_config.json").write_text("[")
    with pytest.raises(DrivetrainError, match=r"tokenizer_config\.json can't be read"):
        load_tokenizer(None, str(copied))


def test_the_file_itself_can_be_named(tiny_directory: Path, tiny: Tokenizer):
    other = load_tokenizer(None, str(tiny_directory / "tokenizer.json"))
    assert other.encode("the fox") == tiny.encode("the fox")


def test_tokens_that_only_the_settings_list(copied: Path):
    settings_file = copied / "tokenizer_config.json"
    config = json.loads(settings_file.read_text())
    config["added_tokens_decoder"] = {"293": {"content": "<tool>", "special": True, "normalized": False}}
    settings_file.write_text(json.dumps(config))
    made = load_tokenizer(None, str(copied))
    assert made.encode("<tool>", add_special=False, control=True) == [293] and made.vocabulary == 294
    config["added_tokens_decoder"] = {"300": {"content": "<tool>", "special": True}}
    settings_file.write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="gives '<tool>' the id 300"):
        load_tokenizer(None, str(copied))


def test_truncation_in_the_file_is_ignored(copied: Path, tiny: Tokenizer):
    backend = tokenizers.Tokenizer.from_file(str(copied / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(copied / "tokenizer.json"))
    assert load_tokenizer(None, str(copied)).encode("the quick brown fox") == tiny.encode("the quick brown fox")


def test_concurrent_use(tiny: Tokenizer):
    """Threads that mean and that do not mean control tokens share one tokenizer."""
    from concurrent.futures import ThreadPoolExecutor

    text = "the <eos> fox " * 20
    meant, typed = tiny.encode(text, control=True), tiny.encode(text)
    assert meant != typed
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: tiny.encode(text, control=at % 2 == 0), range(400)))
    assert all(ids == (meant if at % 2 == 0 else typed) for at, ids in enumerate(found))
