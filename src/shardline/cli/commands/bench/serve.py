"""`shardline bench serve`: the speed of a server, as its clients see it."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline.benchmark.results import Wanted

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_FRACTIONS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Flags that become JSON, which has neither NaN nor infinity."""


def add_parsers(kinds: Any) -> None:
    parser = kinds.add_parser(
        "serve",
        help="load a server",
        description="Load an OpenAI-compatible server, and measure its answers.",
        add_flags=_add_flags,
    )
    parser.set_defaults(run=run_serve)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    from shardline.cli.commands.bench.serve_flags import add_serve_flags

    add_serve_flags(parser)


def run_serve(args: argparse.Namespace) -> int:
    """Load the server and report."""
    if args.compare:
        return _compare(*args.compare)
    from shardline.benchmark.noise import confidence_lines, merge_runs
    from shardline.benchmark.session import run_session
    from shardline.benchmark.table import table_lines

    prepare(args)
    wanted = _wanted(args)
    runs = []
    identity: dict[str, Any] = {}
    for model, run in run_session(args, wanted):
        identity = model
        runs.append(run)
        print("\n".join(table_lines(run, wanted)), flush=True)
    result = merge_runs(runs) if len(runs) > 1 else runs[0]
    if len(runs) > 1:
        print("\n".join(confidence_lines(result)))
    _publish(args, {**_describe(args, identity), **result})
    if not any(run["completed"] for run in runs):
        cause = next(iter(result["failures"]), "no request was sent")
        raise RuntimeError(f"every request failed: {cause}: {result['first_error']}".removesuffix(f": {cause}"))
    return 0


def read_goodput(words: Sequence[str] | None) -> dict[str, float]:
    """Objectives in milliseconds by metric, from words such as ttft:200.

    Raises:
        ValueError: a word is none.
    """
    limits = {}
    for word in words or ():
        name, colon, value = word.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in GOODPUT_METRICS or not colon or not limit >= 0:
            raise ValueError(
                f"--goodput takes {', '.join(GOODPUT_METRICS)} with milliseconds, as ttft:200; got {word!r}"
            )
        limits[name] = limit
    return limits


