from __future__ import annotations

import torch

from shardline.runtime.ops.sampling.row_digests import row_digests, row_digests_reference
from tests.runtime.ops.helpers import KERNELS, randn


def test_digests_are_those_of_the_reference(rng: torch.Generator) -> None:
    for width in (1, 7, 64, 5001):
        logits = randn(3, width + 9, rng=rng)
        logits[0, 0], logits[1, -1] = torch.nan, -torch.inf
        assert torch.equal(row_digests(KERNELS, logits), row_digests_reference(logits))
        strided = logits[:, :width]
        assert torch.equal(row_digests(KERNELS, strided), row_digests_reference(strided))


def test_every_bit_and_every_place_counts(rng: torch.Generator) -> None:
    logits = randn(1, 300, rng=rng).expand(40, -1).clone()
    bits = logits.view(torch.int32)
    for row in range(32):
        bits[row, 7 * row] ^= torch.tensor(1 << row, dtype=torch.int64).to(torch.int32)
    logits[33, 5], logits[33, 6] = logits[32, 6], logits[32, 5]  # two logits change places
    logits[34, 3:5] *= -1  # two signs
    logits[35, 0] = 0.0
    logits[36, 0] = -0.0
    digests = row_digests(KERNELS, logits).tolist()
    assert len(set(digests[:32] + digests[33:37] + digests[32:33])) == 37
    assert digests[32] == digests[37] == digests[39], "equal rows have equal digests"
