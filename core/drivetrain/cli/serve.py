"""``engine serve MODEL``."""

from __future__ import annotations

import argparse

from drivetrain.cli.flags import ENGINE_FLAGS, SERVER_FLAGS, add_flags, add_model, configs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_model(parser)
    add_flags(parser, ENGINE_FLAGS)
    add_flags(parser, SERVER_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped. The device is resolved first, so its errors precede the model's."""
    from drivetrain.ahead import resolve_and_begin

    engine, server = configs(arguments)
    spec = resolve_and_begin(engine)
    try:
        from drivetrain.server.serve import serve_spec

        return serve_spec(spec, server)
    finally:
        spec.drop()
