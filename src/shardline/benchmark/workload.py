"""What a benchmark sends: one Sample per request, or a named workload, so that all who compare measure the same."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One request of a workload."""

    prompt: str | list[int] | list[str]
    """Text, token ids, or several texts (embeddings)."""
    prompt_len: int
    """Tokens of the prompt, as far as the client knows; the server's own number replaces it."""
    output_len: int
    """Largest number of tokens to generate."""
    timestamp: float | None = None
    """Seconds after the start at which a trace sent it."""


@dataclass(frozen=True)
class Workload:
    """Prompts of random tokens that are submitted together; greedy outputs of a fixed length."""

    num_prompts: int
    input_len: int
    """Tokens of a prompt, shared tokens included."""
    output_len: int
    shared_len: int = 0
    """Number of tokens that all prompts of a batch begin with."""


WORKLOADS = {
    "W1": Workload(1, 128, 64),
    "W2": Workload(32, 128, 64),
    "W3": Workload(1, 2048, 1),
    "W4": Workload(8, 1024, 64),
    "W5": Workload(32, 544, 32, shared_len=512),
    "W6": Workload(16, 2048, 128),
}


def random_prompts(rng: random.Random, vocab_size: int, count: int, length: int, shared: int = 0) -> list[list[int]]:
    """`count` prompts of `length` token ids; the first `shared` ids are the same in all prompts."""
    prefix = [rng.randrange(vocab_size) for _ in range(shared)]
    return [prefix + [rng.randrange(vocab_size) for _ in range(length - shared)] for _ in range(count)]
