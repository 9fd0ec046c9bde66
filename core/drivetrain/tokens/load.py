"""Finding a model's tokenizer: tokenizer.json with its settings, or a GGUF file's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from drivetrain.errors import TokenizerError
from drivetrain.models.source import ModelSource, read_json, resolve
from drivetrain.models.weights.gguf_file import GgufFile
from drivetrain.tokens.gguf_tokenizer import ROLES, gguf_parts, gguf_templates
from drivetrain.tokens.tokenizer import Tokenizer, TokenizerParts


def load_tokenizer(source: ModelSource | None, override: str | None = None) -> Tokenizer:
    """Read a model's tokenizer, or the one at ``override``: a directory, a tokenizer.json, a GGUF file or a hub id.

    A GGUF file with 262,144 tokens takes about two seconds, most of them for deriving its merges; a tokenizer.json
    of the same vocabulary would take as long to read. TokenizerError naming the file that is missing or damaged.
    """
    if override is None:
        if source is None:
            raise TokenizerError("no tokenizer was named", fix="give a model or --tokenizer DIRECTORY")
        path = source.path
        if source.header is not None:
            return Tokenizer(gguf_parts(source.header))
    else:
        path = Path(override).expanduser()
        if not path.exists():
            path = resolve(override).path
    if path.is_file() and path.suffix != ".json":
        file = GgufFile(path)
        try:
            return Tokenizer(gguf_parts(file))
        finally:
            file.close()
    return Tokenizer(_directory_parts(path.parent if path.is_file() else path))


def _directory_parts(directory: Path) -> TokenizerParts:
    path = directory / "tokenizer.json"
    if not path.is_file():
        other = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (directory / name).is_file()]
        held = f" (there is {other[0]}, an older form)" if other else ""
        raise TokenizerError(
            f"{directory} has no tokenizer.json{held}", fix="add it, or name another with --tokenizer DIRECTORY"
        )
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise TokenizerError(f"{path} can't be read: {error}", fix="download it again") from error
    settings = read_json(directory / "tokenizer_config.json") or {}
    older = read_json(directory / "special_tokens_map.json") or {}
    special = {role: content for role in ROLES if (content := _content(settings.get(role, older.get(role))))}
    _add_missing(backend, settings, path)
    backend.no_truncation()
    backend.no_padding()
    return TokenizerParts(
        backend=backend, origin=str(directory), special=special, templates=_templates(directory, settings)
    )


def own_templates(source: ModelSource) -> dict[str, str]:
    """Return a model's own chat templates by name. No vocabulary is read for it."""
    if source.header is not None:
        return gguf_templates(source.header.metadata)
    return _templates(source.path, read_json(source.path / "tokenizer_config.json") or {})


def _content(value: Any) -> str | None:
    """A token is written as text or as an object with its text."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _add_missing(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], path: Path) -> None:
    """Add tokens that only tokenizer_config.json lists; their ids must be the next ones."""
    listed = settings.get("added_tokens_decoder") or {}
    for index, entry in sorted((int(index), entry) for index, entry in listed.items()):
        content = _content(entry)
        if content is None or backend.token_to_id(content) is not None:
            continue
        flags = {key: bool(entry[key]) for key in ("lstrip", "rstrip", "single_word", "normalized") if key in entry}
        backend.add_tokens([AddedToken(content, special=bool(entry.get("special")), **flags)])
        if backend.token_to_id(content) != index:
            raise TokenizerError(
                f"tokenizer_config.json gives {content!r} the id {index}, but {path} ends before it",
                fix="download both files again",
            )


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """A file of its own wins over tokenizer_config.json."""
    own = directory / "chat_template.jinja"
    if own.is_file():
        return {"default": own.read_text(encoding="utf-8")}
    found = settings.get("chat_template") or (read_json(directory / "chat_template.json") or {}).get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        try:
            return {str(one["name"]): str(one["template"]) for one in found}
        except (TypeError, KeyError) as error:
            raise TokenizerError(f"{directory}: chat_template is {json.dumps(found)[:80]}") from error
    return {}
