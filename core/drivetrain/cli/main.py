"""``engine``: finds the sub-command, runs it, and turns every expected error into two lines of advice."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from drivetrain import __version__
from drivetrain.cli.ending import Ending
from drivetrain.errors import DrivetrainError

COMMANDS = {
    "serve": "serve a model over HTTP, OpenAI-compatible",
    "generate": "complete prompts and print the result",
    "chat": "talk to a model in the terminal",
    "devices": "list backends, their devices, and why one can't be used",
    "explain": "say which implementation serves every op of a model, and what it costs",
    "plan": "print the memory plan of a model before loading it",
    "tune": "build ahead the kernels that serving a model would compile at its start",
    "bench": "measure latency or throughput",
    "env": "print versions and the environment that matter in a report",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest flag when it meets an unknown one."""

    def error(self, message: str) -> None:  # type: ignore[override]
        if message.startswith("unrecognized arguments:"):
            import difflib

            unknown = message.split(":", 1)[1].split()[0]
            near = difflib.get_close_matches(unknown.split("=")[0], list(self._option_string_actions), 1)
            message += f"; did you mean {near[0]}?" if near else f"; {self.prog} --help lists the flags"
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")


def parser() -> Parser:
    """Build the top-level parser. Imports no sub-command."""
    top = Parser(prog="engine", description="Serve and run language models on any device with a backend wheel.")
    top.add_argument("--version", action="version", version=f"engine {__version__}")
    names = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, text in COMMANDS.items():
        names.add_parser(name, help=text, add_help=False)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0 done, 1 failed, 2 bad input, 128 + n ended by signal n (130: Ctrl-C).

    A signal counts even where something on the way out made another error of it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    ending = Ending()
    try:
        with ending.caught():
            status = run(words)
    except SystemExit:
        if not ending.status:
            raise
    except KeyboardInterrupt:
        print(f"{' '.join(('engine', *words[:1]))}: interrupted", file=sys.stderr)
        status = 130
    return ending.status or status


def run(words: Sequence[str]) -> int:
    """Find the command, run it, say in two lines what an expected error says."""
    name = words[0] if words else ""
    if name not in COMMANDS:
        top = parser()
        if not words:
            top.print_help()
            return 2
        top.parse_args(words)
        return 0
    command = importlib.import_module(f"drivetrain.cli.{name.replace('-', '_')}")
    sub = Parser(prog=f"engine {name}", description=COMMANDS[name][0].upper() + COMMANDS[name][1:] + ".")
    command.add_arguments(sub)
    arguments = sub.parse_args(words[1:])
    try:
        return int(command.run(arguments) or 0)
    except DrivetrainError as error:
        print(f"engine {name}: error: {error.message}", file=sys.stderr)
        if error.fix:
            print(f"  to fix: {error.fix}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    sys.exit(main())
