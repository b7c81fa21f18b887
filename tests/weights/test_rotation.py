from __future__ import annotations

import pytest
import torch

from shardline.weights.base import weight_format
from shardline.weights.rotation import num_parts, quantize_rotated, rotate_reference
from shardline.weights.rows import quantize_rows_reference
from tests.runtime.ops.helpers import KERNELS, randn
from tests.weights.test_rows import assert_same

WIDTHS = (1, 2, 12, 24, 40, 80, 96, 576, 896)
"""Of 1 to 32 parts, shorter and longer than a vector."""


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.usefixtures("isa")
def test_matches_reference(dtype, rng, k):
    x = randn(5, k, dtype=dtype, rng=rng) * torch.logspace(-20, 20, 5)[:, None].to(dtype)
    assert_same(quantize_rotated(KERNELS, x), quantize_rows_reference(rotate_reference(x)))


@pytest.mark.parametrize("k", WIDTHS)
def test_parts_are_mixed_by_a_hadamard_matrix(rng, k):
    x, parts = randn(3, k, rng=rng), num_parts(k)
    assert k % parts == 0
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(parts)] for i in range(parts)]).double()
    expected = (matrix @ x.double().view(3, parts, -1)).flatten(1)
    assert torch.allclose(rotate_reference(x).double(), expected, rtol=0, atol=1e-5)
    assert rotate_reference(x[:0]).shape == (0, k)


@pytest.mark.usefixtures("isa")
def test_what_is_not_finite_stays_so_and_to_its_row(dtype, rng):
    x = randn(3, 64, dtype=dtype, rng=rng)
    x[1, 40] = float("inf")
    rows = quantize_rotated(KERNELS, x)
    assert rows.scales.isnan().tolist() == [False, True, False]
    assert (rows.values[1] == 0).all()


def test_a_few_large_numbers_cost_the_others_little(rng):
    """Activations of language models have columns that are many times larger than the others."""
    x, weight = randn(64, 1024, rng=rng), randn(256, 1024, rng=rng)
    x[:, [3, 700]] *= 60
    weight[:, [3, 700]] /= 60
    exact = x.double() @ weight.double().T

    def error(name: str) -> float:
        out = weight_format(name).pack_linear(KERNELS, weight)(x).double()
        return float((out - exact).norm() / exact.norm())

    assert error("int8") < 0.06
    assert error("int8_fast") > 0.1
