"""Gated products of many rows on a device: the kernel with the activation inside beside the vendor's product and the
activation's own kernel, whatever the table of shapes says.

    python ci/perf/device_wide.py [--shapes A,C] [--rows 128,256,8192] [--json FILE]

Each is checked against float64 first, outputs poisoned. Times are medians over replays of a CUDA graph of all copies of
the weight, which are more than the cache holds; the vendor's are taken before and after, since a card that is hot is
slower.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from device_rates import about
from linear_parts import DEVICE, SHAPES, launch, timed
from torch.nn import functional

from drivetrain_api.v1 import GatedActivationSpec
from drivetrain_triton.activations import make_gated
from drivetrain_triton.linear_tiles import is_wide
from drivetrain_triton.linear_wide import wide_call
from drivetrain_triton.target import Target

ROWS = "96,128,192,256,320,384,512,768,1024,2048,4096,8192"
CACHED, MANY, LIMIT = 400 << 20, 24, 6e-3  # bytes beyond the cache; copies at most; relative error


def target() -> Target:
    facts = torch.cuda.get_device_properties(0)
    arch = facts.major * 10 + facts.minor
    shared = facts.shared_memory_per_block_optin
    return Target(
        kind="cuda", arch=arch, multiprocessors=facts.multi_processor_count, shared_bytes=shared, overlaps=arch >= 90
    )


def error_of(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> float:
    """The relative error of at most 512 rows, roundings of gate and up included in what is right."""
    some = torch.linspace(0, len(x) - 1, min(len(x), 512), device=x.device).long()
    gate, up = (x[some].double() @ weight.double().T).to(x.dtype).double().chunk(2, dim=1)
    wanted = functional.silu(gate).to(x.dtype).double() * up
    return float((out[some].double() - wanted).norm() / wanted.norm())


def point(name: str, rows: int, chip: Target) -> dict[str, Any]:
    """One shape and number of rows: microseconds each, and whether the result was right."""
    outs, inputs, kind = SHAPES[name]
    copies = max(1, min(MANY, CACHED // (outs * inputs * 2))) if rows < 2048 else 4
    weights = [
        torch.empty(outs, inputs, device=DEVICE, dtype=torch.bfloat16).normal_(std=inputs**-0.5) for _ in range(copies)
    ]
    x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
    out = torch.full((rows, outs // 2), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    activate = make_gated(GatedActivationSpec(dtype="bfloat16", kind=kind, size=outs // 2), chip)

    def each(work: Callable[[torch.Tensor], Any]) -> float:
        return round(timed(lambda: [work(weight) for weight in weights] and None) / copies * 1e6, 2)

    launch(wide_call(x, weights[0], out, kind, chip))
    error = error_of(x, weights[0], out)
    return {
        "shape": name,
        "rows": rows,
        "error": error,
        "right": error < LIMIT,
        "table": is_wide(rows, outs // 2, inputs, chip.arch, 2, chip.multiprocessors),
        "vendor_us": each(lambda weight: functional.linear(x, weight)),
        "apart_us": each(lambda weight: activate(functional.linear(x, weight))),
        "inside_us": each(lambda weight: launch(wide_call(x, weight, out, kind, chip))),
        "apart_again_us": each(lambda weight: activate(functional.linear(x, weight))),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="A,C")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chip, found = target(), []
    for name in args.shapes.split(","):
        for rows in map(int, args.rows.split(",")):
            found.append(point(f"{name}.gate_up", rows, chip))
            print(json.dumps(found[-1]), flush=True)
            torch.cuda.empty_cache()
            if args.json:
                facts = about(torch.device(DEVICE)) | {"points": found}
                args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return int(not all(one["right"] for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
