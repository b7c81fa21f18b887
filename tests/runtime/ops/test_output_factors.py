"""The factors of outputs: against plain torch, and the same bits of a row wherever it is computed."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from shardline.runtime.ops.adapters import output_factors as module
from shardline.runtime.ops.adapters.output_factors import output_factors, output_factors_reference
from tests.runtime.ops.helpers import KERNELS, assert_same_bits, randn

CPU = torch.device("cpu")


@pytest.mark.parametrize(("rows", "inputs", "rank"), [(1, 1, 1), (70, 7, 3), (33, 301, 20)])
def test_against_torch(dtype, rng, rows, inputs, rank):
    base, magnitude = randn(rows, inputs, dtype=dtype, rng=rng), randn(rows, rng=rng)
    down, up = randn(rank, inputs, rng=rng), randn(rows, rank, rng=rng)
    expected = output_factors_reference(base, down, up, 0.7, magnitude)
    torch.testing.assert_close(
        output_factors(KERNELS, CPU, base, down, up, 0.7, magnitude), expected, rtol=1e-4, atol=0
    )
    zero = output_factors(KERNELS, CPU, base * 0, down, up * 0, 0.7, magnitude)
    assert not zero.isfinite().any()


def test_a_row_has_the_same_bits_in_every_part(dtype, rng):
    base, magnitude = randn(61, 95, dtype=dtype, rng=rng), randn(61, rng=rng)
    down, up = randn(9, 95, rng=rng), randn(61, 9, rng=rng)
    expected = output_factors(KERNELS, CPU, base, down, up, 1.3, magnitude)
    for first, last in ((0, 1), (0, 20), (20, 61), (60, 61)):
        rows = slice(first, last)
        own = output_factors(KERNELS, CPU, base[rows], down, up[rows], 1.3, magnitude[rows])
        assert_same_bits(own, expected[rows])
    with patch.object(module, "_CHUNK", 7 * 95):
        assert_same_bits(output_factors(KERNELS, CPU, base, down, up, 1.3, magnitude), expected)
