"""What checkpoints say about their vectors."""

from __future__ import annotations

import json

import pytest

from drivetrain.errors import ModelError
from drivetrain.models.sentence import sentence_of
from drivetrain.models.source import resolve

OFF = dict.fromkeys(
    (
        "pooling_mode_cls_token",
        "pooling_mode_mean_tokens",
        "pooling_mode_max_tokens",
        "pooling_mode_mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens",
        "pooling_mode_lasttoken",
    ),
    False,
)
OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules.any."


def checkpoint(directory, kinds=("Transformer", "Pooling", "Normalize"), pooling=None, start=OLD, path="1_Pooling"):
    """Write a checkpoint's configuration and its modules."""
    (directory / "config.json").write_text(json.dumps({"hidden_size": 48}))
    modules = [
        {"idx": place, "name": str(place), "path": path if place == 1 else f"{place}_{kind}", "type": start + kind}
        for place, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    if pooling is not None:
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return resolve(str(directory))


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        (OFF | {"pooling_mode_lasttoken": True, "include_prompt": True, "word_embedding_dimension": 48}, "last"),
        (OFF | {"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
@pytest.mark.parametrize("start", [OLD, NEW])
def test_the_pooling_modules_file_names_the_mode(tmp_path, pooling, kind, start):
    found = sentence_of(checkpoint(tmp_path, pooling=pooling, start=start))
    assert (found.kind, found.normalize, found.width, found.declared) == (kind, True, 48, True)
    bare = sentence_of(checkpoint(tmp_path, ("Transformer", "Pooling"), pooling, start))
    assert (bare.kind, bare.normalize) == (kind, False)


def test_without_modules_it_is_the_last_token_of_length_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 7}}))
    found = sentence_of(resolve(str(tmp_path)))
    assert (found.kind, found.normalize, found.width, found.declared) == ("last", True, 7, False)


LAST = OFF | {"pooling_mode_lasttoken": True}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kinds": ("Transformer", "Pooling", "Dense", "Normalize"), "pooling": LAST}, "Dense"),
        ({"kinds": ("Transformer",), "pooling": LAST}, "lists Transformer"),
        ({"pooling": OFF}, "no mode"),
        ({"pooling": LAST | {"pooling_mode_mean_tokens": True}}, "mean_tokens and pooling_mode_lasttoken"),
        ({"pooling": OFF | {"pooling_mode_max_tokens": True}}, "max_tokens"),
        ({"pooling": {"pooling_mode": "max"}}, "pools by max"),
        ({"pooling": LAST | {"include_prompt": False}}, "include_prompt"),
        ({"pooling": [1]}, "no object"),
        ({"pooling": LAST, "path": "../other"}, "must name a directory"),
        ({}, "can't be read"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path, options, why):
    with pytest.raises(ModelError, match=why):
        sentence_of(checkpoint(tmp_path, **options))


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[1]", "[" * 100_000, '"' + "a" * (1 << 20) + '"'])
def test_a_damaged_listing_is_an_error(tmp_path, text):
    source = checkpoint(tmp_path, pooling=LAST)
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json"):
        sentence_of(source)
