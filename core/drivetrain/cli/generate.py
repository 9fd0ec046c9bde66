"""``engine generate MODEL --prompt TEXT``: complete prompts and print the answers."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.cli.flags import ENGINE_FLAGS, add_flags, add_json, add_model, configs, count, write_json
from drivetrain.cli.sampling import add_sampling, sampling
from drivetrain.errors import ConfigError

if TYPE_CHECKING:
    from drivetrain.llm import LLM
    from drivetrain.params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_model(parser)
    add_flags(parser, ENGINE_FLAGS)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; repeatable")
    parser.add_argument("--file", metavar="FILE", help="read prompts from FILE, one a line; - is standard input")
    parser.add_argument("-n", "--n", type=count, default=1, metavar="N", help="answers to each prompt (default 1)")
    parser.add_argument("--logprobs", type=int, metavar="N", help="report log-probabilities, with N alternatives")
    add_sampling(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Complete every prompt. One prompt with one answer is printed as it comes. Status 1 when a sequence failed."""
    config, _ = configs(arguments)
    prompts = read_prompts(arguments.prompt, arguments.file)
    params = sampling(arguments)
    from drivetrain.llm import LLM

    with LLM.from_config(config) as llm:
        if len(prompts) == 1 and params.n == 1 and not arguments.json and params.logprobs is None:
            return stream(llm, prompts[0], params)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
        answers: list[dict[str, Any]] = [
            {"prompt": prompt, **asdict(output)} for prompt, output in zip(prompts, outputs, strict=True)
        ]
        data = {"model": config.model, "device": llm.device, "seconds": seconds, "answers": answers}
    if arguments.json:
        write_json(arguments.json, data)
    if arguments.json != "-":
        show(answers)
    failed = [c["error"] for answer in answers for c in answer["completions"] if c["finish_reason"] == "error"]
    for message in failed:
        print(f"engine generate: error: {message}", file=sys.stderr)
    return 1 if failed else 0


def stream(llm: LLM, prompt: str, params: SamplingParams) -> int:
    """Print one answer while it is made."""
    for delta in llm.stream(prompt, params):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def show(answers: list[dict[str, Any]]) -> None:
    """Print answers under their prompts."""
    for place, answer in enumerate(answers):
        print(f"--- prompt {place}: {answer['prompt']}")
        for completion in answer["completions"]:
            print(f"[{completion['index']}, {completion['finish_reason']}] {completion['text']}")


def read_prompts(given: list[str], file: str | None) -> list[str]:
    """Return the prompts of flags and file, in this order. ConfigError when there is none."""
    prompts = list(given)
    if file is not None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--file {file}: {error}", fix="give a UTF-8 text file with one prompt a line") from error
        prompts += [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigError("no prompt given", fix="add --prompt TEXT or --file FILE")
    return prompts
