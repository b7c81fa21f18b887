from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.scale import join_columns, scale_rows, scale_rows_reference
from tests.runtime.ops.helpers import KERNELS, assert_same_bits, randn


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("index_dtype", [None, torch.int32, torch.int64])
def test_rows_times_factors(dtype, rng, index_dtype):
    x = randn(9, 50, dtype=dtype, rng=rng)[:, 3:40]
    factors = randn(9 if index_dtype is None else 20, rng=rng)
    positions = None if index_dtype is None else torch.randperm(20, generator=rng)[:9].to(index_dtype)
    assert_same_bits(scale_rows(KERNELS, x, factors, positions), scale_rows_reference(x, factors, positions))
    one = factors[:1]
    assert_same_bits(scale_rows(KERNELS, x, one), scale_rows_reference(x, one))


def test_wrong_factors_are_refused():
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match="factors has shape"):
        scale_rows(KERNELS, x, torch.ones(2))
    with pytest.raises(ValueError, match="a position has no factor"):
        scale_rows(KERNELS, x, torch.ones(2), torch.tensor([0, 1, 2]))


@pytest.mark.usefixtures("isa")
def test_columns_side_by_side(dtype, rng):
    parts = [randn(5, 60, dtype=dtype, rng=rng)[:, 3 : 3 + width] for width in (7, 32, 18)]
    assert_same_bits(join_columns(KERNELS, parts, torch.ones(1)), torch.cat(parts, dim=1))
