from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.sampling.mask import mask_tokens_reference
from tests.kernels.cuda.helpers import KERNELS
from tests.runtime.ops.helpers import randn
from tests.runtime.ops.sampling.test_mask import random_masks


@pytest.mark.parametrize("vocab_size", [31, 1500])
def test_matches_reference(rng, vocab_size):
    logits, masks = randn(4, vocab_size, rng=rng), random_masks(rng, 4, vocab_size)
    expected = mask_tokens_reference(logits, masks)
    KERNELS.mask_tokens(logits, masks.rows, masks.bits)
    assert torch.equal(logits, expected)
