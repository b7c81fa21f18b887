from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.sampling.mask import TokenMasks, mask_tokens_, mask_tokens_reference
from tests.runtime.ops.helpers import KERNELS, randn


def random_masks(rng: torch.Generator, num_rows: int, vocab_size: int) -> TokenMasks:
    rows = torch.randperm(num_rows, generator=rng)[: num_rows - 1]
    bits = torch.randint(-(2**31), 2**31, (len(rows), -(-vocab_size // 32)), generator=rng, dtype=torch.int64).int()
    return TokenMasks(rows, bits)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 50, 2049])
def test_matches_reference(rng, vocab_size):
    logits, masks = randn(5, vocab_size, rng=rng), random_masks(rng, 5, vocab_size)
    expected = mask_tokens_reference(logits, masks)
    assert mask_tokens_(KERNELS, logits, masks) is logits
    assert torch.equal(logits, expected)


def test_only_the_named_rows_change(rng):
    logits = randn(3, 40, rng=rng)
    masks = TokenMasks(torch.tensor([1]), torch.tensor([[0b100, 0]], dtype=torch.int32))
    masked = mask_tokens_(KERNELS, logits.clone(), masks)
    assert torch.equal(masked[[0, 2]], logits[[0, 2]])
    assert masked[1].isfinite().nonzero().tolist() == [[2]]
