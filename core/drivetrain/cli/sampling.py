"""Flags of the commands that sample, and how they become ``SamplingParams``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from drivetrain.cli.flags import Flag, add_flags, within
from drivetrain.params import SamplingParams

DEFAULT_MAX_TOKENS = 256
LARGEST = 2**31 - 1


def token_bias(text: str) -> tuple[int, float]:
    """Parse TOKEN=BIAS."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id and a number, such as 50256=-100") from None


SAMPLING_FLAGS: tuple[Flag, ...] = (
    (
        "max-tokens",
        {"type": within(1, LARGEST), "metavar": "N", "help": f"longest answer (default {DEFAULT_MAX_TOKENS} tokens)"},
    ),
    ("temperature", {"type": float, "metavar": "T", "help": "0 takes the likeliest token (default 1)"}),
    ("top-p", {"type": float, "metavar": "P", "help": "smallest set of tokens of this probability (default 1: all)"}),
    ("top-k", {"type": within(0, LARGEST), "metavar": "K", "help": "the K likeliest tokens (default 0: all)"}),
    ("min-p", {"type": float, "metavar": "P", "help": "tokens of at least P times the likeliest one's probability"}),
    ("sampling-seed", {"type": int, "metavar": "N", "help": "make the answer repeatable"}),
    ("stop", {"action": "append", "metavar": "TEXT", "help": "end before this text; repeatable"}),
    (
        "repetition-penalty",
        {"type": float, "metavar": "R", "help": "divide what prompt and answer have (default 1)"},
    ),
    ("presence-penalty", {"type": float, "metavar": "P", "help": "take P off what the answer has (default 0)"}),
    (
        "frequency-penalty",
        {"type": float, "metavar": "F", "help": "take F off for each time it is there (default 0)"},
    ),
    ("logit-bias", {"type": token_bias, "action": "append", "metavar": "ID=B", "help": "add B to a token; repeatable"}),
    ("bad-words", {"action": "append", "metavar": "TEXT", "help": "never say this; repeatable"}),
    ("min-tokens", {"type": within(0, LARGEST), "metavar": "N", "help": "shortest answer (default 0)"}),
    ("ignore-eos", {"action": argparse.BooleanOptionalAction, "help": "go on past end tokens"}),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_flags(parser, SAMPLING_FLAGS)


def sampling(arguments: argparse.Namespace, **more: Any) -> SamplingParams:
    """Return what the flags ask for. RequestError naming the field that is out of range."""
    given = {name: value for name, value in vars(arguments).items() if name in {f.name for f in fields(SamplingParams)}}
    given.pop("seed", None)  # --seed is the engine's
    if hasattr(arguments, "sampling_seed"):
        given["seed"] = arguments.sampling_seed
    for name in ("stop", "logit_bias", "bad_words"):
        if name in given:
            given[name] = tuple(given[name])
    return SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS} | given | more)
