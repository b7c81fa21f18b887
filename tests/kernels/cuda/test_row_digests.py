from __future__ import annotations

import torch

from shardline.runtime.ops.sampling.row_digests import row_digests, row_digests_reference
from tests.kernels.cuda.helpers import KERNELS
from tests.runtime.ops.helpers import randn


def test_digests_are_those_of_the_reference(rng):
    logits = randn(3, 2100, rng=rng)
    logits[0, 0], logits[1, -1] = torch.nan, -torch.inf
    assert torch.equal(row_digests(KERNELS, logits), row_digests_reference(logits))
    assert torch.equal(row_digests(KERNELS, logits[:, :1500]), row_digests_reference(logits[:, :1500]))
