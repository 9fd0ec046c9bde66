"""Compiles the batch-invariant attention for one chip without a device; prints a line of JSON for each kernel.

python -m tests.unit.triton.compiled_invariant_attention 90 128
"""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from drivetrain_api.v1 import AttentionSpec, CacheLayout, CachePart, CacheSpec
from drivetrain_triton import attention_invariant as invariant
from drivetrain_triton.target import Target
from tests.unit.triton.compiled_invariant import INSTRUCTION
from tests.unit.triton.compiled_linear import resources

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
INTS = dict.fromkeys(("query_start", "lengths", "tables"), "*i32")
FLOATS = {"sums": "*fp32", "marks": "*fp32", "scale": "fp32", "cap": "fp32"}
PLAIN = ("rows", "tiles", "most", "taken", "table_stride", "scale", "cap")


def compiled(kernel, fixed, arch, dtype, warps, stages):
    names = kernel.arg_names
    constants = {name: value for name, value in fixed.items() if name in names}
    kinds = INTS | FLOATS | dict.fromkeys(("out", "q", "keys", "values", "sinks"), dtype)
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    whole = [(i,) for i, name in enumerate(names) if name not in constants and name not in PLAIN]
    attributes = {at: [["tt.divisibility", 16]] for at in whole}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages} | ({"launch_pdl": True} if arch >= 90 else {})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def main():
    arch, size = (int(word) for word in sys.argv[1:])
    target = Target(kind="cuda", arch=arch, multiprocessors=132, shared_bytes=SHARED[arch], overlaps=arch >= 90)
    for dtype, name in (("bfloat16", "*bf16"), ("float32", "*fp32")):
        parts = tuple(CachePart(name=n, shape=(8, size), dtype=dtype) for n in "kv")
        layout = CacheLayout(
            spec=CacheSpec(kind="full", parts=parts), block_tokens=16, bytes_per_block=0, alignment=64,
            strided=True, slot_dtype="int32",
        )  # fmt: skip
        sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": size, "v_head_dim": size}
        made = invariant.InvariantAttention(AttentionSpec(dtype=dtype, scale=0.1, layout=layout, **sizes), target)
        tiles = made.tiles
        strides = {"KEY_TOKEN": 8 * size, "KEY_HEAD": size, "VALUE_TOKEN": 8 * size, "VALUE_HEAD": size}
        fixed = made._common | strides | {"HEADS": 32, "GROUP": 4, "SOFT_CAPPED": False, "SINKS": False}
        fixed |= {"BLOCK_M": tiles.block_m, "BLOCK_Q": tiles.block_m // 4, "BLOCK_N": tiles.block_n}
        fixed |= {"GROUP_PAD": 4, "AT_ONCE": 8}
        for direct, window, kernel in (
            (True, 0, invariant.invariant_kernel),
            (True, 4096, invariant.invariant_kernel),
            (False, 0, invariant.invariant_kernel),
            (False, 0, invariant.join_kernel),
        ):
            if not direct and not fixed["RANGE"]:
                continue
            own = fixed | {"DIRECT": direct, "WINDOW": window}
            joins = kernel is invariant.join_kernel
            warps, stages = (4, 3) if joins else (tiles.warps, tiles.stages)
            binary = compiled(kernel, own, arch, name, warps, stages)
            registers, stack = resources(binary.asm["cubin"])
            ptx = binary.asm["ptx"]
            print(json.dumps({
                "kernel": kernel.__name__, "dtype": dtype, "direct": direct, "window": window, "registers": registers,
                "stack": stack, "shared": binary.metadata.shared, "warps": warps,
                "instructions": sorted(set(re.findall(INSTRUCTION, ptx))), "copies": "cp.async" in ptx,
                "waits": "griddepcontrol.wait" in ptx, "tf32": "tf32" in ptx,
            }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
