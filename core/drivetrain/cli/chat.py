"""``engine chat MODEL``: a conversation in the terminal; the answer is printed as it comes."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from drivetrain.cli.flags import ENGINE_FLAGS, add_flags, add_json, add_model, configs, write_json
from drivetrain.cli.sampling import add_sampling, sampling
from drivetrain.errors import DrivetrainError, TokenizerError

if TYPE_CHECKING:
    from drivetrain.config import EngineConfig
    from drivetrain.llm import LLM
    from drivetrain.params import SamplingParams

PROMPT = "> "
HELP = "An empty line or end of input ends the conversation; /clear forgets it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_model(parser)
    add_flags(parser, ENGINE_FLAGS)
    parser.add_argument("--system", metavar="TEXT", help="a system message in front of the conversation")
    parser.add_argument("--prompt", metavar="TEXT", help="say this, print the answer, and end")
    add_sampling(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends. TokenizerError when the model has no chat template."""
    config, _ = configs(arguments)
    params = sampling(arguments)
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    check_template(config)
    from drivetrain.llm import LLM

    with LLM.from_config(config) as llm:
        llm.require_template()
        if arguments.prompt is not None:
            answer(llm, messages, arguments.prompt, params, quiet=arguments.json == "-")
        else:
            talk(llm, messages, params)
    if arguments.json:
        write_json(arguments.json, {"model": config.model, "messages": messages})
    return 0


def check_template(config: EngineConfig) -> None:
    """Raise TokenizerError for a model without a chat template before its weights load. Other faults wait for it."""
    if config.chat_template is not None or config.tokenizer is not None:
        return
    from drivetrain.models.source import resolve
    from drivetrain.tokens.load import own_templates

    try:
        found = own_templates(resolve(config.model, config.revision))
    except DrivetrainError:
        return
    if "default" not in found:
        raise TokenizerError(
            f"{config.model} has no chat template",
            fix="give one with --chat-template FILE, or --chat-template plain for lines such as `User: ...`",
        )


def talk(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> None:
    """Read lines, print answers. An interrupt ends the answer under way, not the conversation."""
    opening = len(messages)
    print(HELP, file=sys.stderr)
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            return
        if not line:
            return
        if line == "/clear":
            del messages[opening:]
            continue
        try:
            answer(llm, messages, line, params)
        except KeyboardInterrupt:
            print()


def answer(llm: LLM, messages: list[dict[str, str]], line: str, params: SamplingParams, *, quiet: bool = False) -> None:
    """Add a turn and its answer to the conversation; what an interrupt cut short is kept."""
    messages.append({"role": "user", "content": line})
    pieces: list[str] = []
    try:
        for delta in llm.stream_chat(messages, params):
            pieces.append(delta.text)
            if not quiet:
                print(delta.text, end="", flush=True)
        if not quiet:
            print()
    finally:
        messages.append({"role": "assistant", "content": "".join(pieces)})
