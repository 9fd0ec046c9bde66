"""``engine tune``: what serving would compile is built, counted and told."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest

from drivetrain import launch
from drivetrain.cli.main import main
from drivetrain.runner.runner import Runner
from drivetrain_api.v1 import CompileReport
from tests.checkpoints import tiny_checkpoint

FLAGS = ("--max-model-len", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--cache-bytes", "1M")


class Compiler:
    """Counts the dummy steps that run in its context."""

    def __init__(self, answer: CompileReport | None, error: str = "") -> None:
        self.answer, self.error, self.steps, self.inside = answer, error, 0, False

    @contextmanager
    def compiling(self):
        self.inside = True
        yield self.answer
        self.inside = False
        if self.error:
            raise RuntimeError(self.error)
        if self.answer is not None:
            self.answer.built = self.steps


@pytest.fixture
def folder(tmp_path):
    tiny_checkpoint("llama", tmp_path)
    for weights in tmp_path.glob("*.safetensors"):
        weights.write_bytes(b"not read")
    return str(tmp_path)


def compiles_with(monkeypatch, compiler: Compiler) -> None:
    real, forward = launch.open_backend, Runner.forward

    def noted(self, *given):
        compiler.steps += compiler.inside
        return forward(self, *given)

    monkeypatch.setattr(launch, "open_backend", lambda *given: replace(real(*given), compiler=compiler))
    monkeypatch.setattr(Runner, "forward", noted)


def tune(capsys, *words: str) -> str:
    assert main(["tune", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "mirage"])
def test_a_backend_without_a_compiler_has_nothing_to_build(folder, capsys, device):
    assert "nothing to build" in tune(capsys, folder, "--device", device)
    told = json.loads(tune(capsys, folder, "--device", device, "--json"))
    assert (told["compiles"], told["built"], told["found"], told["device"]) == (False, 0, 0, device)


def test_kernels_are_built_without_the_weights_and_counted(folder, capsys, monkeypatch):
    compiler = Compiler(CompileReport(found=3, place="/somewhere"))
    compiles_with(monkeypatch, compiler)
    text = tune(capsys, folder, "--device", "cpu", *FLAGS)
    assert compiler.steps > 5
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.startswith(f"kernels built {compiler.steps} in ") for line in lines)
    assert "already there 3" in lines and "kept in /somewhere" in lines
    compiler.steps = 0
    told = json.loads(tune(capsys, folder, "--device", "cpu", *FLAGS, "--json"))
    assert told["built"] == compiler.steps and told["found"] == 3 and told["seconds"] > 0 and told["compiles"]
    assert (told["place"], told["model"]) == ("/somewhere", folder)


def test_a_compiler_that_tells_nothing(folder, capsys, monkeypatch):
    compiles_with(monkeypatch, Compiler(None))
    assert "does not tell" in tune(capsys, folder, "--device", "cpu", *FLAGS)


def test_a_kernel_that_can_not_be_built_is_an_error(folder, capsys, monkeypatch):
    compiles_with(monkeypatch, Compiler(None, "kernel x: no"))
    assert main(["tune", folder, "--device", "cpu", *FLAGS]) == 2
    assert "kernel x: no" in capsys.readouterr().err


def test_the_flags_are_those_of_serve(folder, capsys):
    assert main(["tune", folder, "--device", "cpu", "--load-format", "gguf"]) == 2
    assert "--load-format gguf" in capsys.readouterr().err
