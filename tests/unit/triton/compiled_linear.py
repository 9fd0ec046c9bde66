"""Compiles the linears of the table for one chip without a device, and prints a line of JSON for each kernel.

    python -m tests.unit.triton.compiled_linear 90 [normed | wide | head | panel]

A process of its own: in the tests' process the same kernels are interpreted.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from drivetrain_api.v1 import AddRmsNormSpec
from drivetrain_triton import linear, linear_normed, linear_normed_tiles
from drivetrain_triton.linear_tiles import PANELS, choose, choose_panel
from drivetrain_triton.target import Target

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
SHAPES = ((4096, 4096, ""), (28672, 4096, "silu"), (1024, 3072, ""))
PANEL = (
    *((*shape, "silu" if shape == (6144, 1024) else "") for shape in PANELS),
    (4096, 1024, "gelu"),
    (8192, 512, "gelu_tanh"),
    (3072, 2048, ""),
    (2048, 2048, ""),
    (8192, 1024, ""),
)
NORMED = ((4096, 1024, ""), (6144, 1024, "silu"), (6144, 4096, ""), (28672, 4096, "silu"), (96, 264, ""))


def call_of(rows, shape, arch):
    outputs, inputs, kind = shape
    target = Target(kind="cuda", arch=arch, multiprocessors=132, shared_bytes=0, overlaps=arch >= 90)
    x, weight = (torch.empty(size, inputs, dtype=torch.bfloat16, device="meta") for size in (rows, outputs))
    out = torch.empty(rows, outputs // 2 if kind else outputs, dtype=torch.bfloat16, device="meta")
    operands = linear.Operands(x, weight, None, out, kind)
    return linear.product_call(operands, target, choose(rows, outputs, inputs, arch))


def normed_calls(arch):
    """(rows, shape, call) of what the table gives behind norms."""
    target = Target(kind="cuda", arch=arch, multiprocessors=132, shared_bytes=0, overlaps=arch >= 90)
    for outputs, inputs, kind in NORMED:
        for rows, stream, dtype, more in (
            (1, torch.float32, torch.bfloat16, {}),
            (2, torch.float32, torch.bfloat16, {"offset": 1.0}),
            (2, torch.float32, torch.bfloat16, {"round_before_weight": True}),
            (1, None, torch.bfloat16, {}),
            (2, torch.float32, torch.float32, {}),
        ):

            def empty(*shape, dtype=dtype):
                return torch.empty(*shape, dtype=dtype, device="meta")

            residual = None if stream is None else empty(rows, inputs, dtype=stream)
            norm = AddRmsNormSpec(dtype=str(dtype).removeprefix("torch."), size=inputs, eps=1e-6, **more)
            weight, out = empty(outputs, inputs), empty(rows, outputs // 2 if kind else outputs)
            total = empty(rows, inputs, dtype=torch.float32)
            tensors = (empty(rows, inputs), residual, empty(inputs), norm, weight, None, out, total, kind)
            tiles = linear_normed_tiles.choose(rows, outputs, inputs, dtype.itemsize)
            call = linear_normed.normed_call(linear_normed.Normed(*tensors), target, tiles)
            yield rows, (outputs, inputs, kind), call


def wide_calls(arch):
    """(rows, shape, call) of gated products of many rows."""
    from drivetrain_triton.linear_wide import wide_call  # it needs Triton's Gluon

    target = Target(kind="cuda", arch=arch, multiprocessors=132, shared_bytes=0, overlaps=True)
    for rows, kind in ((256, "silu"), (1000, "gelu"), (8192, "gelu_tanh")):
        x, weight, out = (
            torch.empty(*shape, dtype=torch.bfloat16, device="meta")
            for shape in ((rows, 1024), (6144, 1024), (rows, 3072))
        )
        yield rows, (6144, 1024, kind), wide_call(x, weight, out, kind, target)


def panel_calls(arch):
    """(rows, shape, call) of small weights at 17 to 64 rows: what was measured, and what the rule gives."""
    target = Target(kind="cuda", arch=arch, multiprocessors=132, shared_bytes=0, overlaps=True)
    for outputs, inputs, kind in PANEL:
        for rows in (32, 64):
            for dtype, biased in ((torch.bfloat16, False), (torch.float16, True)):
                tiles = choose_panel(rows, outputs, inputs, arch, 2, 132, bool(kind))
                if tiles is None or (biased and kind):
                    continue
                x, weight, out, bias = (
                    torch.empty(*shape, dtype=dtype, device="meta")
                    for shape in (
                        (rows, inputs),
                        (outputs, inputs),
                        (rows, outputs // 2 if kind else outputs),
                        (outputs,),
                    )
                )
                operands = linear.Operands(x, weight, bias if biased else None, out, kind)
                yield rows, (outputs, inputs, kind), linear.product_call(operands, target, tiles)


def head_calls(arch):
    """(rows, shape, call) of heads without logits."""
    from drivetrain_triton import linear_head  # it needs Triton's Gluon

    target = Target(kind="cuda", arch=arch, multiprocessors=132, shared_bytes=0, overlaps=True)
    for vocabulary, inputs in ((151936, 1024), (128256, 4096), (1000, 1024)):
        for rows in (2, 16, 32, 64, 65, 1000):
            x, weight = (torch.empty(size, inputs, dtype=torch.bfloat16, device="meta") for size in (rows, vocabulary))
            best = linear_head.empty_best(x, weight, target)
            yield rows, (vocabulary, inputs, ""), linear_head.best_call(x, weight, best, target)


def compile_call(call, arch, plain=("M",)):
    names, signature, attributes = call.kernel.arg_names, {}, {}
    for index, (name, value) in enumerate(zip(names, call.args, strict=False)):
        tensor = isinstance(value, torch.Tensor)
        signature[name] = TYPES[value.dtype] if tensor else "i32"
        if hasattr(value, "block_shape"):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape},{value.layout!r}>"
            continue
        if tensor or (name not in plain and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    constants = {name: call.options[name] for name in names[len(call.args) :]}
    signature |= dict.fromkeys(constants, "constexpr")
    options = {name: value for name, value in call.options.items() if name not in names}
    if "num_warps" in names:
        constants["num_warps"] = options["num_warps"] = call.options["num_warps"]
    made = GluonASTSource if call.kernel.is_gluon() else ASTSource
    source = made(fn=call.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def said_of(option, cubin):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def resources(cubin):
    text = said_of("--dump-resource-usage", cubin)
    return [int(one) for one in re.search(r"REG:(\d+) STACK:(\d+)", text).groups()]


def order(ptx):
    """What a kernel does first, by position; -1: never."""
    marks = {"first_weight": r"ld\.global|cp\.async\.bulk\.tensor", "wait": r"griddepcontrol\.wait"}
    found = {name: re.search(pattern, ptx) for name, pattern in marks.items()}
    return {name: one.start() if one else -1 for name, one in found.items()}


def main():
    arch, seen = int(sys.argv[1]), set()
    calls = ((rows, shape, call_of(rows, shape, arch)) for shape in SHAPES for rows in (1, 2, 8, 64))
    others = {"normed": normed_calls, "wide": wide_calls, "head": head_calls, "panel": panel_calls}
    calls = others[sys.argv[2]](arch) if sys.argv[2:] else calls
    for rows, shape, call in calls:
        types = tuple(one.dtype for one in call.args if isinstance(one, torch.Tensor))
        key = (call.kernel.__name__, types, *sorted(call.options.items()))
        if key in seen:
            continue
        seen.add(key)
        compiled = compile_call(call, arch)
        registers, stack = resources(compiled.asm["cubin"])
        ptx = compiled.asm["ptx"]
        facts = {"kernel": call.kernel.__name__, "shape": shape, "rows": rows, "registers": registers}
        facts |= {"stack": stack, "shared": compiled.metadata.shared, "wgmma": "wgmma.mma_async" in ptx}
        facts |= {"wide": ".v4.b32" in ptx, "copies": "cp.async.bulk.tensor" in ptx}
        if rows > 64 or call.kernel.__name__ == "panel_products":
            code = said_of("-sass", compiled.asm["cubin"])
            facts |= {"products": code.count("HGMMA."), "waits": code.count("WARPGROUP.DEPBAR")}
        print(json.dumps(facts | order(ptx)))


if __name__ == "__main__":
    main()
