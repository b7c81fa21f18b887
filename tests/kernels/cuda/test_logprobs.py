from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.sampling.logprobs import Logprobs, logprobs_reference
from tests.kernels.cuda.helpers import KERNELS
from tests.runtime.ops.helpers import assert_same_bits, randn


def logprobs(logits: torch.Tensor, chosen: torch.Tensor, top_n: int) -> Logprobs:
    rows = len(logits)
    floats, ids = torch.full((2, rows), torch.nan), torch.full((rows, top_n), -9)
    result = Logprobs(floats[0], torch.full((rows,), -9), ids, torch.full((rows, top_n), torch.nan))
    KERNELS.logprobs(logits, chosen, top_n, *result)
    return result


@pytest.mark.parametrize("vocab_size", [1, 7, 2048, 5003])
@pytest.mark.parametrize("top_n", [0, 1, 5])
def test_matches_reference(rng, vocab_size, top_n):
    top_n = min(top_n, vocab_size)
    logits = 4 * randn(9, vocab_size, rng=rng)
    logits[:, ::3] = logits[:, ::3].round()  # ties
    chosen = torch.randint(0, vocab_size, (9,), generator=rng)
    actual, expected = logprobs(logits, chosen, top_n), logprobs_reference(logits, chosen, top_n)
    assert torch.equal(actual.top_ids, expected.top_ids)
    assert torch.equal(actual.chosen_ranks, expected.chosen_ranks)
    torch.testing.assert_close(actual.chosen_logprobs, expected.chosen_logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual.top_logprobs, expected.top_logprobs, rtol=1e-6, atol=1e-6)


def test_many_tokens_are_sorted_and_have_the_bits_of_few(rng):
    logits, chosen = 4 * randn(2, 300, rng=rng), torch.tensor([7, 8])
    logits[:, ::3] = logits[:, ::3].round()  # ties
    many, few, expected = (
        logprobs(logits, chosen, 310),
        logprobs(logits, chosen, 9),
        logprobs_reference(logits, chosen, 300),
    )
    assert_same_bits(many.chosen_logprobs, few.chosen_logprobs)
    assert_same_bits(many.top_logprobs[:, :9], few.top_logprobs)
    assert torch.equal(many.top_ids[:, :300], expected.top_ids)
    assert many.top_ids[:, 300:].unique().tolist() == [-1]


def test_banned_tokens_and_an_exhausted_vocabulary():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    result = logprobs(logits, torch.tensor([1]), 4)
    assert result.chosen_logprobs.item() == -torch.inf
    assert result.chosen_ranks.item() == 3
    assert result.top_ids.tolist() == [[0, 2, 1, -1]]
    assert result.top_logprobs[0, 2:].tolist() == [-torch.inf, -torch.inf]


def test_a_row_does_not_depend_on_its_neighbours_or_on_where_it_lies(rng):
    logits, chosen = randn(5, 3010, rng=rng)[:, :3000], torch.arange(5)
    whole = logprobs(logits, chosen, 4)
    alone = logprobs(logits[3:4].contiguous(), chosen[3:4], 3)
    assert_same_bits(alone.chosen_logprobs, whole.chosen_logprobs[3:4])
    assert_same_bits(alone.top_logprobs, whole.top_logprobs[3:4, :3].contiguous())
