"""`shardline bench startup`: how long a model takes to become ready, with and without its files in memory."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardline.cli.flags import add_engine_flags, engine_config

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_parsers(kinds: Any) -> None:
    parser = kinds.add_parser(
        "startup",
        help="time until a model is ready",
        description="Start a model again and again: first cold (its files are dropped from the page cache), then warm.",
    )
    group = parser.add_argument_group("benchmark")
    for name, default, text in (
        ("cold", 3, "cold starts"),
        ("warmup", 1, "unmeasured starts before the warm ones"),
        ("warm", 3, "warm starts"),
    ):
        group.add_argument(f"--num-iters-{name}", type=int, default=default, help=f"{text} (default: {default})")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="also write the result to this file")
    add_engine_flags(parser)
    parser.set_defaults(run=run_startup)


def run_startup(args: argparse.Namespace) -> int:
    """Measure starts and report."""
    from shardline.log import configure_logging

    for name in ("cold", "warmup", "warm"):
        if getattr(args, f"num_iters_{name}") < 0:
            raise ValueError(f"--num-iters-{name} must be at least 0")
    if args.output_json is not None and not args.output_json.absolute().parent.is_dir():
        raise ValueError(f"--output-json {args.output_json}: its folder does not exist")
    configure_logging()
    config = engine_config(args)
    folder = _model_folder(config.model.model, config.model.revision)

    def start() -> float:
        from shardline.api.llm import LLM

        began = time.perf_counter()
        llm = LLM.from_config(config)
        ready = time.perf_counter() - began
        llm.close()
        return ready

    cold = _measure(args.num_iters_cold, start, lambda: drop_from_page_cache(folder))
    _measure(args.num_iters_warmup, start)
    warm = _measure(args.num_iters_warm, start)
    result: dict[str, Any] = {}
    print("=" * 60 + "\nSTARTUP TIME BENCHMARK RESULTS\n" + "=" * 60)
    for phase, times in (("cold", cold), ("warm", warm)):
        if times:
            result |= _report(phase, times)
    print("=" * 60)
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
    return 0


def drop_from_page_cache(folder: Path) -> None:
    """Ask the kernel to forget the files of a folder, so that the next start reads them from storage."""
    import os

    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _model_folder(model: str, revision: str | None) -> Path:
    from shardline.checkpoints.hub import resolve_model

    return resolve_model(model, revision).folder


def _measure(count: int, start: Callable[[], float], prepare: Callable[[], None] = lambda: None) -> list[float]:
    """For each start, the seconds until the model is ready."""
    times = []
    for _ in range(count):
        prepare()
        times.append(start())
    return times


def _report(phase: str, times: Sequence[float]) -> dict[str, Any]:
    """Print one phase; returns its part of the result, with vLLM's keys."""
    from shardline.cli.commands.bench.engine import percentile

    print(f"\n{phase.upper()} STARTUP:")
    result: dict[str, Any] = {}
    # Nothing is compiled at start; the rows are there for tools that read vLLM's.
    columns = {"startup": list(times), "compilation": [0.0] * len(times)}
    for name, values in columns.items():
        average = sum(values) / len(values)
        print(f"Avg {name} time: {average:.2f} seconds")
        result[f"avg_{phase}_{name}_time"] = average
        result[f"{phase}_{name}_times"] = values
        result[f"{phase}_{name}_percentiles"] = {percent: percentile(values, percent) for percent in _PERCENTILES}
    for name in columns:
        print(f"{name.capitalize()} time percentiles:")
        for percent, value in result[f"{phase}_{name}_percentiles"].items():
            print(f"  {percent}%: {value:.2f} seconds")
    return result
