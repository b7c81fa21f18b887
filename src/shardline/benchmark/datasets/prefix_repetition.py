"""Few random prefixes, each with many random suffixes: a measure of the prefix cache."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from shardline.benchmark.datasets._reading import ordinary_tokens, require_tokenizer, texts_of_length
from shardline.benchmark.server_tokenizer import PromptTokenizer
from shardline.benchmark.workload import Sample


def add_flags(parser: Any) -> None:
    group = parser.add_argument_group("prefix_repetition dataset")
    for name, default, text in (
        ("prefix-len", 256, "tokens of a prefix"),
        ("suffix-len", 256, "tokens after the prefix"),
        ("num-prefixes", 10, "number of prefixes"),
        ("output-len", 128, "tokens of an output"),
    ):
        group.add_argument(
            f"--prefix-repetition-{name}", type=int, default=default, help=f"{text} (default: {default})"
        )


def load_samples(args: argparse.Namespace, tokenizer: PromptTokenizer | None) -> list[Sample]:
    tokenizer = require_tokenizer(args, tokenizer)
    num_prefixes = args.prefix_repetition_num_prefixes
    if num_prefixes < 1 or args.num_prompts < num_prefixes:
        raise ValueError(
            f"--num-prompts {args.num_prompts} must be at least --prefix-repetition-num-prefixes {num_prefixes}, "
            "which must be at least 1"
        )
    rng = np.random.default_rng(args.seed)
    allowed = ordinary_tokens(tokenizer)

    def draw(count: int, length: int) -> list[list[int]]:
        return [[int(token) for token in row] for row in rng.choice(allowed, (count, length))]

    prefixes = texts_of_length(tokenizer, draw(num_prefixes, args.prefix_repetition_prefix_len), rng)
    repeated = [ids for _, ids in prefixes for _ in range(args.num_prompts // num_prefixes)]
    suffixes = texts_of_length(tokenizer, draw(len(repeated), args.prefix_repetition_suffix_len), rng)
    sequences = [prefix + suffix for prefix, (_, suffix) in zip(repeated, suffixes, strict=True)]
    samples = [
        Sample(tokenizer.decode(ids, skip_special_tokens=False), len(ids), args.prefix_repetition_output_len)
        for ids in sequences
    ]
    if not args.disable_shuffle:
        rng.shuffle(samples)
    return samples
