"""``engine plan MODEL --device X``: what memory will be used for, term by term, before anything is loaded."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from drivetrain.cli.flags import ENGINE_FLAGS, add_flags, add_json, add_model, configs, write_json

MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_model(parser)
    add_flags(parser, ENGINE_FLAGS)
    parser.add_argument("--measure", action="store_true", help="load too, warm up, and print the error of the plan")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; with ``--measure`` also what was measured."""
    from drivetrain.launch import Parts, describe, resolve_device

    config, _ = configs(arguments)
    described = describe(config, resolve_device(config))
    from drivetrain.starting import check_format, memory_of, start  # after the backend has set what torch must find

    check_format(config, described)
    opened = start(config, described, Parts(), measure=True) if arguments.measure else None
    plan = opened.memory if opened else memory_of(config, described)
    data: dict[str, Any] = {
        "model": config.model,
        "dtype": described.dtype,
        "max_model_len": plan.max_model_len,
        "terms": [asdict(term) for term in plan.terms()],
        "cache": asdict(plan.cache),
    }
    if opened:
        data["measured"] = {
            name: opened.figures[name] for name in ("weights_loaded_bytes", "measured_peak_bytes", "memory_error")
        }
        opened.loop.close()
    if arguments.json:
        write_json(arguments.json, data)
        return 0
    print(f"{config.model}, {described.dtype}, sequences of up to {plan.max_model_len} tokens")
    for term in plan.terms():
        print(f"  {term.name:10} {term.nbytes / MIB:10.1f} MiB  {term.note}")
    if plan.cache.padding_too_large:
        print(f"  warning: blocks waste {plan.cache.padding:.1%} of the cache; try another --block-size")
    if opened:
        found = data["measured"]
        print(
            f"  measured   {found['measured_peak_bytes'] / MIB:10.1f} MiB  the plan is {found['memory_error']:+.1%} off"
        )
    return 0
