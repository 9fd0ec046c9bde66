"""Flags and files that can't be used: one error that names the culprit, exit status 2, before anything is opened."""

from __future__ import annotations

import argparse

import pytest

from drivetrain.cli.flags import ENGINE_FLAGS, add_flags, add_model, configs
from drivetrain.cli.main import main
from tests.checkpoints import tiny_checkpoint

HUGE = "9" * 20


def refused(capsys, words) -> str:
    """Run a command that must end with status 2; returns what it said."""
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr().err
    assert status == 2 and said.count("error:") == 1, said
    return said


def resolved(*words):
    parser = argparse.ArgumentParser()
    add_model(parser)
    add_flags(parser, ENGINE_FLAGS)
    return configs(parser.parse_args(words))[0]


@pytest.mark.parametrize(
    "flag,values",
    [
        ("num-threads", ("100000", "-5", "0", HUGE)),
        ("probe-timeout", ("1e99", "nan", HUGE, "-1", "0")),
        ("memory-utilization", ("nan", "inf", "-1", "1.5")),
        ("seed", (HUGE,)),
        ("cache-bytes", ("inf", "nan", HUGE, "1e300G")),
        ("max-model-len", (HUGE, "-1")),
        ("max-num-seqs", (HUGE, "0")),
        ("max-num-batched-tokens", (HUGE, "0")),
        ("block-size", (HUGE,)),
        ("depth", (HUGE,)),
        ("tensor-parallel-size", (HUGE, "0")),
        ("tokenizer", ("/nowhere/at/all", "/proc")),
        ("chat-template", ("/nowhere/at/all", "/proc")),
    ],
)
def test_a_value_out_of_range_names_its_flag(capsys, flag, values):
    for value in values:
        assert f"--{flag}" in refused(capsys, ["plan", "m", f"--{flag}={value}"])


@pytest.mark.parametrize(
    "words",
    [
        ["devices", "--probe-timeout", "nan"],
        ["generate", "m", "--prompt", "x", "--top-k", HUGE],
        ["generate", "m", "--prompt", "x", "--max-tokens", HUGE],
        ["bench", "latency", "m", "--batch-size", "0"],
        ["bench", "latency", "m", "--batch-size=-1"],
        ["bench", "latency", "m", "--num-iters", "0"],
        ["bench", "throughput", "m", "--num-prompts", "0"],
        ["serve", "m", "--max-queued-requests", HUGE],
        ["serve", "m", "--port", "65536"],
    ],
)
def test_a_command_s_own_flags_have_bounds(capsys, words):
    flag = next(word for word in reversed(words) if word.startswith("--")).split("=")[0]
    assert flag in refused(capsys, words)


@pytest.mark.parametrize(
    "text,why",
    [
        (b"\xff\xfe", "not UTF-8"),
        ("model: {a: b}", "model is a mapping"),
        ("dtype: [auto]", "dtype is a list"),
        ("max-model-len: true", "max-model-len is True"),
        ("probe-timeout: true", "probe-timeout is True"),
        ("max-model-len: 2.5", "max-model-len is 2.5"),
        ("max-model-len: many", "max-model-len is 'many'"),
        ("deterministic: 1", "deterministic is 1"),
        ("deterministic: 'true'", "deterministic is 'true'"),
        ("api-key: 0123", "put it in quotes"),
        ("revision: 2024-01-02", "put it in quotes"),
        ("revision: 2024-13-45", "is not YAML"),
        ("dtype:", "dtype has no value"),
        ("probe-timeout: .nan", "--probe-timeout is nan"),
        ("log-level: loud", "--log-level is 'loud'"),
        ("depth: 1\nseed: 2\ndepth: 3", "the key 'depth' is there twice (line 3)"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "there twice"),
        ("backend-option: num_threads", "give key=value"),
        ("backend-option: {linear: {a: b}}", "backend-option"),
        ("dtyp: auto", "did you mean dtype?"),
        ("prompt: x", "--prompt is a flag of engine generate, engine chat"),
        ("input-len: 5", "--input-len is a flag of engine bench:"),
        ("a: [b", "is not YAML, line 1"),
        ("[" * 5000, "is not YAML"),
        ("- a", "holds no mapping"),
    ],
)
def test_a_file_s_fault_is_named(tmp_path, capsys, text, why):
    path = tmp_path / "engine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert why in refused(capsys, ["plan", "m", "--config", str(path)])


@pytest.mark.parametrize(
    "text",
    [
        "backend-option: linear=plain",
        "backend-option: [linear=plain]",
        "backend_options: {linear: plain}",
    ],
)
def test_a_file_gives_backend_options_as_the_flag_does(tmp_path, text):
    path = tmp_path / "engine.yaml"
    path.write_text(text + "\nmax-model-len: 8k\ncache-bytes: 4G\nprobe-timeout: 5\nnum-threads: 2\nstrict: yes\n")
    config = resolved("m", "--config", str(path), "--backend-option", "num_threads=3")
    assert config.backend_options == {"linear": "plain", "num_threads": "3"}
    assert (config.max_model_len, config.cache_bytes, config.num_threads) == (8192, 4 << 30, 2)
    assert config.probe_timeout == 5.0 and config.strict


def test_options_that_yaml_types_are_texts_again(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("model: m\nbackend-option: {a: true, b: 3}\n")
    assert resolved("--config", str(path)).backend_options == {"a": "true", "b": "3"}
    assert resolved("--config", str(path), "--memory-utilization", "0").memory_utilization == 0.0


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_a_format_that_the_model_lacks_is_refused_before_loading(tmp_path, capsys, command):
    tiny_checkpoint("llama", tmp_path)
    words = [command, str(tmp_path), "--device", "cpu", "--load-format"]
    assert "--load-format gguf" in refused(capsys, [*words, "gguf"])
