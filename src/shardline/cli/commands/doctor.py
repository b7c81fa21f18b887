"""`shardline doctor`: what is wrong with this node, or with a cluster, and what to do about it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from shardline.cli.flags import Parser, add_engine_flags, add_flags, engine_config, fields_from_flags
from shardline.config.server import ServerConfig

if TYPE_CHECKING:
    from rich.console import Console

    from shardline.doctor.facts import Report
    from shardline.doctor.kernels import CardProof

_DESCRIPTION = """Look for what will fail or be slow, and say what to do about it. It takes the flags of `shardline
serve`. With --nnodes or --data-parallel-address, start it on all nodes; nodes tell the head what they are, links are
measured, and all nodes print the same report. It takes 10 seconds at most once all nodes are there; a missing node is
waited for 60 seconds (--join-timeout). Exit codes are those of monitoring plugins: 0: ok, 1: a warning, 2: broken.
With --kernels and no value, it tries the GPU's own kernels that the model needs, and prints which are proved."""

_WAIT_SECONDS = 60.0
EXIT_CODES = {"ok": 0, "warning": 1, "broken": 2}
_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "broken": "[red]broken[/]"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="what is wrong with these nodes, and the fix", description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print the report as JSON, with all facts")
    add_engine_flags(parser)
    add_flags(parser, ServerConfig, "server")
    parser.defer(_take_kernels_alone)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, print the report, and return the exit code."""
    from shardline.doctor.examine import examine

    if "proves_kernels" in args:
        return _run_kernels(args)
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


class _KernelsFlag(argparse._StoreAction):
    """Stores a value; without one, it asks for the table."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        if values is None:
            namespace.proves_kernels = True
        else:
            super().__call__(parser, namespace, values, option_string)


def _take_kernels_alone(parser: Parser) -> None:
    """Let --kernels have no value, which asks for the table of kernels."""
    action = parser._option_string_actions["--kernels"]
    action.nargs = "?"
    action.__class__ = _KernelsFlag


def _run_kernels(args: argparse.Namespace) -> int:
    from rich.console import Console

    from shardline.doctor.kernels import prove_kernels

    found = prove_kernels(engine_config(args))
    if args.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        show_kernels(found, Console(highlight=False))
    return EXIT_CODES["warning" if any(one.problem for card in found for one in card.verdicts) else "ok"]


def show_kernels(found: list[CardProof], console: Console) -> None:
    """Print a table for each kind of GPU."""
    from rich.markup import escape
    from rich.table import Table

    if not found:
        console.print("no kernel of Triton runs here: ranks compute on the CPU, or with --kernels torch")
    for card in found:
        table = Table(box=None, padding=(0, 2, 0, 0), title=escape(card.card), title_justify="left")
        for column in ("kernel", "shape", "dtype", "", "why", "seconds"):
            table.add_column(column, justify="right" if column == "seconds" else "left")
        for one in card.verdicts:
            mark = "[yellow]torch instead[/]" if one.problem else "[green]proved[/]"
            words = (one.case.kernel, one.case.shape, one.case.dtype)
            table.add_row(*map(escape, words), mark, escape(one.problem), f"{one.seconds:.2f}")
        console.print(table)


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
