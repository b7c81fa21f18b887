"""`shardline chat [MODEL]`: talk to a model in the terminal, loaded here or served elsewhere."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from shardline.cli.flags import Parser, add_engine_flags, engine_config

if TYPE_CHECKING:
    from rich.console import Console

    from shardline.cli.chat_backends import ChatBackend

Messages = list[dict[str, str]]

KEY_VARIABLES = "$SHARDLINE_API_KEY, $VLLM_API_KEY or $OPENAI_API_KEY"
_HELP = "/reset forgets the conversation, /exit or ctrl-D ends it, ctrl-C stops an answer"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description=f"Talk to a model in the terminal. It is loaded here, or on a server with --url. {_HELP}.",
        conflict_handler="resolve",  # -q is --quick here
    )
    add_engine_flags(parser)
    parser.defer(_add_chat_flags)
    parser.set_defaults(run=run)


def _add_chat_flags(parser: Parser) -> None:
    group = parser.add_argument_group("chat")
    group.add_argument("--url", help="OpenAI-compatible server, for example http://127.0.0.1:8000 (default: none)")
    group.add_argument("--model-name", help="the model's name on the server (default: the first of /v1/models)")
    group.add_argument("--api-key", help=f"the server's key (default: {KEY_VARIABLES})")
    add_query_flags(group, "MESSAGE")
    group.add_argument("--system-prompt", help="instructions at the beginning of every conversation")
    group.add_argument("--temperature", type=float, default=0.7, help="0: always the likeliest token (default: 0.7)")
    group.add_argument("--top-p", type=float, default=1.0, help="sample from this share of probability (default: 1)")
    group.add_argument(
        "--max-tokens", type=int, help="longest answer, in tokens (default: what the model has room for)"
    )


def add_query_flags(group: Any, what: str) -> None:
    """Flags about one answer. `what`: a word for the user's text."""
    group.add_argument("-q", "--quick", metavar=what, help="answer this, and end")
    group.add_argument("--stats", action="store_true", help="print how long each answer took, also into a pipe")


def run(args: argparse.Namespace) -> int:
    """Talk until the user ends the conversation."""
    from rich.console import Console

    from shardline.cli.chat_backends import LocalBackend, RemoteBackend

    console = Console(highlight=False)
    backend: ChatBackend
    if args.url is not None:
        backend = RemoteBackend(
            args.url,
            api_key=args.api_key,
            model=args.model_name or getattr(args, "model", None),
            temperature=args.temperature,
            top_p=args.top_p,
            max_tokens=args.max_tokens,
        )
    else:
        from shardline.sampling_params import SamplingParams

        params = SamplingParams(temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_tokens)
        config = engine_config(args)
        with console.status(f"Loading {config.model.model} ..."):
            backend = LocalBackend(config, params)
    with closing(backend):
        system: Messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
        if args.quick is not None:
            print_answer(backend.reply([*system, {"role": "user", "content": args.quick}]), console, args.stats)
            return 0
        if sys.stdin.isatty():
            console.print(f"{backend.model}: {_HELP}", style="dim", markup=False)
        talk(backend, console, system, lambda: read_line(console), stats=args.stats)
    return 0


def talk(
    backend: ChatBackend, console: Console, system: Messages, read: Callable[[], str | None], *, stats: bool = False
) -> None:
    """Hold the conversation. `read` returns the user's next line; None: there are no more lines."""
    messages = list(system)
    while (line := read()) is not None:
        command = line.strip()
        if command == "/exit":
            return
        if command == "/reset":
            messages = list(system)
        elif command:
            messages.append({"role": "user", "content": line})
            try:
                answer = print_answer(backend.reply(messages), console, stats)
                # What the model thought is not for its next answer.
                messages.append({"role": "assistant", "content": answer.rpartition("</think>")[2].lstrip("\n")})
            except ValueError as error:  # for example, the conversation has become too long
                messages.pop()
                console.print(str(error), style="red", markup=False)


def print_answer(pieces: Iterator[str], console: Console, stats: bool = False) -> str:
    """Print the pieces of an answer as they come; ctrl-C stops the answer. `stats`: always say how long it took."""
    start = time.monotonic()
    text = ""
    try:
        for piece in pieces:
            text += piece
            console.print(piece, end="", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [stopped]", end="", style="dim", markup=False)
    finally:
        if hasattr(pieces, "close"):
            pieces.close()
        console.print()
    if console.is_terminal or stats:
        console.print(f"{time.monotonic() - start:.1f} s", style="dim")
    return text


def read_line(console: Console) -> str | None:
    """The user's next line; None: there are no more."""
    try:
        return console.input("[bold green]> [/]") if sys.stdin.isatty() else input()
    except EOFError:
        return None
