"""Random tokens, after a prefix that all prompts share."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import numpy as np

from shardline.benchmark.datasets._reading import (
    num_special_tokens,
    ordinary_tokens,
    require_tokenizer,
    texts_of_length,
)
from shardline.benchmark.server_tokenizer import PromptTokenizer
from shardline.benchmark.workload import Sample


def add_flags(parser: Any) -> None:
    group = parser.add_argument_group("random dataset")
    group.add_argument("--random-input-len", type=int, default=1024, help="tokens of a prompt (default: 1024)")
    group.add_argument("--random-output-len", type=int, default=128, help="tokens of an output (default: 128)")
    group.add_argument(
        "--random-range-ratio",
        default="0.0",
        help="lengths are drawn from length * (1 - ratio) to length * (1 + ratio); a number in [0, 1), or JSON such as "
        '{"input": 0.3, "output": 0.5} (default: 0.0)',
    )
    group.add_argument(
        "--random-prefix-len", type=int, default=0, help="further tokens that begin every prompt (default: 0)"
    )
    group.add_argument(
        "--random-batch-size", type=int, default=1, help="prompts in one request, for embeddings only (default: 1)"
    )


def load_samples(args: argparse.Namespace, tokenizer: PromptTokenizer | None) -> list[Sample]:
    tokenizer = require_tokenizer(args, tokenizer)
    input_ratio, output_ratio = _read_ratios(args.random_range_ratio)
    input_len = max(0, args.random_input_len - num_special_tokens(tokenizer))
    low, high = math.floor(input_len * (1 - input_ratio)), math.ceil(input_len * (1 + input_ratio))
    if args.random_prefix_len < 0 or args.random_prefix_len + low < 1:
        raise ValueError(
            f"--random-input-len {args.random_input_len} leaves prompts without a token (the tokenizer adds "
            f"{num_special_tokens(tokenizer)}); raise it or --random-prefix-len"
        )
    if args.random_output_len < 1:
        raise ValueError(f"--random-output-len must be at least 1, got {args.random_output_len}")
    rng = np.random.default_rng(args.seed)
    count = args.num_prompts
    input_lens = rng.integers(low, high + 1, count)
    least, most = (
        math.floor(args.random_output_len * (1 - output_ratio)),
        math.ceil(args.random_output_len * (1 + output_ratio)),
    )
    output_lens = rng.integers(max(least, 1), max(most, 1) + 1, count)
    allowed = ordinary_tokens(tokenizer)
    prefix: list[int] = []
    if args.random_prefix_len:
        drawn = [int(token) for token in rng.choice(allowed, args.random_prefix_len)]
        [(_, prefix)] = texts_of_length(tokenizer, [drawn], rng)
    sequences = [prefix + [int(token) for token in rng.choice(allowed, length)] for length in input_lens]
    texts = texts_of_length(tokenizer, sequences, rng)
    samples = [Sample(text, len(ids), int(length)) for (text, ids), length in zip(texts, output_lens, strict=True)]
    return _batches(samples, args.random_batch_size) if args.random_batch_size > 1 else samples


def _batches(samples: list[Sample], size: int) -> list[Sample]:
    """Samples with `size` prompts each."""
    found = []
    for start in range(0, len(samples), size):
        part = samples[start : start + size]
        prompts = [str(sample.prompt) for sample in part]
        found.append(Sample(prompts, sum(sample.prompt_len for sample in part), part[0].output_len))
    return found


def _read_ratios(word: str) -> tuple[float, float]:
    """The ranges of inputs and outputs."""
    message = f"--random-range-ratio must be a number in [0, 1), or JSON with the keys input and output, got {word!r}"
    try:
        value = json.loads(word)
        ratios = (value["input"], value["output"]) if isinstance(value, dict) else (value, value)
        found = float(ratios[0]), float(ratios[1])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(message) from error
    if not all(0 <= ratio < 1 for ratio in found):
        raise ValueError(message)
    return found
