"""Attention of sequences that keep the same keys in the same blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardline import _cpu
from shardline.runtime.ops.attention.paged import paged_attention
from tests.runtime.ops.attention.test_paged import BLOCK_SIZE, Sequence, attend, random_sequence
from tests.runtime.ops.helpers import KERNELS, assert_same_bits, write_kv

# Tokens in common with the others, keys, queries.
REQUESTS = [
    (0, 700, 1),
    (1030, 1040, 1),
    (1030, 1100, 3),
    (1030, 1024, 1),  # its row sees the second split to the last key
    (1030, 1025, 2),
    (1030, 1024, 2),  # the first row sees all of it but that
    (600, 1030, 1),
    (600, 1030, 1),
    (0, 20, 1),
    (1030, 1031, 1),
    (1030, 513, 1),
]


def assert_the_bits_they_have_alone(sequences: list[Sequence], *, int8: bool, window: int | None) -> None:
    """All in one call, the common prompt's blocks stored once, against each in a call and a cache of its own."""
    _, kv_heads, dim = sequences[0].key.shape
    num_blocks = 1 + sum(-(-sequence.length // BLOCK_SIZE) for sequence in sequences)
    stored = torch.int8 if int8 else sequences[0].key.dtype
    shape = (num_blocks, kv_heads, BLOCK_SIZE, dim)
    caches = [torch.zeros(shape, dtype=stored) for _ in range(2)]
    scales: dict[str, Any] = {}
    if int8:
        scales = {name: torch.ones(shape[:3]) for name in ("key_scales", "value_scales")}
    tables = torch.zeros(len(sequences), num_blocks, dtype=torch.int32)
    first_free, common_blocks = 1, torch.zeros(0, dtype=torch.int32)
    for s, (sequence, (common, _, _)) in enumerate(zip(sequences, REQUESTS, strict=True)):
        positions = torch.arange(sequence.length)
        count = -(-sequence.length // BLOCK_SIZE)
        shared = common_blocks[: min(common, sequence.length) // BLOCK_SIZE]
        tables[s, : len(shared)] = shared
        tables[s, len(shared) : count] = torch.arange(first_free, first_free + count - len(shared))
        first_free += count - len(shared)
        if common == 1030 and len(common_blocks) == 0:
            common_blocks = tables[s, : common // BLOCK_SIZE].clone()
        slots = tables[s, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        write_kv(KERNELS, sequence.key, sequence.value, caches[0], caches[1], slots, **scales)
    lengths = [num_queries for _, _, num_queries in REQUESTS]
    together = paged_attention(
        KERNELS,
        torch.cat([sequence.query[-length:] for sequence, length in zip(sequences, lengths, strict=True)]),
        caches[0],
        caches[1],
        tables,
        torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        torch.tensor([sequence.length for sequence in sequences], dtype=torch.int32),
        dim**-0.5,
        window=window,
        **scales,
    )
    for sequence, length, actual in zip(sequences, lengths, together.split(lengths), strict=True):
        begin = sequence.length - length
        (alone,) = attend([(sequence, begin, sequence.length)], stored=stored if int8 else None, window=window)
        assert_same_bits(actual, alone)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    _cpu.set_num_threads(request.param)
    yield
    _cpu.set_num_threads(1)


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.usefixtures("isa", "threads")
def test_a_common_prompt_does_not_matter(dtype, rng, int8, window):
    prompt = random_sequence(rng, 1030, dtype, heads=6, kv_heads=2, dim=40)
    sequences = []
    for common, length, _ in REQUESTS:
        own = random_sequence(rng, length, dtype, heads=6, kv_heads=2, dim=40)
        for part in ("key", "value"):
            getattr(own, part)[:common] = getattr(prompt, part)[: min(common, length)]
        sequences.append(own)
    assert_the_bits_they_have_alone(sequences, int8=int8, window=window)
