"""`shardline serve [MODEL]`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
from typing import Any

from shardline.cli.flags import add_engine_flags, add_flags, engine_config, fields_from_flags
from shardline.config.server import ServerConfig


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "serve", help="serve a model over the OpenAI API", description="Serve a model over the OpenAI API."
    )
    add_engine_flags(parser)
    add_flags(parser, ServerConfig, "server")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code. A headless node serves its head instead.

    Raises:
        ValueError: the configuration is at fault.
    """
    engine, server = engine_config(args), ServerConfig(**fields_from_flags(args, ServerConfig))
    if engine.cluster.is_headless:
        from shardline.cluster.node import run_node

        return run_node(engine)
    from shardline.process_title import set_process_title
    from shardline.server.launch import run_server

    set_process_title("front")
    return run_server(engine, server)
