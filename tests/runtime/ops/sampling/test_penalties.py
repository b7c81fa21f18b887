from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.sampling.penalties import Penalties, penalize_, penalize_reference
from tests.runtime.ops.helpers import KERNELS, randn


def no_penalties(num_rows: int) -> Penalties:
    """Penalties that change nothing; a base for `_replace`."""
    return Penalties(
        offsets=torch.zeros(num_rows + 1, dtype=torch.int32),
        ids=torch.empty(0, dtype=torch.int32),
        output_counts=torch.empty(0, dtype=torch.int32),
        in_prompt=torch.empty(0, dtype=torch.bool),
        bias=torch.empty(0),
        repetition=torch.ones(num_rows),
        presence=torch.zeros(num_rows),
        frequency=torch.zeros(num_rows),
    )


def random_penalties(rng: torch.Generator, num_rows: int, vocab_size: int) -> Penalties:
    per_row = [torch.randperm(vocab_size, generator=rng)[: 3 * row] for row in range(num_rows)]
    lengths = torch.tensor([0, *map(len, per_row)])
    num_entries = int(lengths.sum())
    bias = randn(num_entries, rng=rng)
    bias[::5] = -torch.inf
    return Penalties(
        offsets=lengths.cumsum(0).int(),
        ids=torch.cat(per_row).int(),
        output_counts=torch.randint(0, 3, (num_entries,), generator=rng, dtype=torch.int32),
        in_prompt=torch.rand(num_entries, generator=rng) < 0.5,
        bias=bias,
        repetition=1 + torch.rand(num_rows, generator=rng),
        presence=randn(num_rows, rng=rng),
        frequency=randn(num_rows, rng=rng),
    )


def test_matches_reference(rng):
    logits, penalties = randn(6, 50, rng=rng), random_penalties(rng, 6, 50)
    expected = penalize_reference(logits, penalties)
    assert penalize_(KERNELS, logits, penalties) is logits
    torch.testing.assert_close(logits, expected)
    assert torch.isinf(logits).any()


def test_nothing_to_change(rng):
    logits = randn(3, 50, rng=rng)
    assert torch.equal(penalize_(KERNELS, logits.clone(), no_penalties(3)), logits)


def test_one_of_each():
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0, 1.0]])
    penalties = no_penalties(1)._replace(
        offsets=torch.tensor([0, 5], dtype=torch.int32),
        ids=torch.arange(5, dtype=torch.int32),
        output_counts=torch.tensor([0, 0, 2, 0, 0], dtype=torch.int32),
        in_prompt=torch.tensor([True, True, False, False, False]),
        bias=torch.tensor([0.0, 0.0, 0.0, 0.5, -torch.inf]),
        repetition=torch.tensor([2.0]),
        presence=torch.tensor([0.25]),
        frequency=torch.tensor([0.5]),
    )
    assert penalize_(KERNELS, logits, penalties).tolist() == [[1.0, -4.0, 0.5 - 2 * 0.5 - 0.25, 1.5, -torch.inf]]


def test_ids_outside_the_vocabulary_are_refused(rng):
    penalties = random_penalties(rng, 3, 50)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        penalize_(KERNELS, randn(3, 20, rng=rng), penalties)
