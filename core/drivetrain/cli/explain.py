"""``engine explain MODEL --device X``: which implementation serves every op of a model, why, and what it costs."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from drivetrain.cli.flags import ENGINE_FLAGS, add_flags, add_json, add_model, configs, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_model(parser)
    add_flags(parser, ENGINE_FLAGS)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Bind the model on the device, load nothing, and print a line an op."""
    from drivetrain.launch import describe, resolve_device
    from drivetrain_api.v1 import AdjustSpec, DrawSpec, LogprobsSpec, PrepareSpec

    config, _ = configs(arguments)
    choice = resolve_device(config)
    described = describe(config, choice)
    from drivetrain.starting import check_format  # after the backend has set what torch must find

    check_format(config, described)
    paged = [group.layout for group in described.decoder.groups if group.spec.kind != "recurrent"]
    described.ops.bind(
        PrepareSpec(dtype=paged[0].slot_dtype, block_tokens=tuple(layout.block_tokens for layout in paged))
    )
    described.ops.bind(DrawSpec(dtype="float32", vocabulary=described.spec.vocabulary))
    described.ops.bind(LogprobsSpec(dtype="float32", vocabulary=described.spec.vocabulary))
    described.ops.bind(AdjustSpec(dtype="float32", vocabulary=described.spec.vocabulary))
    rows: list[dict[str, Any]] = [
        {
            "op": one.op,
            "case": repr(one.spec),
            "uses": one.count,
            "provider": one.provider,
            "implementation": one.label,
            "reason": one.reason,
            "waits_per_step": one.traits.waits_per_step,
            "batch_invariant": one.traits.batch_invariant,
            "graph": one.traits.graph,
        }
        for one in described.ops.report
    ]
    depth = config.depth or described.backend.capabilities.default_depth
    if arguments.json:
        write_json(arguments.json, {"device": choice.name, "wheel": choice.wheel, "depth": depth, "ops": rows})
        return 0
    print(f"{config.model} on {choice.name} ({choice.wheel} {choice.version}), {described.dtype}, depth {depth}")
    for row in rows:
        waits = f", {row['waits_per_step']} wait a step" if row["waits_per_step"] else ""
        why = f" ({row['reason']})" if row["reason"] else ""
        print(f"  {row['op']:22} x{row['uses']:<4} {row['provider']:10} {row['implementation']}{waits}{why}")
    total = Counter(row["provider"] for row in rows)
    print("  " + ", ".join(f"{count} ops {name}" for name, count in sorted(total.items())))
    return 0
