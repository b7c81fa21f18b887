"""`shardline serve [MODEL]`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardline import env
from shardline.cli.flags import add_engine_flags, add_flags, engine_config, fields_from_flags
from shardline.config.server import ServerConfig

if TYPE_CHECKING:
    from shardline.config.engine import EngineConfig


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve", help="serve a model over the OpenAI API", description="Serve a model over the OpenAI API."
    )
    add_engine_flags(parser)
    add_flags(parser, ServerConfig, "server")
    parser.add_argument(
        "--parallel",
        choices=("auto",),
        help="auto: choose the parallel sizes for this host, and say why",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code. A headless node serves its head instead."""
    engine = engine_config(args)
    server = ServerConfig(**fields_from_flags(args, ServerConfig))
    if (address := env.serve_host()) and not hasattr(args, "host"):
        server = replace(server, host=address)
    if server.tokens_only:
        engine = replace(engine, model=replace(engine.model, skip_tokenizer_init=True))
    if args.parallel is not None:
        engine = _with_layout(args, engine)
    if engine.cluster.is_headless:
        from shardline.cluster.node import run_node

        return run_node(engine)
    from shardline.process_title import set_process_title
    from shardline.server.launch import run_server

    set_process_title("front")
    return run_server(engine, server)


def _with_layout(args: argparse.Namespace, engine: EngineConfig) -> EngineConfig:
    """The configuration with the parallel sizes that the planner chooses; the path to them goes to stderr.

    Raises:
        ValueError: no layout works on this host.
    """
    from shardline.planner.auto import chosen_config, path_here, plan_here
    from shardline.planner.layout import HOST_CHOICES

    try:
        plan = plan_here(engine, given={name: getattr(args, name) for name in HOST_CHOICES if hasattr(args, name)})
    except ValueError as error:
        raise ValueError(f"--parallel auto: {error}") from error
    for line in path_here(plan):
        print(f"--parallel auto: {line}", file=sys.stderr)
    return chosen_config(plan)