def prepare(args: argparse.Namespace) -> None:
    """Check the flags together, and fill in what depends on other flags."""
    from shardline.benchmark.backends import BACKENDS

    def require(holds: bool, message: str) -> None:
        if not holds:
            raise ValueError(message)

    require(args.request_rate > 0, f"--request-rate must be more than 0 requests/s, got {args.request_rate:g}")
    require(args.burstiness > 0, f"--burstiness must be more than 0, got {args.burstiness:g}")
    for name in _FRACTIONS:
        value = getattr(args, name)
        require(value is None or math.isfinite(value), f"--{name.replace('_', '-')} must be a number, got {value}")
    require(isinstance(args.extra_body, dict | None), "--extra-body takes a JSON object")
    for name in ("max_concurrency", "num_runs"):
        value = getattr(args, name)
        require(value is None or value >= 1, f"--{name.replace('_', '-')} must be at least 1, got {value}")
    least = 0 if args.dataset_name == "custom" else 1
    require(args.num_prompts >= least, f"--num-prompts must be at least {least}, got {args.num_prompts}")
    require(args.seed >= 0, f"--seed must be at least 0, got {args.seed}")
    _check_ramp(args, require)
    for path in (args.output_json, args.html):
        require(path is None or path.absolute().parent.is_dir(), f"{path}: its folder does not exist")
        require(path is None or not path.is_dir(), f"{path} is a folder: name a file in it")
    if args.result_dir and (args.save_result or args.append_result):
        try:
            Path(args.result_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--result-dir {args.result_dir} cannot be made: {error.strerror}") from error
    backend = BACKENDS[args.backend]
    if args.endpoint == "/v1/completions":
        args.endpoint = backend.endpoint
    backend.check_endpoint(args.endpoint)
    if args.dataset_path and args.dataset_name in ("random", "prefix_repetition"):
        raise ValueError(f"--dataset-name {args.dataset_name} reads no file; leave out --dataset-path")
    trace = args.dataset_name == "timed_trace"
    require(trace or args.self_timed is None, "--self-timed needs --dataset-name timed_trace, whose times it uses")
    require(not trace or args.backend in ("openai", "vllm"), "--dataset-name timed_trace needs --backend openai")
    args.self_timed = trace if args.self_timed is None else args.self_timed
    args.ignore_eos = args.ignore_eos or args.dataset_name in ("random", "timed_trace")
    if args.input_len is not None:
        args.random_input_len = args.input_len
    if args.output_len is not None:
        for name in ("random", "sharegpt", "custom", "prefix_repetition"):
            setattr(args, f"{name}_output_len", args.output_len)


def _check_ramp(args: argparse.Namespace, require: Any) -> None:
    if args.ramp_up_strategy is None:
        return
    start, end = args.ramp_up_start_rps, args.ramp_up_end_rps
    require(math.isinf(args.request_rate), "--ramp-up-strategy sets the rate: leave out --request-rate")
    require(start is not None and end is not None, "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    require(0 <= start <= end and end > 0, "--ramp-up-start-rps must be at least 0 and at most --ramp-up-end-rps")
    require(args.ramp_up_strategy == "linear" or start > 0, "an exponential ramp cannot start at 0 requests/s")


def _wanted(args: argparse.Namespace) -> Wanted:
    from shardline.benchmark.backends import BACKENDS
    from shardline.benchmark.results import GENERATION_METRICS, METRIC_TITLES, POOLING_METRICS, Wanted

    pooling = not BACKENDS[args.backend].streams
    names = (args.percentile_metrics or ",".join(POOLING_METRICS if pooling else GENERATION_METRICS)).split(",")
    for name in names:
        if name not in METRIC_TITLES:
            raise ValueError(f"--percentile-metrics: no metric {name!r}; known: {', '.join(METRIC_TITLES)}")
    try:
        percentiles = [float(word) for word in args.metric_percentiles.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= percent <= 100 for percent in percentiles):
        raise ValueError(
            f"--metric-percentiles takes numbers from 0 to 100, as 50,99.9; got {args.metric_percentiles!r}"
        )
    return Wanted(
        pooling=pooling,
        metrics=names,
        percentiles=percentiles,
        goodput=read_goodput(args.goodput),
        max_concurrency=args.max_concurrency,
        request_rate=args.request_rate,
    )


def _describe(args: argparse.Namespace, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured: the first keys of the result."""
    from datetime import datetime

    from shardline.benchmark.session import read_pairs

    description = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        **identity,
        "num_prompts": args.num_prompts,
        **read_pairs(args.metadata, "--metadata"),
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up_strategy is not None:
        for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"):
            description[name] = getattr(args, name)
    return description


def _publish(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    from shardline.benchmark.page import write_page
    from shardline.benchmark.results import without_details

    if args.html is not None:
        args.html.write_text(write_page([(args.label or args.backend, result)]), encoding="utf-8")
    kept = result if args.save_detailed else without_details(result)
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if args.save_result or args.append_result:
        path = Path(args.result_dir or "") / (args.result_filename or _file_name(args, result))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
            if file.tell():
                file.write("\n")
            json.dump(kept, file)


def _file_name(args: argparse.Namespace, result: Mapping[str, Any]) -> str:
    load = f"{args.request_rate}qps"
    if args.ramp_up_strategy is not None:
        load = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps}qps-{args.ramp_up_end_rps}qps"
    limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    model = str(result["model_id"]).split("/")[-1]
    return f"{args.label or args.backend}-{load}{limit}-{model}-{result['date']}.json"


def _compare(before: Path, after: Path) -> int:
    from shardline.benchmark.noise import compare_lines

    results = []
    for path in (before, after):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"--compare {path}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"--compare {path}: not one JSON result ({error})") from error
        if not isinstance(value, dict) or "request_throughput" not in value:
            raise ValueError(f"--compare {path}: not a result of `bench serve`")
        results.append(value)
    print("\n".join(compare_lines(results[0], results[1], (str(before), str(after)))))
    return 0
