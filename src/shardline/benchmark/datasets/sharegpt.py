"""Conversations in ShareGPT's format: the first message is the prompt, the second one gives the output's length."""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

from shardline.benchmark.datasets._reading import fill_up, require_path, require_tokenizer
from shardline.benchmark.server_tokenizer import PromptTokenizer
from shardline.benchmark.workload import Sample

_LEAST_TOKENS = 4
_MOST_PROMPT_TOKENS = 1024
_MOST_TOKENS = 2048
"""Bounds of what is sent, as in vLLM: results of other tools compare only if they leave out the same conversations."""


def add_flags(parser: Any) -> None:
    group = parser.add_argument_group("sharegpt dataset")
    group.add_argument(
        "--sharegpt-output-len", type=int, help="tokens of an output (default: those of the dataset's answer)"
    )


def load_samples(args: argparse.Namespace, tokenizer: PromptTokenizer | None) -> list[Sample]:
    tokenizer = require_tokenizer(args, tokenizer)
    path = require_path(args)
    pairs = read_pairs(path)
    if not args.disable_shuffle:
        random.Random(args.seed).shuffle(pairs)
    samples: list[Sample] = []
    for prompt, answer in pairs:
        if len(samples) == args.num_prompts:
            break
        prompt_len, answer_len = (len(ids) for ids in tokenizer.encode_texts([prompt, answer]))
        output_len = args.sharegpt_output_len or answer_len
        too_short = prompt_len < _LEAST_TOKENS or (not args.sharegpt_output_len and output_len < _LEAST_TOKENS)
        if too_short or prompt_len > _MOST_PROMPT_TOKENS or prompt_len + output_len > _MOST_TOKENS:
            continue
        samples.append(Sample(prompt, prompt_len, output_len))
    if not samples:
        raise ValueError(
            f"{path} has no conversation with a prompt of {_LEAST_TOKENS} to {_MOST_PROMPT_TOKENS} tokens and an answer"
        )
    return fill_up(samples, args.num_prompts, args.seed, oversample=not args.no_oversample)


def read_pairs(path: str) -> list[tuple[str, str]]:
    """The first two messages of every conversation that has them."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, list):
        raise ValueError(f"{path} must hold a list of conversations")
    pairs = []
    for index, entry in enumerate(data):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        if not all(isinstance(value, str) for value in values):
            raise ValueError(f"{path}, conversation {index}: a message needs a text 'value'")
        pairs.append((str(values[0]), str(values[1])))
    return pairs
