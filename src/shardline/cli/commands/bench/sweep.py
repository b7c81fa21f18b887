"""`shardline bench sweep serve`: benchmarks of many combinations of flags."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_parsers(kinds: Any) -> None:
    parser = kinds.add_parser("sweep", help="many combinations of flags", description="Run many combinations of flags.")
    sweeps = parser.add_subparsers(title="sweeps", dest="sweep", metavar="SWEEP", required=True)
    serve = sweeps.add_parser(
        "serve",
        help="start servers, and load each",
        description="Start a server for every combination of --serve-params, load it with each of --bench-params.",
    )
    serve.add_argument("--serve-cmd", required=True, help="starts a server: 'shardline serve MODEL ...'")
    serve.add_argument("--bench-cmd", required=True, help="loads it: 'shardline bench serve ...'")
    serve.add_argument("--after-bench-cmd", help="run after every benchmark, for example to empty caches")
    serve.add_argument("--show-stdout", action="store_true", help="show what the commands print")
    serve.add_argument("--server-ready-timeout", type=int, default=300, help="seconds to become ready (default: 300)")
    for name in ("serve", "bench"):
        serve.add_argument(
            f"--{name}-params", metavar="FILE", help=f"JSON: combinations of flags of --{name}-cmd, a list or by name"
        )
    serve.add_argument("--link-vars", default="", help="a=b,c=d: only combinations in which these flags are equal")
    serve.add_argument("-o", "--output-dir", default="results", help="folder of the experiments (default: results)")
    serve.add_argument("-e", "--experiment-name", help="folder of this one (default: the time)")
    serve.add_argument("--num-runs", type=int, default=3, help="runs of every combination (default: 3)")
    serve.add_argument("--warmup-num-prompts", type=int, default=0, help="unmeasured prompts before (default: 0)")
    serve.add_argument("--continue-on-error", action="store_true", help="note a failure, and go on")
    serve.add_argument("--dry-run", action="store_true", help="print the commands only")
    serve.add_argument("--resume", action="store_true", help="run what --experiment-name has not run yet")
    serve.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts that needs no network")
    serve.set_defaults(run=run_sweep_serve)


def run_sweep_serve(args: argparse.Namespace) -> int:
    """Run the sweep."""
    from shardline.benchmark.sweep import run_sweep

    if args.html is not None and not args.html.absolute().parent.is_dir():
        raise ValueError(f"--html {args.html}: its folder does not exist")
    sweep = _read_sweep(args)
    try:
        rows = run_sweep(sweep)
    except (RuntimeError, OSError) as error:
        again = f"--resume -o {args.output_dir} -e {sweep.folder.name}"
        raise RuntimeError(f"{error}; {again} goes on from here") from error
    if not args.dry_run:
        print(f"{len(rows)} runs: {sweep.folder / 'summary.csv'}")
        if args.html is not None:
            args.html.write_text(_page(sweep.folder), encoding="utf-8")
    return 0


def _split(flag: str, text: str) -> list[str]:
    import shlex

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{flag} {text!r:.200}: {error}") from None
    if not words:
        raise ValueError(f"{flag} must be a command, got {text!r}")
    return words


def _read_sweep(args: argparse.Namespace) -> Any:
    from datetime import datetime

    from shardline.benchmark.sweep import Sweep, read_combinations

    if args.num_runs < 1 or args.warmup_num_prompts < 0:
        raise ValueError("--num-runs must be at least 1, and --warmup-num-prompts at least 0")
    folder = Path(args.output_dir) / (args.experiment_name or datetime.now().strftime("%Y%m%d_%H%M%S"))
    if args.resume and not folder.is_dir():
        raise ValueError(f"--resume: there is no {folder}")
    if folder.exists() and not args.resume:
        raise ValueError(f"{folder} exists; add --resume, or choose another --experiment-name")
    links = [tuple(pair.strip() for pair in word.split("=")) for word in args.link_vars.split(",") if word.strip()]
    if any(len(pair) != 2 for pair in links):
        raise ValueError(f"--link-vars takes pairs such as max_num_seqs=max_concurrency, got {args.link_vars!r}")
    return Sweep(
        serve_cmd=_split("--serve-cmd", args.serve_cmd),
        bench_cmd=_split("--bench-cmd", args.bench_cmd),
        serve_combinations=read_combinations(args.serve_params),
        bench_combinations=read_combinations(args.bench_params),
        folder=folder,
        after_bench_cmd=_split("--after-bench-cmd", args.after_bench_cmd) if args.after_bench_cmd else [],
        links=links,
        num_runs=args.num_runs,
        warmup_prompts=args.warmup_num_prompts,
        ready_timeout=args.server_ready_timeout,
        show_output=args.show_stdout,
        dry_run=args.dry_run,
        continue_on_error=args.continue_on_error,
    )


def _page(folder: Path) -> str:
    """Each combination's runs as one result."""
    from shardline.benchmark.noise import merge_runs
    from shardline.benchmark.page import write_page

    results = []
    for path in sorted(folder.glob("*/summary.json")):
        runs = json.loads(path.read_text(encoding="utf-8"))
        runs = [{"client_limited": False, "failures": {}, **run} for run in runs]
        results.append((path.parent.name, merge_runs(runs)))
    return write_page(results)
