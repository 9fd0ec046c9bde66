"""Compiles every small kernel ahead of time for one architecture; prints name, registers, stack and shared bytes.

python tests/unit/triton/small_aot.py 90
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from drivetrain_triton import (
    activations,
    adjust,
    draws,
    embedding,
    filters,
    layer_norms,
    logprobs,
    norms,
    prepare,
    rope,
)

BF16, F32, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"
SIZE, VOCABULARY = 4096, 128256


def norm_kernels():
    block, rows, warps = norms.row_shape(SIZE)
    settings = {"EPS": 1e-5, "OFFSET": 0.0, "ROUND": False, "SIZE": SIZE}
    whole = settings | {"BLOCK": block, "ROWS": rows, "OWN": False}
    ends = {"rows": "i32", "heads": "i32", "token_stride": "i32", "head_stride": "i32", "residual_stride": "i32"}
    tensors = {"x": BF16, "residual": F32, "weight": BF16, "normed": BF16, "total": F32}
    yield "norm", norms._norm, tensors | ends, whole | {"ADD": False}, warps
    yield "add_norm", norms._norm, tensors | ends, whole | {"ADD": True}, warps
    block, rows, warps = norms.row_shape(128)
    heads = settings | {"SIZE": 128, "BLOCK": block, "ROWS": rows, "OWN": False, "ADD": False}
    yield "head_norm", norms._norm, tensors | ends, heads, warps
    ends.pop("rows")
    long = settings | {"SIZE": 20480, "BLOCK": norms.PIECE, "OWN": False, "ADD": True}
    yield "long_norm", norms._long_norm, tensors | ends, long, 16
    tensors = {"x": BF16, "residual": F32, "weight": BF16, "bias": BF16, "normed": BF16, "total": F32}
    strides = {"x_stride": "i32", "residual_stride": "i32"}
    for add in (True, False):
        layer = {"EPS": 1e-5, "ADD": add, "SIZE": 6144, "BLOCK": layer_norms.PIECE}
        yield f"layer_norm_{add}", layer_norms._layer_norm, tensors | strides, layer, 16


def pointwise_kernels():
    for kind in ("silu", "gelu", "gelu_tanh"):
        settings = {"KIND": kind, "SIZE": 14336, "BLOCK": activations.BLOCK}
        signature = {"gate_up": BF16, "out": BF16, "stride": "i32"}
        yield kind, activations._gated, signature, settings, activations.WARPS
        alone = {"x": BF16, "out": BF16, "stride": "i32"}
        yield f"plain_{kind}", activations._plain, alone, settings, activations.WARPS
    signature = {"ids": I32, "weight": BF16, "out": BF16, "stride": "i32"}
    settings = {"SCALE": 2.0, "SIZE": SIZE, "BLOCK": embedding.BLOCK}
    yield "lookup", embedding._lookup, signature, settings, embedding.WARPS
    signature = {"positions": I32, "inv_freq": F32, "cos": F32, "sin": F32, "tokens": "i32", "position_stride": "i32"}
    settings = {"FACTOR": 1.0, "FIRST": 0, "SECOND": 0, "ROWS": 1, "HALF": 64, "BLOCK": 64, "TOKENS": rope.TOKENS}
    yield "angles", rope._angles, signature, settings, rope.WARPS
    signature = {"x": BF16, "cos": F32, "sin": F32, "out": BF16, "heads": "i32", "token_stride": "i32"}
    signature |= {"head_stride": "i32", "angle_stride": "i32"}
    for halves in (True, False):
        settings = {"DIM": 128, "HALF": 64, "BLOCK": 64, "REST": 0, "HALVES": halves, "HEADS": rope.HEADS}
        yield f"rotate_{halves}", rope._rotate, signature, settings, rope.WARPS


def step_kernels():
    names = ("rows_of", "start", "token_row", "token_offset", "host_ids", "num_new", "computed", "last_tokens", "out")
    signature = dict.fromkeys(names, I32)
    signature |= {"tables": (I32, I32), "strides": ("i32",) * 2, "odd_widths": ("i32",) * 2}
    signature |= dict.fromkeys(("num_rows", "num_tokens", "token_pieces", "row_pieces"), "i32")
    settings = {"SIZES": (16, 32), "GROUPS": 2, "PLACES": 4, "TOKENS": prepare.TOKENS, "COLUMNS": prepare.COLUMNS}
    yield "prepare", prepare._prepare, signature, settings, prepare.WARPS
    signature = {"tokens": I32, "witness": F32, "rows": I32, "last_tokens": I32, "packed": I32, "count": "i32"}
    yield "keep", prepare._keep, signature, {"PLACES": 1, "KEPT": prepare.KEPT}, prepare.WARPS


def draw_kernels():
    signature = {"logits": F32, "temperature": F32, "seed": I64, "position": I32, "sample": I32, "mask": I32}
    signature |= {"limits": I32, "min_p": F32, "best": I64}
    signature |= dict.fromkeys(("logits_stride", "mask_stride", "tiles", "stream"), "i32")
    for name, dtype, greedy, filtered in (
        ("greedy", BF16, True, False),
        ("draw", F32, False, False),
        ("draw_filtered", I32, False, True),
    ):
        settings = {"V": VOCABULARY, "OFFSET": 0, "GREEDY": greedy, "MASKED": False, "FILTERED": filtered}
        yield name, draws._scan, signature | {"logits": dtype}, settings | {"TILE": draws.TILE}, draws.WARPS
    signature = {"best": I64, "tokens": I32, "logits": F32, "pieces": "i32"}
    yield "choose", draws._choose, signature | {"logits": I32}, {"OFFSET": 0, "PIECES": 128, "TOLD": False}, 1
    yield "choose_best", draws._choose, signature, {"OFFSET": 0, "PIECES": draws.TILE, "TOLD": True}, draws.WARPS
    signature = {"logits": BF16, "temperature": F32, "mask": I32, "keys": I32, "logits_stride": "i32"}
    settings = {"V": VOCABULARY, "MASKED": True, "TILE": draws.TILE}
    yield "scale", draws._scale, signature | {"mask_stride": "i32"}, settings, draws.WARPS
    signature = {"keys": I32, "temperature": F32, "top_k": I32, "top_p": F32, "limits": I32}
    settings = {"V": VOCABULARY, "ANY_K": True, "ANY_P": True, "TILE": filters.TILE}
    yield "limits", filters._limits, signature, settings, filters.WARPS
    settings = {"V": VOCABULARY, "TILE": logprobs.TILE}
    yield "log_softmax", logprobs._log_softmax, {"logits": F32, "out": F32, "stride": "i32"}, settings, logprobs.WARPS


def adjust_kernels():
    real = ("repetition", "presence", "frequency")
    signature = {"logits": F32, "out": F32, "slots": I32, "counts": I32} | dict.fromkeys(real, F32)
    signature |= {"logits_stride": "i32", "strides": ("i32",) * 3}
    settings = {"V": VOCABULARY, "PENALTY": True, "TILE": adjust.TILE}
    yield "penalties", adjust._penalties, signature, settings, adjust.WARPS
    ids = ("position", "bias_ids", "held_ids", "first_stop", "bad_words", "recent")
    signature |= dict.fromkeys(ids, I32) | {"bias_values": F32, "strides": ("i32",) * 9}
    settings = {"V": VOCABULARY} | dict.fromkeys(("PENALTY", "BIAS", "HELD", "BAD_WORDS"), True)
    sizes = {"NUM_BIAS": 512, "NUM_HELD": 128, "NUM_WORDS": 128, "LENGTH": 16, "RING": 16}
    blocks = {"BIAS_BLOCK": 512, "HELD_BLOCK": 128, "WORDS_BLOCK": 128, "LENGTH_BLOCK": 16}
    yield "named", adjust._named, signature, settings | sizes | blocks, adjust.WARPS
    signature = dict.fromkeys(("tokens", "slots", "position", "counts", "recent"), I32)
    signature |= {"rows": "i32", "recent_stride": "i32"}
    yield "count", adjust._count, signature, {"V": VOCABULARY, "RING": 16, "BLOCK": adjust.COUNTED}, adjust.WARPS


def usage(cubin):
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}


def compile_for(arch, function, signature, settings, warps, overlaps):
    settings = settings | {"OVERLAPS": overlaps}
    constants = {name: value for name, value in settings.items() if name in function.arg_names}
    names = function.arg_names
    whole = {name: signature.get(name, "constexpr") for name in names}
    aligned = {}
    for number, name in enumerate(names):
        if isinstance(whole[name], str) and (whole[name].startswith("*") or name.endswith("stride")):
            aligned[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature=whole, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps} | ({"launch_pdl": True} if overlaps else {})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def main():
    arch = int(sys.argv[1])
    kept = sys.argv[2] if len(sys.argv) > 2 else None
    for family in (norm_kernels, pointwise_kernels, step_kernels, draw_kernels, adjust_kernels):
        for name, function, signature, settings, warps in family():
            compiled = compile_for(arch, function, signature, settings, warps, arch >= 90)
            if kept:
                with open(os.path.join(kept, f"{name}.ptx"), "w") as file:
                    file.write(compiled.asm["ptx"])
            print(json.dumps({"name": name} | usage(compiled.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
