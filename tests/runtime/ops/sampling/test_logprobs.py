from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.sampling.logprobs import logprobs, logprobs_reference
from tests.runtime.ops.helpers import KERNELS, assert_same_bits, randn


@pytest.mark.parametrize("vocab_size", [1, 7, 1024, 5003])
@pytest.mark.parametrize("top_n", [0, 1, 5])
@pytest.mark.usefixtures("isa")
def test_matches_reference(rng, vocab_size, top_n):
    top_n = min(top_n, vocab_size)
    logits = 4 * randn(9, vocab_size, rng=rng)
    logits[:, ::3] = logits[:, ::3].round()  # ties
    chosen = torch.randint(0, vocab_size, (9,), generator=rng)
    actual, expected = logprobs(KERNELS, logits, chosen, top_n), logprobs_reference(logits, chosen, top_n)
    assert torch.equal(actual.top_ids, expected.top_ids)
    assert torch.equal(actual.chosen_ranks, expected.chosen_ranks)
    torch.testing.assert_close(actual.chosen_logprobs, expected.chosen_logprobs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual.top_logprobs, expected.top_logprobs, rtol=1e-5, atol=1e-6)


def test_banned_tokens_and_an_exhausted_vocabulary():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    result = logprobs(KERNELS, logits, torch.tensor([1]), 3)
    assert result.chosen_logprobs.item() == -torch.inf
    assert result.chosen_ranks.item() == 3
    assert result.top_ids.tolist() == [[0, 2, 1]]


@pytest.mark.usefixtures("isa", "two_threads")
def test_a_row_does_not_depend_on_its_neighbours(rng):
    logits, chosen = randn(20, 3000, rng=rng), torch.arange(20)
    whole = logprobs(KERNELS, logits, chosen, 4)
    alone = logprobs(KERNELS, logits[13:14], chosen[13:14], 4)
    assert_same_bits(alone.chosen_logprobs, whole.chosen_logprobs[13:14])
    assert_same_bits(alone.top_logprobs, whole.top_logprobs[13:14])


def test_ids_outside_the_vocabulary_are_refused(rng):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        logprobs(KERNELS, randn(1, 5, rng=rng), torch.tensor([5]), 0)
