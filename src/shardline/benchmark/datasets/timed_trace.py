"""Recorded traffic, one JSON object per line: when a request came, its lengths, and hashes of its prompt's blocks.

Blocks with equal hashes get equal tokens, so that the trace's shared prefixes are shared again.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from shardline.benchmark.datasets._reading import (
    ordinary_tokens,
    read_json_lines,
    require_count,
    require_path,
    require_tokenizer,
)
from shardline.benchmark.server_tokenizer import PromptTokenizer
from shardline.benchmark.workload import Sample


def add_flags(parser: Any) -> None:
    group = parser.add_argument_group("timed_trace dataset")
    group.add_argument(
        "--timed-trace-chunk-hash-size", type=int, default=16, help="tokens for which a hash stands (default: 16)"
    )
    group.add_argument(
        "--timed-trace-sec-multiplier",
        type=float,
        default=1,
        help="seconds in the unit of the timestamps; 0.001: they are milliseconds (default: 1)",
    )
    for field in ("timestamp", "input-length", "output-length", "hash-ids"):
        name = field.replace("-", "_")
        group.add_argument(f"--timed-trace-label-{field}", default=name, help=f"name of the field (default: {name})")


def load_samples(args: argparse.Namespace, tokenizer: PromptTokenizer | None) -> list[Sample]:
    tokenizer = require_tokenizer(args, tokenizer)
    path = require_path(args)
    size = args.timed_trace_chunk_hash_size
    if size < 1:
        raise ValueError(f"--timed-trace-chunk-hash-size must be at least 1, got {size}")
    allowed = [int(token) for token in ordinary_tokens(tokenizer)]
    samples: list[Sample] = []
    for number, row in read_json_lines(path):
        if len(samples) == args.num_prompts:
            break
        place = f"{path}, line {number}"
        input_len, output_len = (
            require_count(row.get(label), label, place)
            for label in (args.timed_trace_label_input_length, args.timed_trace_label_output_length)
        )
        time = row.get(args.timed_trace_label_timestamp)
        if isinstance(time, bool) or not isinstance(time, (int, float)) or time < 0:
            raise ValueError(f"{place}: {args.timed_trace_label_timestamp!r} must be a number, got {time!r}")
        hashes = row.get(args.timed_trace_label_hash_ids, [])
        if not isinstance(hashes, list):
            raise ValueError(f"{place}: {args.timed_trace_label_hash_ids!r} must be a list")
        ids: list[int] = []
        for block in [*hashes, *(f"{number}.{index}" for index in range(-(-input_len // size) - len(hashes)))]:
            length = min(size, input_len - len(ids))
            if length <= 0:
                break
            ids += random.Random(f"{args.seed}:{block}:{length}").choices(allowed, k=length)
        samples.append(Sample(ids, len(ids), output_len, timestamp=time * args.timed_trace_sec_multiplier))
    if not samples:
        raise ValueError(f"{path} has no requests")
    first = min(sample.timestamp or 0.0 for sample in samples)
    return sorted(
        (Sample(s.prompt, s.prompt_len, s.output_len, (s.timestamp or 0.0) - first) for s in samples),
        key=lambda sample: sample.timestamp or 0.0,
    )
