"""Compiles the attention kernel of long prompts for compute capability 9.0 without a device; prints a line of JSON.

python -m tests.unit.triton.compiled_prompt
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from drivetrain_triton.attention_stream import layout_of, prompt_kernel

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
POINTERS = {"out": "*bf16", "q": "*bf16", "query_start": "*i32", "lengths": "*i32", "tables": "*i32"}
NUMBERS = ("rows", "base", "tiles", "table_stride", "q_stride")


def said_of(tool, option, cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout


def main():
    for heads, group in ((32, 4), (16, 2)):
        box = f"tensordesc<bf16[16,128],{layout_of(torch.bfloat16)!r}>"
        fixed = {"HEADS": heads, "GROUP": group, "BLOCK_Q": 128 // group, "KEY_RATIO": 1024, "VALUE_RATIO": 1024}
        fixed |= {"STAGES": 2, "OVERLAPS": True}
        kinds = POINTERS | {"keys": box, "values": box, "scale": "fp32"} | dict.fromkeys(NUMBERS, "i32")
        names = prompt_kernel.arg_names
        signature = {name: kinds.get(name, "constexpr") for name in names}
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in ("out", "q", "q_stride")}
        source = GluonASTSource(
            prompt_kernel, signature, {(names.index(name),): v for name, v in fixed.items()}, attributes
        )
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
        cubin, ptx = made.asm["cubin"], made.asm["ptx"]
        used = said_of("cuobjdump", "--dump-resource-usage", cubin)
        code = said_of("cuobjdump", "-sass", cubin)
        print(json.dumps({
            "heads": heads, "shared": made.metadata.shared, "stack": int(re.search(r"STACK:(\d+)", used).group(1)),
            "products": code.count("HGMMA."), "waits": code.count("WARPGROUP.DEPBAR"),
            "copies": ptx.count("cp.async.bulk.tensor"), "overlaps": "griddepcontrol.wait" in ptx,
        }))  # fmt: skip


if __name__ == "__main__":
    main()
