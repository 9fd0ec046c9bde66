"""How a checkpoint turns a text's hidden states into its vector: the files of sentence-transformers, or a GGUF file's
own word. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drivetrain.errors import ModelError
from drivetrain.models.source import ModelSource, resolve

Pooling = Literal["last", "mean", "cls"]
# Fields of a pooling module's config.json; in newer files one field names the mode.
FLAGS: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
GGUF_KINDS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
LARGEST = 1 << 20  # bytes of one such file


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """``kind``: which hidden states make the vector. ``width``: its length, None when the configuration hides it.

    ``normalize``: whether it has length 1. ``declared``: whether the checkpoint says so; else these are defaults.
    """

    kind: Pooling = "last"
    normalize: bool = True
    width: int | None = None
    declared: bool = False


def read_sentence(model: str, revision: str | None = None) -> Sentence:
    """Read what a model says, as ``resolve`` finds it. ModelError for what can't be served, or is damaged."""
    return sentence_of(resolve(model, revision))


def sentence_of(source: ModelSource) -> Sentence:
    """Return how a model makes vectors; without a word of its own: the last token's state, of length 1."""
    width = _width(source.config)
    if source.header is not None:
        return _of_gguf(source.header.metadata, source.path, width)
    listing = source.path / "modules.json"
    if not listing.is_file():
        return Sentence(width=width)
    modules = _read(listing)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ModelError(f"{listing} is no list of modules", fix="fetch the checkpoint again")
    kinds = [str(one.get("type")).rpartition(".")[2] for one in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(
            f"{listing} lists {', '.join(kinds) or 'no modules'}",
            fix="models of Transformer, Pooling and maybe Normalize can be served for vectors",
        )
    kind = _pooling(source.path / _inside(str(modules[1].get("path")), listing) / "config.json")
    return Sentence(kind=kind, normalize="Normalize" in kinds, width=width, declared=True)


def _width(config: Mapping[str, Any]) -> int | None:
    nested = config.get("text_config")
    found = (nested if isinstance(nested, Mapping) else config).get("hidden_size")
    return found if type(found) is int else None


def _of_gguf(metadata: Mapping[str, Any], path: Path, width: int | None) -> Sentence:
    found = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if found is None or found == 0:
        return Sentence(width=width)
    if found not in GGUF_KINDS:
        raise ModelError(
            f"{path.name}: its pooling_type is {found}", fix="1 (mean), 2 (cls) and 3 (last) are supported"
        )
    return Sentence(kind=GGUF_KINDS[found], width=width, declared=True)


def _pooling(path: Path) -> Pooling:
    """Return the one mode that a pooling module's configuration names."""
    settings = _read(path)
    if not isinstance(settings, dict):
        raise ModelError(f"{path} is no object", fix="fetch the checkpoint again")
    named = settings.get("pooling_mode")
    wanted = [named] if named else [n for n, on in settings.items() if n.startswith("pooling_mode_") and on]
    known = [found for one in wanted if (found := MODES.get(str(one)) or FLAGS.get(str(one)))]
    if len(wanted) != 1 or len(known) != 1:
        what = " and ".join(map(str, wanted)) or "no mode"
        raise ModelError(f"{path} pools by {what}", fix="one of lasttoken, mean and cls can be served for vectors")
    if settings.get("include_prompt") is False:
        raise ModelError(
            f"{path} leaves prompts out (include_prompt is false)", fix="serve a model that pools them too"
        )
    return known[0]


def _inside(name: str, listing: Path) -> str:
    """Return a module's directory, one name below the checkpoint."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ModelError(f"{listing}: the pooling module's path is {name!r}", fix="it must name a directory beside it")
    return name


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > LARGEST:
            raise ModelError(f"{path} has more than {LARGEST} bytes", fix="fetch the checkpoint again")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read: {error}", fix="fetch the checkpoint again") from error
