"""The best output of each row where some outputs are no numbers; test_contract.py has the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardline.runtime.ops.sampling.sample import find_best
from shardline.weights.base import weight_format
from tests.runtime.ops.helpers import KERNELS, assert_same_bits, randn


def check(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    head = weight_format("plain").pack_lm_head(KERNELS, weight)
    logits = head(x, bias, out_dtype=torch.float32)
    best = head.argmax(x, bias)
    assert_same_bits(best, find_best(KERNELS, logits))
    ids = best[:, 1].contiguous().view(torch.int32).long()
    assert torch.equal(ids, torch.stack([_first_largest(row) for row in logits]))
    return ids


def _first_largest(row: Tensor) -> Tensor:
    """The lowest index of the largest number; 0 where there are no numbers."""
    return (row == row[~row.isnan()].amax()).int().argmax() if not row.isnan().all() else torch.tensor(0)


@pytest.mark.usefixtures("isa")
def test_what_is_no_number_loses(rng):
    """Whole panels and single columns of -inf and NaN, by the bias."""
    x, weight = randn(5, 16, rng=rng), randn(200, 16, rng=rng)
    bias = randn(200, rng=rng)
    bias[3:40:5], bias[64:128], bias[190:] = torch.nan, -torch.inf, torch.nan
    check(x, weight, bias)
    bias[150] = torch.inf
    assert check(x, weight, bias).tolist() == [150] * 5
    bias[:] = -torch.inf
    bias[:70] = torch.nan
    assert check(x, weight, bias).tolist() == [70] * 5
    bias[:] = torch.nan
    assert check(x, weight, bias).tolist() == [0] * 5
