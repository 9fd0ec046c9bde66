"""The hardware-word gate: each way of naming hardware is found, and words that only look alike are not."""

from pathlib import Path

import pytest

from ci.gates import hardware_words


def scan(root: Path, text: str, name: str = "core/drivetrain/a.py") -> list[hardware_words.Finding]:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return hardware_words.scan(root)[0]


FAULTS = {
    "comment": "x = 1  # faster on CUDA",
    "docstring": '"""Runs on ROCm devices."""',
    "string": 'x = "nvidia"',
    "help text": 'parser.add_argument("--device", help="for example xpu")',
    "snake identifier": "cuda_graph = 1",
    "camel identifier": "class CudaGraph: ...",
    "upper identifier": "XPU_COUNT = 1",
    "name with digits": "x = 'cuda12'",
    "import": "import triton",
    "torch part": "import torch\ntorch.accelerator.synchronize()",
    "torch part by from": "from torch import backends",
    "torch part by alias": "import torch as t\nt.Generator()",
    "torch part by getattr": "import torch\ngetattr(torch, 'accelerator')",
    "torch operators": "import torch\ntorch.ops.aten.add",
    "device method": "x.cuda()",
    "pinning": "x.pin_memory()",
    "stream bookkeeping": "x.record_stream(s)",
    "visibility": "x = 'ACME_VISIBLE_DEVICES'",
    "architecture": "x = 'sm_90'",
    "architecture with a letter": "x = 'sm90a'",
    "other architecture": "x = 'gfx942'",
    "collectives": "group('nccl')",
    "host collectives": "group('gloo')",
    "kernel library": "torch._C.mkldnn",
    "product": "# measured on an H200",
    "warp": "num_warps = 4",
    "invented device": "x = 'mirage'",
    "device call": "torch.device('acme')",
    "device with an index": "torch.device('acme:1')",
    "device keyword": "torch.zeros(3, device='acme')",
    "moving": "x.to('acme')",
    "device comparison": "if x.device.type == 'acme': ...",
    "device type comparison": "if 'acme' != info.device_type: ...",
    "checkpoint format": "x = 'float8_e4m3fnuz'",
}


@pytest.mark.parametrize("text", FAULTS.values(), ids=FAULTS.keys())
def test_planted_fault_is_found(tmp_path, text):
    assert scan(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "# an intelligent, swarming amdahl-like trick; the ship's hippo",
        "torch.device('cpu'); torch.zeros(3, device='meta'); x.to('cpu:0')",
        "if x.device.type != 'cpu': ...",
        "if request.response_format.type == 'json_schema': ...",
        "import torch\ntorch.nn.functional.linear",
        "barracuda = 'warped intelligence'",
        "dtype = 'float8_e4m3fn'",
        "sms = 'sm_all'; stream.record(); pinned = True",
    ],
)
def test_innocent_text_passes(tmp_path, text):
    assert scan(tmp_path, text) == []


def test_other_text_files_are_read_and_named(tmp_path, capsys):
    scan(tmp_path, "ok = 1")
    assert scan(tmp_path, "# Runs on Intel\n", "plugins/api/README.md")
    assert hardware_words.main(["--root", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "plugins/api/README.md:1: intel" in printed and "hardware words: 1 " in printed


def test_a_file_name_counts(tmp_path):
    (finding,) = scan(tmp_path, "x = 1\n", "core/drivetrain/cuda_rows.py")
    assert finding.line == 0 and finding.word == "cuda"


def test_backends_may_name_their_hardware(tmp_path):
    assert scan(tmp_path, "x = 'cuda'", "backends/x/a.py") == []


def test_checkpoint_formats_have_one_home(tmp_path):
    assert scan(tmp_path, "x = 'float8_e4m3fnuz'", "core/drivetrain/models/weights/fp8.py") == []


def test_reading_nothing_is_a_failure(tmp_path):
    assert hardware_words.main(["--root", str(tmp_path)]) == 1


def test_the_workspace_holds_no_hardware_word(root, capsys):
    assert hardware_words.main(["--root", str(root)]) == 0, capsys.readouterr().out
