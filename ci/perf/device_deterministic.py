"""What ``--deterministic`` costs its kernels: linears and attention both ways, side by side.

    python ci/perf/device_deterministic.py --json FILE [--only linear,attention] [--shapes A.out,C.head]

Medians over replays of CUDA graphs; weights and caches are copied until a chain over all copies reads from memory.
Each batch-invariant result is compared with that of more rows, bit by bit. The JSON is written after each line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from attention_cases import SHAPES as HEADS
from attention_cases import Cache, batch_of, spec_of, target
from device_rates import about
from linear_parts import DEVICE, ROOT, SHAPES, shape_dtype, timed

sys.path.insert(0, str(ROOT / "backends/cuda"))

from drivetrain_api.v1 import LinearSpec
from drivetrain_cuda.linear import DeviceLinear, InvariantLinear
from drivetrain_triton.attention import TritonAttention
from drivetrain_triton.attention_invariant import InvariantAttention

ROWS = (1, 8, 64, 65, 256, 1024, 4096)
BYTES = 320 << 20
# (rows, length, queries)
POINTS = [(1, 208, 1), (1, 8192, 1), (64, 1024, 1), (256, 1024, 1), (1, 100_000, 1), (1, 4096, 256), (1, 4096, 4096)]


def linears(name: str) -> list[dict[str, Any]]:
    """One line a number of rows: seconds of both ways, and whether rows kept their bits."""
    outs, ins, _ = SHAPES[name]
    role = "lm_head" if name.endswith("head") else ""
    spec = LinearSpec(dtype="bfloat16", in_features=ins, out_features=outs, role=role)
    ways = {"usual": DeviceLinear(spec, target()), "deterministic": InvariantLinear(spec, target())}
    copies = max(1, min(24, -(-BYTES // (2 * outs * ins))))
    weights = [(torch.randn(outs, ins, device=DEVICE) * ins**-0.5).bfloat16() for _ in range(copies)]
    packed = [ways["usual"].pack(weight, None) for weight in weights]
    most = 1024 if role else ROWS[-1]
    x = torch.randn(most, ins, device=DEVICE).bfloat16()
    whole, found = ways["deterministic"].apply(x, packed[0]), []
    for rows in (each for each in ROWS if each <= most):
        some, line = x[:rows].contiguous(), {"linear": name, "rows": rows, "dtype": str(shape_dtype(name))}
        line["same_bits"] = torch.equal(ways["deterministic"].apply(some, packed[0]), whole[:rows])
        for way, linear in ways.items():
            line[way] = timed(lambda apply=linear.apply, some=some: _all(apply, some, packed)) / copies
        found.append(line)
    return found


def _all(apply: Any, x: torch.Tensor, packed: list[Any]) -> None:
    for one in packed:
        apply(x, one)


def attentions(name: str) -> list[dict[str, Any]]:
    """One line a point: seconds of both ways."""
    spec, found = spec_of(*HEADS[name]), []
    for rows, length, queries in POINTS:
        batch, blocks = batch_of([(length, queries)] * rows)
        heads, kv_heads, size = HEADS[name]
        layers = max(2, min(32, BYTES // (blocks * 2 * 16 * kv_heads * size * 2) + 1))
        pool = torch.randn(layers * blocks, 2, 16, kv_heads, size, device=DEVICE).bfloat16()
        caches = [Cache(pool, i * blocks, blocks) for i in range(layers)]
        q = torch.randn(rows * queries, heads, size, device=DEVICE).bfloat16()
        line: dict[str, Any] = {"attention": name, "rows": rows, "length": length, "queries": queries}
        for way, kind in (("usual", TritonAttention), ("deterministic", InvariantAttention)):
            made = kind(spec, target())
            plan = made.plan(batch)
            line[way] = timed(lambda m=made, p=plan, q=q, c=caches: _layers(m, p, q, c)) / layers
        found.append(line)
        del pool, caches
    return found


def _layers(attention: Any, plan: Any, q: torch.Tensor, caches: list[Cache]) -> None:
    for cache in caches:
        attention.forward(q, cache, plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="linear,attention")
    parser.add_argument("--shapes", default=",".join([*SHAPES, *HEADS]))
    given, found = parser.parse_args(), []
    for name in given.shapes.split(","):
        kind, work = ("linear", linears) if name in SHAPES else ("attention", attentions)
        if kind not in given.only:
            continue
        for line in work(name):
            found.append(line | {"ratio": line["deterministic"] / line["usual"]})
            print(json.dumps(found[-1]), flush=True)
        torch.cuda.empty_cache()
        if given.json:
            given.json.write_text(
                json.dumps(about(torch.device(DEVICE)) | {"lines": found}, indent=1) + "\n", encoding="utf-8"
            )


if __name__ == "__main__":
    main()
