"""The order in which products of bf16 add: models in float64 with a rounding after each addition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardline.weights.formats.plain import Format
from tests.runtime.ops.helpers import KERNELS, assert_same_bits, randn

AMX_STEP = 32
"""How much of K one step of AMX adds."""


def fma(total: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """total + x weights, rounded once to fp32: products of bf16 are exact in float64, and so are these sums."""
    return (total.double() + x.double() * weights.double()).float()


def chain(x: Tensor, weight: Tensor, places: range) -> Tensor:
    """[rows, columns]: a chain of multiply-adds over the places of K, from zero."""
    total = torch.zeros(len(x), len(weight))
    for k in places:
        total = fma(total, x[:, k, None], weight[None, :, k])
    return total


def amx_steps(x: Tensor, weight: Tensor) -> Tensor:
    """[rows, columns]: the sum over steps of (chain of even places + chain of odd places)."""
    depth, total = x.shape[1], torch.zeros(len(x), len(weight))
    for begin in range(0, depth, AMX_STEP):
        end = min(depth, begin + AMX_STEP)
        step = chain(x, weight, range(begin, end, 2)) + chain(x, weight, range(begin + 1, end, 2))
        total = total + step
    return total


@pytest.mark.parametrize("rows", [1, 16, 17, 70])
@pytest.mark.parametrize("depth", [1, 30, 64, 1071])
def test_products_of_bf16(isa: str, rng: torch.Generator, rows: int, depth: int) -> None:
    x = randn(rows, depth, dtype=torch.bfloat16, rng=rng)
    weight = randn(70, depth, dtype=torch.bfloat16, rng=rng)
    actual = Format().pack_linear(KERNELS, weight)(x, out_dtype=torch.float32)
    if isa == "avx512_amx":
        assert_same_bits(actual, amx_steps(x, weight))
    elif isa == "avx512_bf16":  # an instruction for two products: which of them it adds first is the CPU's choice
        pairs = [k ^ 1 for k in range(depth + depth % 2)]
        padded = [torch.nn.functional.pad(operand, (0, depth % 2)) for operand in (x, weight)]
        swapped = chain(padded[0][:, pairs], padded[1][:, pairs], range(len(pairs)))
        in_order = chain(x, weight, range(depth))
        assert torch.equal(actual, in_order) or torch.equal(actual, swapped)
    else:
        assert_same_bits(actual, chain(x, weight, range(depth)))
