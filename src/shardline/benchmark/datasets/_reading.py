"""What datasets have in common: lines of files, and random prompts of an exact length in tokens."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardline.benchmark.server_tokenizer import PromptTokenizer, ServerTokenizer
from shardline.benchmark.workload import Sample


def read_json_lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number and the object of each line that is not empty.

    Raises:
        ValueError: there is no such file, or a line is no JSON object; the message names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--dataset-path {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--dataset-path {path}: not UTF-8 ({error})") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object")
        yield number, value


def require_count(value: Any, name: str, place: str) -> int:
    """`value` as a number of tokens.

    Raises:
        ValueError: it is none; the message names the field and the place.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
        raise ValueError(f"{place}: {name!r} must be a whole number of at least 1, got {value!r}")
    return int(value)


def fill_up(samples: list[Sample], count: int, seed: int, *, oversample: bool) -> list[Sample]:
    """At most `count` samples; with `oversample`, exactly so many, some of them repeated."""
    samples = samples[:count]
    if oversample and samples and len(samples) < count:
        samples += random.Random(seed).choices(samples, k=count - len(samples))
    return samples


_ROUNDS = 10
"""Neighbouring random tokens may merge when their text is encoded again; then the prompt is cut or made longer."""


def require_tokenizer(args: argparse.Namespace, tokenizer: PromptTokenizer | None) -> PromptTokenizer:
    """The tokenizer.

    Raises:
        ValueError: there is none.
    """
    if tokenizer is None:
        raise ValueError(
            f"--dataset-name {args.dataset_name} needs a tokenizer: leave out --skip-tokenizer-init, and give "
            "--tokenizer FOLDER if the model's name is no folder and no hub id, and the server has no /tokenize"
        )
    return tokenizer


def require_path(args: argparse.Namespace) -> str:
    """The dataset's file.

    Raises:
        ValueError: none is named.
    """
    if not args.dataset_path:
        raise ValueError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    return str(args.dataset_path)


def ordinary_tokens(tokenizer: PromptTokenizer) -> np.ndarray:
    """The ids that are no special tokens, [num_ordinary]."""
    if isinstance(tokenizer, ServerTokenizer):
        return np.array(tokenizer.ordinary_ids)
    every = np.arange(tokenizer.vocab_size)
    return every[~np.isin(every, list(tokenizer.special_token_ids))]


def num_special_tokens(tokenizer: PromptTokenizer) -> int:
    """How many special tokens a server adds to a prompt."""
    return len(tokenizer.encode_text("a")) - len(tokenizer.encode_text("a", add_special_tokens=False))


def texts_of_length(
    tokenizer: PromptTokenizer, sequences: Sequence[list[int]], rng: np.random.Generator
) -> list[tuple[str, list[int]]]:
    """For each sequence of ids, a text that encodes to as many ids, as far as possible, and these ids."""
    allowed = ordinary_tokens(tokenizer)
    wanted = [len(sequence) for sequence in sequences]
    found = list(sequences)
    texts = [""] * len(found)
    open_places = list(range(len(found)))
    for left in reversed(range(_ROUNDS)):
        for place in open_places:
            texts[place] = tokenizer.decode(found[place], skip_special_tokens=False)
        encoded = tokenizer.encode_texts([texts[place] for place in open_places], add_special_tokens=False)
        still = []
        for place, ids in zip(open_places, encoded, strict=True):
            found[place] = ids
            missing = wanted[place] - len(ids)
            if missing == 0 or left == 0:
                continue
            still.append(place)
            extra = [] if missing < 0 else [int(token) for token in rng.choice(allowed, missing)]
            found[place] = ids[: wanted[place]] + extra
        open_places = still
        if not open_places:
            break
    return list(zip(texts, found, strict=True))
