"""`shardline bench BENCHMARK`: the speed of an engine on this machine, or of a server."""

from __future__ import annotations

from typing import Any

from shardline.cli.commands.bench import engine, serve, startup, sweep


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench", help="measure speed", description="Measure the speed of an engine on this machine, or of a server."
    )
    kinds = parser.add_subparsers(title="benchmarks", dest="benchmark", metavar="BENCHMARK", required=True)
    for module in (serve, engine, startup, sweep):
        module.add_parsers(kinds)
