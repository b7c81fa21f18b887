"""`shardline complete`: let the model of a server continue texts."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from shardline.cli.commands.chat import KEY_VARIABLES, add_query_flags, print_answer, read_line


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "complete",
        help="let the model of a server continue texts",
        description="Let the model of a server continue texts, one a line. ctrl-D ends it, ctrl-C stops an answer.",
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="OpenAI-compatible server (default: http://127.0.0.1:8000)"
    )
    parser.add_argument("--model-name", help="the model's name on the server (default: the first of /v1/models)")
    parser.add_argument("--api-key", help=f"the server's key (default: {KEY_VARIABLES})")
    parser.add_argument("--max-tokens", type=int, help="longest answer, in tokens (default: the server's, 16)")
    add_query_flags(parser, "PROMPT")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Continue texts until the user ends it."""
    from rich.console import Console

    from shardline.cli.chat_backends import RemoteBackend

    console = Console(highlight=False)
    server = RemoteBackend(args.url, api_key=args.api_key, model=args.model_name, max_tokens=args.max_tokens)
    if args.quick is not None:
        print_answer(server.complete(args.quick), console, args.stats)
        return 0
    if sys.stdin.isatty():
        console.print(f"{server.model}: a line is a prompt", style="dim", markup=False)
    while (line := read_line(console)) is not None:
        try:
            print_answer(server.complete(line), console, args.stats)
        except ValueError as error:  # for example, the prompt is empty
            console.print(str(error), style="red", markup=False)
    return 0
