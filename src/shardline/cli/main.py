"""`shardline COMMAND`: every file in `commands/` is a command.

The commands import little at the top, so that `--help` and error messages appear at once.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import os
import pkgutil
import select
import sys
from collections.abc import Sequence
from typing import Any

import shardline.cli.commands
from shardline import env
from shardline.cli.flags import USAGE_ERROR, Parser

_OF_VLLM = {
    "collect-env": "`shardline doctor` shows what this machine has",
    "launch": "it needs the word render, and stands for serve --render-only",
}
"""Commands that only vLLM has, and what does their work here."""

FAILURE = 1
INTERRUPTED = 130
UNREAD = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0, 1 (it failed), 2 (the user's mistake), 130 (ctrl-C) or 141 (nobody
    reads the output any more, as after `| head`).

    A command's `run` raises ValueError for a user's mistake, and RuntimeError or OSError for a failure. A failure
    has the code 2, too, if the command says so because 1 says something else. The user sees the message; with
    SHARDLINE_LOG_LEVEL=DEBUG, also the traceback.
    """
    if not faulthandler.is_enabled():
        with contextlib.suppress(RuntimeError, OSError):  # there may be no stderr
            faulthandler.enable()  # if a fault ends the process, it prints what its threads were doing
    parser = build_parser()
    words = _with_command(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _OF_VLLM:
        parser.error(f"there is no command {words[0]}: {_OF_VLLM[words[0]]}")
    args = parser.parse_args(words)
    try:
        code = int(args.run(args) or 0)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, RuntimeError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _drop_unread_output():
            return UNREAD
        if env.log_level() == "DEBUG":
            raise
        print(f"shardline: error: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ValueError) else getattr(args, "failure", FAILURE)


def _with_command(words: Sequence[str]) -> list[str]:
    """The words, after `serve` if they begin with a flag or a hub id: so containers take the arguments of vLLM's.

    `launch render` of vLLM is `serve --render-only`.
    """
    if list(words[:2]) == ["launch", "render"]:
        return ["serve", "--render-only", *words[2:]]
    first = words[0] if words else ""
    is_flag = first.startswith("--") and first not in ("--help", "--version")
    return ["serve", *words] if is_flag or "/" in first else list(words)


def _drop_unread_output() -> bool:
    """Whether nobody reads the output any more. If so, what is left of it is dropped."""
    output = select.poll()
    output.register(sys.stdout, 0)
    unread = any(event & select.POLLERR for _, event in output.poll(0))
    if unread:
        # Python would complain once more when it flushes the output at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return unread


def build_parser() -> Parser:
    parser = Parser(prog="shardline", description="Distributed LLM inference: one answer, any shape of hardware.")
    parser.add_argument("--version", action=_Version, help="print versions and the devices found")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for module in sorted(module.name for module in pkgutil.iter_modules(shardline.cli.commands.__path__)):
        importlib.import_module(f"shardline.cli.commands.{module}").add_parser(commands)
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from shardline.cli.version import version_lines

        print("\n".join(version_lines()))
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
