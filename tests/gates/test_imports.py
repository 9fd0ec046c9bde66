"""The import rules: each has a planted fault, and the neighbouring innocent case passes."""

from pathlib import Path

import pytest

from ci.gates import imports


def scan(root: Path, name: str, text: str) -> list[str]:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.parent
    tops = [root / top for top in ("core", "plugins/api", "plugins/mirage", "backends/cpu")]
    while folder not in tops:
        (folder / "__init__.py").touch()
        folder = folder.parent
    path.write_text(text)
    return [finding.rule for finding in imports.scan(root)[0]]


API = "plugins/api/drivetrain_api/v1/a.py"
FAMILY = "core/drivetrain/models/families/a.py"
WEIGHTS = "core/drivetrain/models/weights/a.py"
CORE = "core/drivetrain/runner/a.py"
CPU = "backends/cpu/drivetrain_cpu/a.py"
MIRAGE = "plugins/mirage/drivetrain_mirage/a.py"

FAULTS = [
    ("contract", API, "import torch"),
    ("contract", API, "from torch import nn"),
    ("contract", API, "try:\n    import torch\nexcept ImportError:\n    pass"),
    ("contract", API, "class C:\n    import numpy"),
    ("contract", API, "if FLAG:\n    import torch"),
    ("contract", API, "def f():\n    import requests"),
    ("contract", API, "from ...drivetrain import x"),
    ("models", FAMILY, "from drivetrain.runner import runner"),
    ("models", FAMILY, "from drivetrain import sched"),
    ("models", FAMILY, "from ...cache import pool"),
    ("models", FAMILY, "def f():\n    import transformers"),
    ("models", FAMILY, "import safetensors"),
    ("models", FAMILY, "import importlib\nimportlib.import_module('drivetrain.loop')"),
    ("backend", CPU, "import drivetrain"),
    ("backend", CPU, "def f():\n    from drivetrain.ops import Ops"),
    ("backend", CPU, "import drivetrain_mirage.plugin"),
    ("backend", CPU, "import importlib\nimportlib.import_module('drivetrain.ops')"),
    ("backend", MIRAGE, "__import__('drivetrain')"),
    ("subclass", CPU, "from drivetrain_api.v1 import Linear\nclass Mine(Linear): ..."),
    ("subclass", MIRAGE, "import drivetrain_api.v1 as api\nclass Mine(api.Linear): ..."),
    ("patch", CORE, "import torch\ntorch.add = None"),
    ("patch", CPU, "import torch.nn\ntorch.nn.functional.linear = None"),
    ("patch", MIRAGE, "from torch import nn\nsetattr(nn.Linear, 'forward', None)"),
    ("patch", CORE, "from threading import Thread\ndel Thread.run"),
    ("environment", CORE, "import os\nos.environ['A'] = 'b'"),
    ("environment", CORE, "from os import environ\nprint(environ)"),
    ("environment", API, "import os\nos.getenv('A')"),
]


@pytest.mark.parametrize(("rule", "name", "text"), FAULTS)
def test_planted_fault_is_found(tmp_path, rule, name, text):
    assert set(scan(tmp_path, name, text)) == {rule}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (API, "import enum, pluggy\nfrom .b import c\nfrom collections.abc import Sequence"),
        (API, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    import numpy"),
        (API, "def f():\n    import torch\n    return torch"),
        (FAMILY, "import torch\nfrom drivetrain.ops import Ops\nfrom ..spec import ModelSpec"),
        (FAMILY, "from drivetrain.errors import ModelError\nfrom drivetrain_api.v1 import OpSpec"),
        (WEIGHTS, "import numpy, safetensors, gguf"),
        (CPU, "import torch\nimport drivetrain_api.v1\nfrom drivetrain_cpu.b import c\nfrom . import d"),
        (MIRAGE, "import torch\nclass Mine(torch.Tensor): ..."),
        (CORE, "class C:\n    def f(self):\n        self.x = 1\nC.y = 2"),
        ("core/drivetrain/config.py", "import os\nos.environ['A']"),
        (CPU, "import os\nos.environ['A']"),
    ],
)
def test_innocent_code_passes(tmp_path, name, text):
    assert scan(tmp_path, name, text) == []


def test_a_finding_names_file_line_and_import(tmp_path, capsys):
    scan(tmp_path, CPU, "\nfrom drivetrain.ops import Ops\n")
    assert imports.main(["--root", str(tmp_path)]) == 1
    assert f"{CPU}:2: backend: imports drivetrain.ops.Ops" in capsys.readouterr().out


def test_the_workspace_keeps_the_rules(root, capsys):
    assert imports.main(["--root", str(root)]) == 0, capsys.readouterr().out
