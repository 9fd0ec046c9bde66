"""Compiles the batch-invariant linears for one chip without a device; prints a line of JSON for each kernel.

    python -m tests.unit.triton.compiled_invariant 90

A process of its own: in the tests' process the same kernels are interpreted.
"""

import json
import re
import sys

import torch

from drivetrain_triton import linear_invariant as invariant
from drivetrain_triton.target import Target
from tests.unit.triton import compiled_linear
from tests.unit.triton.compiled_linear import compile_call, resources

compiled_linear.TYPES |= {torch.float16: "*fp16"}
PLAIN = ("rows", "tiles", "taken")
INSTRUCTION = r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[^\s;]*"


def calls(arch):
    target = Target(kind="cuda", arch=arch, multiprocessors=132, shared_bytes=0, overlaps=arch >= 90)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for outs, ins, biased in ((4096, 4096, False), (47, 264, True), (151936, 1024, False)):
            for rows in (1, 16, 64, 65, 300, 4096):
                x, weight = (torch.empty(size, ins, dtype=dtype, device="meta") for size in (rows, outs))
                bias = torch.empty(outs, dtype=dtype, device="meta") if biased else None
                out = torch.empty(rows, outs, dtype=dtype, device="meta")
                for launch in invariant.launches_of(invariant.Operands(x, weight, bias, out), target):
                    yield str(dtype), rows, launch


def main():
    arch, seen = int(sys.argv[1]), set()
    for dtype, rows, call in calls(arch):
        types = tuple(one.dtype for one in call.args if isinstance(one, torch.Tensor))
        key = (call.kernel.__name__, types, *sorted(call.options.items()))
        if key in seen:
            continue
        seen.add(key)
        compiled = compile_call(call, arch, PLAIN)
        registers, stack = resources(compiled.asm["cubin"])
        ptx = compiled.asm["ptx"]
        used = sorted(
            {line.split()[0] for line in re.findall(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[^\n;]*", ptx)}
        )
        print(json.dumps({
            "kernel": call.kernel.__name__, "dtype": dtype, "rows": rows, "registers": registers, "stack": stack,
            "shared": compiled.metadata.shared, "warps": call.options["num_warps"], "instructions": used,
            "copies": "cp.async" in ptx, "waits": "griddepcontrol.wait" in ptx, "direct": call.options.get("DIRECT"),
            "even": call.options.get("EVEN"), "tf32": "tf32" in ptx,
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
