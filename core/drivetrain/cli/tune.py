"""``engine tune MODEL --device X``: build ahead what serving the model with these flags would compile at its start."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from drivetrain.cli.flags import ENGINE_FLAGS, add_flags, add_json, add_model, configs, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_model(parser)
    add_flags(parser, ENGINE_FLAGS)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Start as ``engine serve`` would, with made-up weights, and tell what was compiled."""
    from drivetrain.ahead import resolve_and_load
    from drivetrain.launch import Parts, describe, nothing_collected

    config, _ = configs(arguments)
    with nothing_collected():
        choice = resolve_and_load(config)
        described = describe(config, choice)
        from drivetrain.starting import check_format, start  # after the backend has set what torch must find

        check_format(config, described)
        data: dict[str, Any] = {"model": config.model, "device": choice.name, "dtype": described.dtype}
        if getattr(described.backend, "compiler", None) is None:
            described.backend.close()
            return tell(arguments, data | {"compiles": False, "built": 0, "found": 0, "seconds": 0.0, "place": ""})
        opened = start(replace(config, load_format="dummy"), described, Parts())
    opened.loop.close()
    ahead = opened.ahead
    assert ahead is not None
    report = ahead.report
    data |= {
        "compiles": True,
        "built": report.built if report else 0,
        "found": report.found if report else 0,
        "seconds": ahead.seconds,
        "place": report.place if report else "",
    }
    return tell(arguments, data)


def tell(arguments: argparse.Namespace, data: dict[str, Any]) -> int:
    """Print what was built, or write it."""
    if arguments.json:
        write_json(arguments.json, data)
        return 0
    print(f"{data['model']}, {data['dtype']}, on {data['device']}")
    if not data["compiles"]:
        print("  nothing to build: this backend compiles nothing at a start")
        return 0
    print(f"  kernels built {data['built']:6}   in {data['seconds']:.1f} s")
    print(f"  already there {data['found']:6}")
    print(f"  kept in {data['place'] or 'a place that the backend does not tell'}")
    return 0
