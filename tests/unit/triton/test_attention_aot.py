"""What the compilers make of the attention kernels: registers, shared memory, matrix instructions.

In a process of its own: the interpreter replaces the kernels that it runs.
"""

import json
import os
import subprocess
import sys

import pytest

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}

SCRIPT = r"""
import json, os, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from drivetrain_api.v1 import AttentionSpec, CacheLayout, CachePart, CacheSpec
from drivetrain_triton.attention_choice import MAX_SPLITS, decode_tiles, prefill_tiles, shares_at_once
from drivetrain_triton.attention_decode import decode_kernel, merge_kernel
from drivetrain_triton.attention_prefill import prefill_kernel
from drivetrain_triton.attention_token import token_kernel
from drivetrain_triton.attention_write import rotate_kernel, write_kernel
from drivetrain_triton.target import Target

arch, shared, size = (int(word) for word in sys.argv[1:])
FLOATS = {name: "*bf16" for name in "out q x k v weight keys values sinks".split()}
WIDE = {name: "*fp32" for name in "partial lse cos sin".split()}
INTS = {name: "*i32" for name in "lengths query_start tables slots arrivals".split()}
NUMBERS = {"scale": "fp32", "cap": "fp32", "eps": "fp32"}
TYPES = FLOATS | WIDE | INTS | NUMBERS
PLAIN = {"rows", "base", "tiles", "table_stride", "table_width", "splits", *NUMBERS}
parts = tuple(CachePart(name=n, shape=(8, size), dtype="bfloat16") for n in "kv")
layout = CacheLayout(spec=CacheSpec(kind="full", parts=parts), block_tokens=16, bytes_per_block=0, alignment=64,
                     strided=True, slot_dtype="int32")
spec = AttentionSpec(dtype="bfloat16", num_heads=32, num_kv_heads=8, head_dim=size, v_head_dim=size, scale=0.1,
                     layout=layout)
target = Target(kind="cuda", arch=arch, multiprocessors=132, shared_bytes=shared, overlaps=arch >= 90)
places = {"KEY_TOKEN": 8 * size, "KEY_HEAD": size, "VALUE_TOKEN": 8 * size, "VALUE_HEAD": size}
sizes = places | {"D": size, "DV": size, "D_PAD": size, "DV_PAD": size, "BLOCK_TOKENS": 16,
                  "OVERLAPS": target.overlaps}
rules = {"HEADS": 32, "GROUP": 4, "WINDOW": 0, "SOFT_CAPPED": False, "SINKS": False}


def measure(name, kernel, constants, warps, stages):
    names = kernel.arg_names
    constants = {n: v for n, v in constants.items() if n in names}
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "i32") for n in names}
    whole = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants and n not in PLAIN}
    made = triton.compile(
        ASTSource(kernel, signature=signature, constexprs=constants, attrs=whole),
        target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": stages},
    )
    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        dump = [tools + "/cuobjdump", "--dump-resource-usage", file.name]
        said = subprocess.run(dump, capture_output=True, text=True)
    registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", said.stdout).groups())
    ptx = made.asm["ptx"]
    print(json.dumps({
        "name": name, "registers": registers, "stack": stack, "shared": made.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"), "copies": ptx.count("cp.async.cg"), "waits": "griddepcontrol" in ptx,
    }))


turn = {"HALF": size // 2, "HALVES": True, "NORM": True, "OFFSET": 0.0, "ROUND": False}
for direct, programs in ((True, 500), (False, 8), (True, 5000)):
    tiles = decode_tiles(spec, target, programs, False)
    fixed = sizes | rules | {"DIRECT": direct, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "GROUP_PAD": 4}
    fixed |= {"MOST": MAX_SPLITS, "CHUNK": shares_at_once(spec), "EARLY": target.overlaps}
    measure(f"decode of {programs}", decode_kernel, fixed, tiles.warps, tiles.stages)
    tiles = decode_tiles(spec, target, programs, True)
    fixed |= turn | {"AHEAD": tiles.ahead, "BLOCK_N": tiles.block_n}
    measure(f"token of {programs}", token_kernel, fixed, tiles.warps, 1 if tiles.ahead else tiles.stages)
for queries in (4, 16, 4096):
    tiles = prefill_tiles(spec, target, queries)
    fixed = sizes | rules | {"CAUSAL": True, "DIRECT": True, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
                             "BLOCK_Q": tiles.block_m // 4}
    measure(f"prefill of {queries}", prefill_kernel, fixed, tiles.warps, tiles.stages)
measure("merge", merge_kernel, sizes | rules | {"SPLITS_PAD": 64}, 4, 3)
heads = {"HEADS": 32, "KV_HEADS": 8, "KV_PAD": 8, "HALF": size // 2, "HALF_PAD": size // 2, "REST_PAD": 0,
         "PAIR_STEP": 1, "PAIR_GAP": size // 2, "NORM": True, "OFFSET": 0.0, "EARLY": False, "LATE": True}
measure("write", write_kernel, sizes | heads, 4, 3)
measure("rotate of few", rotate_kernel, sizes | heads | {"BLOCK_H": 4}, 1, 3)
measure("rotate of many", rotate_kernel, sizes | heads | {"BLOCK_H": 16}, 4, 3)
"""


def compiled(arch, size):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", SCRIPT, str(arch), str(SHARED[arch]), str(size)]
    said = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert said.returncode == 0, said.stderr[-3000:]
    return [json.loads(line) for line in said.stdout.splitlines()]


@pytest.mark.parametrize(("arch", "size"), [(80, 128), (90, 128), (100, 128), (90, 64)])
def test_resources(arch, size):
    kernels = compiled(arch, size)
    assert len(kernels) == 13
    for kernel in kernels:
        assert kernel["stack"] == 0, kernel
        assert kernel["shared"] <= SHARED[arch], kernel
        assert kernel["waits"] is (arch >= 90), kernel
        if kernel["name"].startswith(("decode", "prefill")):
            assert kernel["copies"] > 0, kernel
        if kernel["name"] in ("prefill of 16", "prefill of 4096") and arch == 90:
            assert kernel["wgmma"] > 0, kernel
    if arch == 90:
        named = {kernel["name"]: kernel for kernel in kernels}
        for name, warps, programs in (("decode of 500", 4, 4), ("token of 500", 2, 4), ("token of 5000", 1, 8),
                                      ("token of 8", 4, 2)):  # fmt: skip
            found = named[name]  # so many programs on a multiprocessor
            assert programs * 32 * warps * found["registers"] <= 65536, found
            assert programs * (found["shared"] + 1024) <= SHARED[90] + 1024, found
