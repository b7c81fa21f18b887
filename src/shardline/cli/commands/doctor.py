"""`shardline doctor`: what is wrong with this node, or with a cluster, and what to do about it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from shardline.cli.flags import add_engine_flags, add_flags, engine_config, fields_from_flags
from shardline.config.server import ServerConfig

if TYPE_CHECKING:
    from rich.console import Console

    from shardline.doctor.facts import Report

_DESCRIPTION = """Look for what will fail or be slow, and say what to do about it. It takes the flags of `shardline
serve`. With --nnodes or --data-parallel-address, start it on all nodes; nodes tell the head what they are, links are
measured, and all nodes print the same report. It takes 10 seconds at most once all nodes are there; a missing node is
waited for 60 seconds (--join-timeout). Exit codes are those of monitoring plugins: 0: ok, 1: a warning, 2: broken."""

_WAIT_SECONDS = 60.0
EXIT_CODES = {"ok": 0, "warning": 1, "broken": 2}
_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "broken": "[red]broken[/]"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="what is wrong with these nodes, and the fix", description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print the report as JSON, with all facts")
    add_engine_flags(parser)
    add_flags(parser, ServerConfig, "server")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, print the report, and return the exit code."""
    from shardline.doctor.examine import examine

    engine, server = engine_config(args), ServerConfig(**fields_from_flags(args, ServerConfig))
    report = examine(engine, server, getattr(args, "join_timeout", _WAIT_SECONDS))
    if args.json:
        import msgspec

        builtins = {"verdict": report.verdict, **msgspec.to_builtins(report)}
        del builtins["type"]
        print(msgspec.json.format(msgspec.json.encode(builtins), indent=2).decode())
    else:
        from rich.console import Console

        show(report, Console(highlight=False))
    return EXIT_CODES[report.verdict]


def show(report: Report, console: Console) -> None:
    """Print a table for each node and each pair of nodes."""
    from rich.markup import escape
    from rich.table import Table

    for where in dict.fromkeys(finding.where for finding in report.findings):
        console.print(f"[bold]{escape(where)}[/]", soft_wrap=True)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column()
        for finding in report.findings:
            if finding.where == where:
                text = escape(finding.text) + (f"\n[bold]fix:[/] {escape(finding.fix)}" if finding.fix else "")
                table.add_row(_MARKS[finding.verdict], escape(finding.item), text)
        console.print(table)
        console.print()
    counts = {
        verdict: sum(finding.verdict == verdict for finding in report.findings) for verdict in ("warning", "broken")
    }
    console.print(f"{report.verdict}: {counts['broken']} broken, {counts['warning']} warnings")
