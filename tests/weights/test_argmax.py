"""The best output of each row: the very bits that are found among all outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardline.runtime.ops.sampling.sample import find_best
from shardline.weights.base import weight_format
from tests.ops.helpers import KERNELS, assert_same_bits, randn


def check(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    head = weight_format(name).pack_lm_head(KERNELS, weight)
    logits = head(x, bias, out_dtype=torch.float32)
    best = head.argmax(x, bias)
    assert_same_bits(best, find_best(KERNELS, logits))
    ids = best[:, 1].contiguous().view(torch.int32).long()
    assert torch.equal(ids, torch.stack([_first_largest(row) for row in logits]))
    return ids


def _first_largest(row: Tensor) -> Tensor:
    """The lowest index of the largest number; 0 where there are no numbers."""
    return (row == row[~row.isnan()].amax()).int().argmax() if not row.isnan().all() else torch.tensor(0)


@pytest.mark.parametrize("name", ["plain", "int8"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 1), (3, 77, 63), (7, 100, 64), (9, 40, 65), (250, 130, 1000)])
@pytest.mark.usefixtures("isa")
def test_bits_of_all_outputs(dtype, rng, name, with_bias, m, k, n):
    x, weight = randn(m, k, dtype=dtype, rng=rng), randn(n, k, dtype=dtype, rng=rng)
    check(name, x, weight, randn(n, dtype=dtype, rng=rng) if with_bias else None)


@pytest.mark.parametrize("name", ["plain", "int8"])
@pytest.mark.usefixtures("isa")
def test_ties_go_to_the_lowest_column(dtype, rng, name):
    x, few = randn(20, 32, dtype=dtype, rng=rng), randn(3, 32, dtype=dtype, rng=rng)
    order = torch.randint(0, 3, (333,), generator=rng)
    ids = check(name, x, few[order], None)
    first = [int((order == kind).int().argmax()) for kind in range(3)]
    assert set(ids.tolist()) <= set(first)
    assert len(set(ids.tolist())) > 1


@pytest.mark.usefixtures("isa")
def test_what_is_no_number_loses(rng):
    """Whole panels and single columns of -inf and NaN, by the bias."""
    x, weight = randn(5, 16, rng=rng), randn(200, 16, rng=rng)
    bias = randn(200, rng=rng)
    bias[3:40:5], bias[64:128], bias[190:] = torch.nan, -torch.inf, torch.nan
    check("plain", x, weight, bias)
    bias[150] = torch.inf
    assert check("plain", x, weight, bias).tolist() == [150] * 5
    bias[:] = -torch.inf
    bias[:70] = torch.nan
    assert check("plain", x, weight, bias).tolist() == [70] * 5
    bias[:] = torch.nan
    assert check("plain", x, weight, bias).tolist() == [0] * 5
