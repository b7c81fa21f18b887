"""Workloads by name: the ones that Shardline is compared on, so that everybody measures the same."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Prompts of random tokens that are all there at once, and outputs of a fixed length, greedy."""

    num_prompts: int
    input_len: int
    """Tokens of a prompt, the shared ones included."""
    output_len: int
    shared_len: int = 0
    """Tokens that all prompts of a batch begin with."""


WORKLOADS = {
    "W1": Workload(1, 128, 64),
    "W2": Workload(32, 128, 64),
    "W3": Workload(1, 2048, 1),
    "W4": Workload(8, 1024, 64),
    "W5": Workload(32, 544, 32, shared_len=512),
}


def random_prompts(rng: random.Random, vocab_size: int, count: int, length: int, shared: int = 0) -> list[list[int]]:
    """`count` prompts of `length` token ids, the first `shared` of them the same in all."""
    prefix = [rng.randrange(vocab_size) for _ in range(shared)]
    return [prefix + [rng.randrange(vocab_size) for _ in range(length - shared)] for _ in range(count)]
