"""The flags of `shardline bench serve`: those of `vllm bench serve`, with the same defaults, and some more."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardline.benchmark.backends import BACKENDS
from shardline.benchmark.datasets import dataset_names, find_dataset
from shardline.cli.flags import add_refused_flags, json_value

REFUSED: dict[str, tuple[str, ...]] = {
    "Shardline's benchmark sends text only": (
        "enable-multimodal-chat", "custom-ensure-client-side-data", "random-mm-base-items-per-request",
        "random-mm-num-mm-items-range-ratio", "random-mm-limit-mm-per-prompt", "random-mm-bucket-config",
        "asr-max-audio-len-sec", "asr-min-audio-len-sec",
    ),
    "it downloads no datasets; save them as JSON lines and use --dataset-name custom": (
        "no-stream", "hf-subset", "hf-split", "hf-name", "hf-output-len", "blazedit-min-distance",
        "blazedit-max-distance", "bfcl-categories", "spec-bench-output-len", "spec-bench-category",
        "speed-bench-dataset-subset", "speed-bench-output-len", "speed-bench-category",
    ),
    """--extra-body '{"use_beam_search": true}' asks for it""": ("use-beam-search",),
    "there is no dataset random-rerank": ("no-reranker",),
    "Shardline has no profiler endpoints": ("profile",),
    "use --html FILE, which has these charts": (
        "plot-timeline", "timeline-itl-thresholds", "plot-dataset-stats",
    ),
    "send the probes with a second `shardline bench serve`": ("probe-request-rate",),
}  # fmt: skip
"""Flags of vLLM that are known and refused, by the reason."""


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    _add_server_flags(parser)
    _add_workload_flags(parser)
    _add_traffic_flags(parser)
    _add_sampling_flags(parser)
    _add_report_flags(parser)
    add_refused_flags(parser, REFUSED)


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=sorted(BACKENDS), default="openai", help="the API (default: openai)")
    group.add_argument("--base-url", help="the server, for example https://example.org/proxy (default: host and port)")
    group.add_argument("--host", default="127.0.0.1", help="the server's address (default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="the server's port (default: 8000)")
    group.add_argument(
        "--endpoint", default="/v1/completions", help="path of the API (default: /v1/completions, or the back end's)"
    )
    group.add_argument("--header", nargs="*", metavar="KEY=VALUE", help="headers of every request")
    group.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    group.add_argument("--model", help="the model's name (default: the first of /v1/models)")
    group.add_argument("--served-model-name", help="the name to send, if it is not --model")
    group.add_argument(
        "--lora-modules", dest="own_models", nargs="+", metavar="NAME", help="LoRAs, one of which each request names"
    )
    group.add_argument(
        "--lora-assignment",
        dest="assignment",
        choices=("random", "round-robin"),
        default="random",
        help="which one (default: random)",
    )
    group.add_argument(
        "--tokenizer", help="folder, package or hub id of the tokenizer (default: the model's, else the server's)"
    )
    group.add_argument("--tokenizer-mode", choices=("auto", "hf"), default="auto", help="accepted for compatibility")
    group.add_argument("--trust-remote-code", action="store_true", help="accepted for compatibility: no code is run")
    group.add_argument(
        "--skip-tokenizer-init", action="store_true", default=False, help="use no tokenizer (custom dataset only)"
    )
    group.add_argument(
        "--ready-check-timeout-sec", type=int, default=0, help="wait so long for a first answer (default: 0, do not)"
    )
    group.add_argument("--request-id-prefix", default="", help="begins every request id (default: ids are UUIDs)")


def _add_workload_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--dataset-name", choices=dataset_names(), default="random", help="default: random")
    group.add_argument("--dataset-path", help="the dataset's file")
    group.add_argument("--num-prompts", type=int, default=1000, help="number of requests (default: 1000)")
    group.add_argument("--seed", type=int, default=0, help="of the workload and the arrivals (default: 0)")
    group.add_argument("--input-len", type=int, help="--random-input-len under another name")
    group.add_argument("--output-len", type=int, help="output length of every dataset that has such a flag")
    group.add_argument("--no-oversample", action="store_true", help="do not repeat prompts of a small dataset")
    group.add_argument("--disable-shuffle", action="store_true", help="keep the dataset's order")
    group.add_argument("--skip-chat-template", action="store_true", help="send custom prompts as they are")
    group.add_argument(
        "--chat-template-kwargs", type=json_value, help="JSON: variables of the template for custom prompts"
    )
    for name in dataset_names():
        find_dataset(name).add_flags(parser)


def _add_traffic_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument("--request-rate", type=float, default=float("inf"), help="requests/s (default: all at once)")
    group.add_argument(
        "--burstiness", type=float, default=1.0, help="1: Poisson; less: burstier; more: more even (default: 1)"
    )
    group.add_argument("--max-concurrency", type=int, help="the most requests that run at a time")
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="a rate that grows")
    group.add_argument("--ramp-up-start-rps", type=int, help="requests/s at the start of the ramp")
    group.add_argument("--ramp-up-end-rps", type=int, help="requests/s at its end")
    group.add_argument(
        "--self-timed",
        action=argparse.BooleanOptionalAction,
        help="send at the times of a timed_trace (default for this dataset)",
    )
    group.add_argument("--num-warmups", type=int, default=0, help="unmeasured requests before (default: 0)")
    group.add_argument("--num-runs", type=int, default=1, help="repeat, with confidence intervals (default: 1)")


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name in ("top-p", "min-p", "temperature", "frequency-penalty", "presence-penalty", "repetition-penalty"):
        group.add_argument(f"--{name}", type=float, help="sent with every request")
    group.add_argument("--top-k", type=int, help="sent with every request")
    group.add_argument("--ignore-eos", action="store_true", help="outputs have their whole length; random: always")
    group.add_argument("--logprobs", type=int, help="ask for so many log probabilities")
    group.add_argument("--extra-body", type=json_value, help="JSON: further fields of every request")


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument("--label", help="name of the result (default: the back end)")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--percentile-metrics", help="comma-separated metrics (default: ttft,tpot,itl, or e2el)")
    group.add_argument("--metric-percentiles", default="99", help="comma-separated percentiles (default: 99)")
    group.add_argument(
        "--goodput", nargs="+", metavar="METRIC:MS", help="objectives for ttft, tpot, e2el from the intended send time"
    )
    group.add_argument("--metadata", nargs="*", metavar="KEY=VALUE", help="added to the result")
    group.add_argument("--save-result", action="store_true", help="write the result as JSON")
    group.add_argument("--save-detailed", action="store_true", help="with what happened to every request")
    group.add_argument("--append-result", action="store_true", help="append it to the file")
    group.add_argument("--result-dir", help="folder of the result (default: here)")
    group.add_argument("--result-filename", help="default: from label, rate, model and time")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the whole result to this file")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts that needs no network")
    group.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="compare two results; sends nothing"
    )
