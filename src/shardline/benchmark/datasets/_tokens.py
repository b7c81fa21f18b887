"""Random prompts of an exact length in tokens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from shardline.benchmark.server_tokenizer import PromptTokenizer, ServerTokenizer

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
