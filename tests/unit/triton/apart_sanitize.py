"""What the sanitizer's script runs, and what it proves of machine code. Run by test_sanitize.py in a process of its
own, where kernels can be compiled."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from drivetrain.ops.reference import Place
from drivetrain_api.v1 import torch_runtime, torch_storage
from drivetrain_triton import launch
from drivetrain_triton.attention_stream import layout_of, prompt_kernel
from drivetrain_triton.target import Target
from tests.unit.triton.compiled_linear import compile_call, head_calls, wide_calls

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "ci/perf"))

import sanitize_controls  # noqa: E402
import sanitize_loads  # noqa: E402
from sanitize_order import Code, disassembled, ordered  # noqa: E402
from sanitize_report import Access, Kernels, judged, proof_of  # noqa: E402

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
TARGET = Target(kind="cuda", arch=90, multiprocessors=132, shared_bytes=227 << 10, overlaps=True)


def prompt_cubin():
    box = f"tensordesc<bf16[16,128],{layout_of(torch.bfloat16)!r}>"
    fixed = {"HEADS": 4, "GROUP": 2, "BLOCK_Q": 64, "KEY_RATIO": 32, "VALUE_RATIO": 32, "STAGES": 2, "OVERLAPS": True}
    kinds = {"out": "*bf16", "q": "*bf16", "query_start": "*i32", "lengths": "*i32", "tables": "*i32", "scale": "fp32"}
    kinds |= {"keys": box, "values": box}
    kinds |= dict.fromkeys(("rows", "base", "tiles", "table_stride", "q_stride"), "i32")
    names = prompt_kernel.arg_names
    signature = {name: kinds.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in ("out", "q", "q_stride")}
    constants = {(names.index(name),): value for name, value in fixed.items()}
    source = GluonASTSource(prompt_kernel, signature, constants, attributes)
    options = {"num_warps": 4, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


def control_cubin(name):
    attributes = {(number,): [["tt.divisibility", 16]] for number in range(2)}
    source = GluonASTSource(getattr(sanitize_controls, name), {"out": "*i32", "begins": "*i32"}, {}, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["cubin"]


def linear_cubin(name):
    calls = [call for _, _, call in (*wide_calls(90), *head_calls(90)) if call.kernel.__name__ == name]
    return compile_call(calls[0], 90).asm["cubin"]


def cubin_of(name):
    if name == "prompt_kernel":
        return prompt_cubin()
    return control_cubin(name) if name in ("orderly", "racing") else linear_cubin(name)


def accesses(code, *names):
    """Where plain accesses are, and after how many passes of barrier 1 (the first few)."""
    counts, _ = code.counts("0x1")
    return {one.at: sorted(counts[number])[:3] for number, one in enumerate(code.instructions) if one.name in names}


def handed_over(code):
    """(stores before the other warps begin, what these load first)"""
    stores = [at for at, counts in accesses(code, "STS").items() if counts == [0]]
    return stores, [at for at, counts in accesses(code, "LDS").items() if counts == [1, 4, 7]]


@pytest.mark.parametrize("name", ["prompt_kernel", "wide_products", "wide_best", "orderly", "racing"])
def test_what_warps_are_handed_lies_behind_a_barrier(name, tmp_path):
    cubin = cubin_of(name)
    (tmp_path / f"{name}.1.cubin").write_bytes(cubin)
    code, kernels = Code.of(disassembled(cubin, NVDISASM)), Kernels(tmp_path, NVDISASM)
    stores, loads = handed_over(code)
    assert len(stores) >= 2 and len(loads) >= 2, "the number of each warp's part, and a captured value"
    last = [at for at, counts in accesses(code, "STS").items() if counts == [3]]
    assert last, "what tells warps to end"
    lines = ["========= COMPUTE-SANITIZER"]
    for store in (*stores, *last):
        lines.append(f"========= Error: Race reported between Write access at {name}+{store:#x} in file.py:216")
        lines += [f"=========     and Read access at {name}+{load:#x} in file.py:216 [2 hazards]" for load in loads]
    count = len(stores) + len(last)
    lines.append(f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)")
    found = judged("\n".join(lines), kernels)
    assert found["errors"] == count and found["left"] == 0 and len(found["cleared"]) == count
    assert "barrier 1 of the whole block" in found["cleared"][0]["never_meet"][0]
    swapped = Access("Read", name, stores[0]), Access("Write", name, loads[0])
    assert proof_of(*swapped, kernels) == "", "no such accesses there"


def test_a_race_is_not_cleared(tmp_path):
    cubin = cubin_of("racing")
    (tmp_path / "racing.1.cubin").write_bytes(cubin)
    code = Code.of(disassembled(cubin, NVDISASM))
    (store,) = (at for at, counts in accesses(code, "STS").items() if counts == [2])
    (load,) = (at for at, counts in accesses(code, "LDS").items() if counts[0] == 2)
    assert ordered(code, store, load) == ""
    text = (
        f"========= Error: Race reported between Write access at racing+{store:#x} in file.py:30\n"
        f"=========     and Read access at racing+{load:#x} in file.py:33 [64 hazards]\n"
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    )
    assert judged(text, Kernels(tmp_path, NVDISASM))["left"] == 1
    known = judged(text, Kernels(tmp_path, NVDISASM), "racing")
    assert (known["left"], known["expected"]) == (0, 1)


def test_loads_run_every_kernel(monkeypatch):
    """With kernels that only say that they were launched. The engine needs a device, and adds nothing."""
    counts = Counter()
    product = torch.mm
    monkeypatch.setattr(launch.Kernel, "_launch", lambda self, grid, *args, **more: counts.update([self.__name__]))
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype=None: product(a, b).to(out_dtype or a.dtype))
    monkeypatch.setattr(sanitize_controls, "run_control", lambda name, device: counts.update([name]))
    runtime = torch_runtime("cpu")
    storage = torch_storage(runtime, (16, 32, 64, 128), "int32")
    site = sanitize_loads.Site(Place(runtime=runtime, storage=storage), TARGET)
    ran = set()
    for load in sanitize_loads.LOADS:
        if load.name == "engine":
            continue
        counts.clear()
        with launch.Zeros():
            load.run(site)
        assert set(load.kernels) <= set(counts), load.name
        ran |= set(counts)
    assert len(sanitize_loads.every_kernel()) >= 31
    assert sanitize_loads.every_kernel() <= ran


def test_what_is_not_written_is_noticed():
    with sanitize_loads.Poisoned():
        assert torch.empty(3).isnan().all() and torch.zeros(3).new_empty(2).isnan().all()
        assert int(torch.empty_like(torch.zeros(2, dtype=torch.int32)).min()) == 2**31 - 1
        assert torch.empty(2, dtype=torch.float8_e4m3fn).float().isnan().all()
    sanitize_loads.written(torch.ones(3), torch.full((2,), 2**31 - 1))
    with pytest.raises(RuntimeError, match="not written whole"):
        sanitize_loads.written(torch.ones(3), torch.tensor([1.0, float("nan")]))
