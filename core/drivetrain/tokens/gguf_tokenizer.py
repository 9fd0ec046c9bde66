"""The tokenizer that a GGUF file's metadata describes: SentencePiece style ("llama") or byte-level BPE ("gpt2")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from drivetrain.errors import TokenizerError
from drivetrain.models.weights.gguf_file import GgufFile
from drivetrain.tokens.spelling import ALPHABET
from drivetrain.tokens.tokenizer import TokenizerParts

CONTROL, USER_DEFINED = 3, 4
SPACE = "▁"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{end}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{end}"
    r"|\p{N}{digits}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The published splitting rule of each pre-tokenizer kind; None: the byte-level pre-tokenizer's own.
SPLITS = {
    "default": None,
    "gpt-2": None,
    "gpt2": None,
    "llama3": WORDS % "{1,3}",
    "llama-v3": WORDS % "{1,3}",
    "llama-bpe": WORDS % "{1,3}",
    "dbrx": WORDS % "{1,3}",
    "qwen2": WORDS % "",
    "phi-2": None,
    "starcoder": None,
    "refact": None,
    "gpt-4o": CASED.replace("{end}", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("{digits}", "{1,3}"),
    "tekken": CASED.replace("{end}", "").replace("{digits}", ""),
}
DIGITS = ("starcoder", "refact")  # kinds that first take every digit by itself
COMPOSED = ("qwen2",)  # kinds whose published tokenizer composes characters first (NFC)
ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_parts(file: GgufFile) -> TokenizerParts:
    """Build the tokenizer. TokenizerError naming what the file lacks or what is not supported."""
    meta, name = file.metadata, file.path.name
    tokens = meta.get("tokenizer.ggml.tokens")
    kind = meta.get("tokenizer.ggml.model")
    if not tokens or kind not in ("llama", "gpt2"):
        raise TokenizerError(
            f"{name} holds a tokenizer of kind {kind!r}", fix="give one with --tokenizer DIRECTORY; llama and gpt2 work"
        )
    tokens = list(tokens)
    kinds = [int(k) for k in meta.get("tokenizer.ggml.token_type", [1] * len(tokens))]
    if len(kinds) != len(tokens):
        raise TokenizerError(f"{name} has {len(tokens)} tokens and {len(kinds)} token types")
    if kind == "llama" and _is_gemma(meta):
        # Runs of spaces are no tokens of their own in raw text: they are matched after spaces became "▁".
        runs = {at for at, token in enumerate(tokens) if " " in token and not token.strip()}
        tokens = [SPACE * len(token) if at in runs else token for at, token in enumerate(tokens)]
        kinds = [0 if at in runs else k for at, k in enumerate(kinds)]
    if kind == "gpt2":
        # A byte-level vocabulary spells real tokens in its alphabet; a control token in other letters is a slip.
        kinds = [k if k != CONTROL or set(t) <= set(ALPHABET) else 0 for t, k in zip(tokens, kinds, strict=True)]
    control = {token for token, k in zip(tokens, kinds, strict=True) if k == CONTROL}
    backend = _pieces(meta, tokens, control, name) if kind == "llama" else _byte_level(meta, tokens, name)
    special = {}
    for role, key in ROLES.items():
        token = _checked_id(meta, key, tokens, name)
        if token is not None:
            special[role] = tokens[token]
    added = [
        AddedToken(token, normalized=False, special=k == CONTROL)
        for token, k in zip(tokens, kinds, strict=True)
        if k in (CONTROL, USER_DEFINED)
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])
    _surround(backend, meta, special, default_bos=kind == "llama")
    found = [_checked_id(meta, key, tokens, name) for key in ENDS]
    return TokenizerParts(
        backend=backend,
        origin=name,
        special=special,
        eos_ids=tuple(dict.fromkeys(i for i in found if i is not None)),
        templates=gguf_templates(meta),
    )


def _checked_id(meta: Mapping[str, Any], key: str, tokens: Sequence[str], name: str) -> int | None:
    found = meta.get(f"tokenizer.ggml.{key}")
    if found is None:
        return None
    if not 0 <= int(found) < len(tokens):
        raise TokenizerError(f"{name} says {key} {found}, but has {len(tokens)} tokens")
    return int(found)


def gguf_templates(meta: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a file's metadata by name; the nameless one is ``default``."""
    begin = "tokenizer.chat_template"
    found = {"default": str(meta[begin])} if begin in meta else {}
    more = {key.removeprefix(begin + "."): str(meta[key]) for key in meta if key.startswith(begin + ".")}
    return more | found


