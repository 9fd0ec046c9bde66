"""Compiles the kernel of decode attention by bulk copies for compute capability 9.0 without a device.

    python -m tests.unit.triton.compiled_token FOLDER

Leaves each kernel's PTX in the folder and prints a line of JSON for it.
"""

import json
import re
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from drivetrain_triton.attention_stream import layout_of
from drivetrain_triton.attention_token_stream import token_stream_kernel
from tests.unit.triton.compiled_prompt import said_of

POINTERS = dict.fromkeys(("out", "x", "weight", "key_cache", "value_cache"), "*bf16")
POINTERS |= dict.fromkeys(("partial", "lse", "cos", "sin"), "*fp32")
POINTERS |= dict.fromkeys(("arrivals", "slots", "lengths", "tables"), "*i32")
NUMBERS = {"table_stride": "i32", "table_width": "i32", "x_stride": "i32", "scale": "fp32", "eps": "fp32"}
# name: heads, group, tokens, warps, stages, least, one share, norm, halves, rotated pairs
KERNELS = {
    "one warp": (8, 4, 16, 1, 3, 1, True, True, True, 64),
    "one warp, two shares": (4, 2, 32, 1, 2, 1, False, False, True, 64),
    "two warps": (8, 8, 16, 2, 2, 1, True, True, False, 64),
    "four warps, shares": (4, 4, 16, 4, 4, 4, False, True, True, 64),
    "four warps, short shares": (2, 1, 16, 4, 2, 1, False, False, True, 32),
    "eight warps": (7, 7, 16, 8, 2, 1, True, False, True, 64),
    "eight warps, one stage": (4, 4, 32, 8, 1, 1, False, False, True, 64),
}
NAMES = ("HEADS", "GROUP", "TOKENS", "num_warps", "STAGES", "LEAST", "DIRECT", "NORM", "HALVES", "HALF")
FIXED = {"OFFSET": 0.0, "ROUND": False, "KEY_RATIO": 32, "VALUE_RATIO": 32, "EARLY": True, "OVERLAPS": True}


def settings_of(name):
    return FIXED | dict(zip(NAMES, KERNELS[name], strict=True))


def main():
    box = f"tensordesc<bf16[16,128],{layout_of(torch.bfloat16)!r}>"
    kinds = POINTERS | NUMBERS | {"keys": box, "values": box}
    names = token_stream_kernel.arg_names
    signature = {name: kinds.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in (*POINTERS, "x_stride")}
    for name in KERNELS:
        fixed = settings_of(name)
        constants = {(names.index(key),): value for key, value in fixed.items()}
        source = GluonASTSource(token_stream_kernel, signature, constants, aligned)
        options = {"num_warps": fixed["num_warps"], "launch_pdl": True}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx, cubin = made.asm["ptx"], made.asm["cubin"]
        (Path(sys.argv[1]) / f"{name}.ptx").write_text(ptx)
        used = said_of("cuobjdump", "--dump-resource-usage", cubin)
        registers, stack = (int(word) for word in re.search(r"REG:(\d+) STACK:(\d+)", used).groups())
        print(json.dumps({
            "name": name, "registers": registers, "stack": stack, "shared": made.metadata.shared,
            "warps": fixed["num_warps"], "copies": ptx.count("cp.async.bulk.tensor"),
            "fragments": ptx.count("ldmatrix"), "products": ptx.count("mma.sync"),
            "waits": ptx.count("griddepcontrol.wait"),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
