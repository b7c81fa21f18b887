"""Roundings of the kernels in bf16, where the interpreter has the hardware's (see conftest)."""

from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops import triton as ops
from shardline.runtime.ops.activation import gated_activation_reference
from shardline.runtime.ops.attention import paged_attention_reference
from shardline.runtime.ops.linear import linear_reference
from shardline.runtime.ops.norm import rms_norm_reference

from ..helpers import assert_close, assert_same_bits, randn
from ..test_attention import attend, random_sequence
from .test_attention import in_one, spread

BF16 = torch.bfloat16


def test_norm_after_addition(rng):
    x, residual, weight = (randn(*shape, dtype=BF16, rng=rng) for shape in ((9, 300), (9, 300), (300,)))
    for offset in (0.0, 1.0):
        out, summed = torch.empty(9, 300, dtype=BF16), torch.empty(9, 300, dtype=BF16)
        ops.rms_norm(x, weight, out, 1e-6, offset, residual, summed)
        assert_same_bits(summed, x + residual)
        assert_close(out, rms_norm_reference(summed, weight, 1e-6, weight_offset=offset))


def test_activation(rng):
    x, out = randn(9, 400, dtype=BF16, rng=rng), torch.empty(9, 200, dtype=BF16)
    ops.activation(x, out, "silu", True)
    assert_close(out, gated_activation_reference(x, "silu"))


def test_linear(rng):
    x, weight, bias = (randn(*shape, dtype=BF16, rng=rng) for shape in ((9, 200), (70, 200), (70,)))
    for dtype in (BF16, torch.float32):
        out = torch.empty(9, 70, dtype=dtype)
        ops.linear(x, weight, bias, out)
        assert_close(out, linear_reference(x, weight, bias, out_dtype=dtype), scale=200**0.5)


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_attention(rng, int8):
    batch = [
        (random_sequence(rng, end, BF16, heads=4, kv_heads=2, dim=32), begin, end)
        for begin, end in [(0, 9), (515, 518)]
    ]
    expected = attend(batch, int8=int8, poison=False, op=paged_attention_reference)
    serial, parallel = attend(batch, int8=int8, op=in_one), attend(batch, int8=int8, op=spread)
    for s, p, e in zip(serial, parallel, expected, strict=True):
        # Weights meet the values in bf16, as in other flash kernels.
        assert (s.double() - e.double()).norm() < 5e-3 * e.double().norm()
        assert_same_bits(p, s)