def _surround(
    backend: tokenizers.Tokenizer, meta: Mapping[str, Any], special: Mapping[str, str], *, default_bos: bool
) -> None:
    """Put the tokens that the model wants before and after a text."""
    before = special.get("bos_token") if meta.get("tokenizer.ggml.add_bos_token", default_bos) else None
    after = special.get("eos_token") if meta.get("tokenizer.ggml.add_eos_token", False) else None
    around = [token for token in (before, after) if token is not None]
    if around:
        parts = [part for part in (before, "$A", after) if part is not None]
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(parts), special_tokens=[(token, backend.token_to_id(token)) for token in set(around)]
        )


def _pieces(meta: Mapping[str, Any], tokens: list[str], control: set[str], name: str) -> tokenizers.Tokenizer:
    """SentencePiece style. Files of it hold no merges: they follow from the vocabulary, best first."""
    gemma = _is_gemma(meta)
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges(tokens, vocab, control)
    if not gemma:  # Gemma's merges follow the vocabulary's order, others the scores
        scores = meta.get("tokenizer.ggml.scores")
        if scores is None or len(scores) != len(tokens):
            raise TokenizerError(f"{name} has no score for each token", fix="convert the model again")
        # Higher scores first, then longer left parts, then longer right parts, then the vocabulary's order.
        merges.sort(key=lambda pair: (-float(scores[vocab[pair[0] + pair[1]]]), -len(pair[0]), -len(pair[1])))
    unknown = meta.get("tokenizer.ggml.unknown_token_id")
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            fuse_unk=True,
            byte_fallback=True,
            unk_token=tokens[int(unknown)] if gemma and unknown is not None else None,
        )
    )
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        made.normalizer = normalizers.Replace(" ", SPACE)
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        prefixed = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE, prepend_scheme="first" if prefixed else "never", split=False
        )
        undo += [decoders.Strip(" ", 1, 0)] if prefixed else []
    made.decoder = decoders.Sequence(undo)
    return made


def _is_gemma(meta: Mapping[str, Any]) -> bool:
    return str(meta.get("general.architecture")).startswith("gemma")


def _merges(tokens: Sequence[str], vocab: Mapping[str, int], control: set[str]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third: in the vocabulary's order, then the longest left part first."""
    return [
        (left, right)
        for token in tokens
        if token not in control
        for at in range(len(token) - 1, 0, -1)
        if (left := token[:at]) in vocab and (right := token[at:]) in vocab
    ]


def _byte_level(meta: Mapping[str, Any], tokens: list[str], name: str) -> tokenizers.Tokenizer:
    kind = str(meta.get("tokenizer.ggml.pre", "default"))
    if kind not in SPLITS:
        raise TokenizerError(
            f"{name} splits text by the rule {kind!r}, which is not known here",
            fix=f"give the model's own tokenizer with --tokenizer DIRECTORY; known: {', '.join(SPLITS)}",
        )
    if "tokenizer.ggml.merges" not in meta:
        raise TokenizerError(f"{name} has a byte-level vocabulary without merges", fix="convert the model again")
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise TokenizerError(f"{name} has merges that its vocabulary does not know: {error}") from error
    split = SPLITS[kind]
    if kind in COMPOSED:
        made.normalizer = normalizers.NFC()
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps: list[pre_tokenizers.PreTokenizer] = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    if kind in DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, by_bytes]) if steps else by_bytes
    made.decoder = decoders.ByteLevel()
    return made
